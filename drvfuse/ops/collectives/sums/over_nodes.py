# SPDX-License-Identifier: Apache-2.0
"""The partial sums of a reduce-scatter over several nodes: kernels inside the nodes, and the exchange between them.

`plans.nodes_parts` plans which rank sums which parts, and where the sums lie. For the parts of the ranks of each node,
a launch of the one-node reduce-scatter writes float32 sums to the payload. The exchange sends the sums of a part to the
part's owner. The owner's next kernel adds the sums of all nodes, in the order of the nodes, and finishes the part.

Memory ordering. All sums of a rank are written and read on its device, by kernels and exchanges in the order of its
stream. Peers may still read its payload when the previous call has ended, so a call begins with a barrier of the node's
ranks, before any sum is written. The first kernel passes this barrier, or with "push" a separate kernel that does
nothing else. As in a reduce-scatter of one node, no peer reads a rank's input after the rank's kernels are complete.
In an in-place call only a rank itself reads the rows of its input that the outputs overwrite, and the kernel that
overwrites a row comes after those that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .... import dtypes
from ....comm.workspace import PAYLOAD_OFFSET
from ....plans import push
from ....plans import sums as plans
from ....plans.moves_over_nodes import NodeRanks
from ....plans.nodes_parts import ScatterChunk
from ....plans.shared import PACK_BYTES
from ...call.planned import Ready
from ...call.prepared import LaunchSequence
from ..moves.over_nodes import barrier
from ..nodes.stages import AcrossNodes, Bytes, ExchangeAddresses, Kernels, Span, Stage, level_inside, sources_inside
from ..shared import plan
from ..shared.kernel import PUSH
from ..shared.options import CallOptions
from .kernel import SumsKernel
from .params import ScatterParams, ScatterPushParams

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType


def payload(group: Group, rank: int) -> int:
    """Return the address of a rank's payload."""
    return group.workspace.pointers[rank] + PAYLOAD_OFFSET


def area(group: Group, staged: bool) -> int:
    """Return the offset in a payload at which partial sums begin. If inputs are staged, they have the first half."""
    return group.workspace.payload_bytes // 2 // PACK_BYTES * PACK_BYTES if staged else 0


def point(ready: Sequence[Ready], group: Group, chunk: ScatterChunk, skewed: bool = False) -> None:
    """Write the address of the sums of all nodes to the parameters: that of the first element's sum if `skewed`,
    otherwise that of the pack in which this sum lies."""
    for one, rank in zip(ready, group, strict=True):
        call = one.parameters.node
        call.sums = payload(group, rank.index) + chunk.received(0) + (chunk.skew(rank.index) if skewed else 0)
        call.stride, call.nodes = chunk.stride, chunk.nodes


@dataclass(frozen=True)
class PartialSums:
    """How the ranks of a node compute partial sums of inputs of `dtype`: by a reduce-scatter on one node. `form` is the
    all-reduce algorithm that sums in the same way (`shared.split.FORMS`)."""

    options: CallOptions
    dtype: DType
    form: str
    staged: bool

    def sequence(
        self,
        chunks: Sequence[tuple[int, ScatterChunk]],
        inputs: Sequence[int],
        finish: Callable[[int, ScatterChunk], list[Ready]],
    ) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence of a call, and its launches. For each pair in `chunks`, `finish` returns the
        launches that add the nodes' partial sums and write the results."""
        stages, every = self.opening()
        for first, chunk in chunks:
            before, launches = self.stages(chunk, inputs)
            ready = finish(first, chunk)
            stages += [*before, Kernels(ready)]
            every += [*launches, *ready]
        return AcrossNodes(self.options.group, stages), every

    def opening(self) -> tuple[list[Stage], list[Ready]]:
        """Return the stages before the first chunk, and their launches. With a push algorithm and several ranks in a
        node there is one stage, a barrier, because the kernels of a chunk have no barrier before their first store to a
        payload. Otherwise there is no stage."""
        group = self.options.group
        ready = barrier(self.options) if self.form in PUSH and group.layout.inside > 1 else []
        return [Kernels(ready)] if ready else [], ready

    def stages(self, chunk: ScatterChunk, inputs: Sequence[int]) -> tuple[list[Stage], list[Ready]]:
        """Return the stages of a chunk, which end with the exchange, and their launches; `inputs` are addresses of
        whole tensors.
        """
        group, ranks = self.options.group, NodeRanks(self.options.group.layout.of)
        found: list[Stage] = []
        every: list[Ready] = []
        for step in range(ranks.count):
            ready = self._ready(chunk, ranks, step, inputs)
            found.append(Kernels(ready))
            every += ready
        addresses = ExchangeAddresses()
        sent, received = [], []
        for rank in group:
            base, others = addresses.fixed(payload(group, rank.index)), range(1, ranks.count)
            owners = [(ranks.peer(rank.index, step), step) for step in others]
            sent.append(
                [
                    Span(ranks.of[owner], base, chunk.sent(at) + chunk.skew(owner), chunk.sum_bytes(owner))
                    for owner, at in owners
                    if chunk.sum_bytes(owner)
                ]
            )
            own, skew = chunk.sum_bytes(rank.index), chunk.skew(rank.index)
            nodes = [ranks.of[owner] for owner, _ in owners] if own else []
            received.append([Span(node, base, chunk.received(node) + skew, own) for node in nodes])
        found.append(Bytes(group, addresses, sent, received))
        return found, every

    def _ready(self, chunk: ScatterChunk, ranks: NodeRanks, step: int, inputs: Sequence[int]) -> list[Ready]:
        """Return launches that sum the parts of one node's ranks. The node comes `step` nodes after this rank's
        node."""
        common = self.options
        key = ("node_scatter", self.form, self.dtype.name, chunk, step, self.staged, common.blocks, common.alone)
        table = sources_inside(common.group, inputs)
        level = level_inside(common.pdl)
        return plan.take(common.group, key, lambda: self._plan(chunk, ranks, step), table, inputs, level, common.trace)

    def _plan(self, chunk: ScatterChunk, ranks: NodeRanks, step: int) -> plan.Plan:
        common, group, largest = self.options, self.options.group, chunk.largest
        count = largest * chunk.width
        spec = SumsKernel(
            op="reduce_scatter",
            algo=self.form,
            dtype=self.dtype,
            ranks=ranks.inside,
            out_dtype=dtypes.get("float32"),
            ragged=chunk.ragged,
            staged=self.staged,
            compares=plan.compares(group),
        )

        def tailor(parameters: Any, rank: int) -> None:
            node, own = ranks.of[rank], ranks.peer(rank, step)
            parameters.own([chunk.parts[owner] for owner in ranks.nodes[ranks.of[own]]])
            place = chunk.received(node) if step == 0 else chunk.sent(step)
            parameters.output = payload(group, rank) + place + chunk.skew(own)

        if spec.pushes:
            pushed = push.sums_shape(spec.work, count, group.workspace.payload_bytes)
            pushed = replace(pushed, depth=plans.depth(largest))
            spec = replace(spec, threads=pushed.threads, depth=pushed.depth)
            parameters = ScatterPushParams(columns=1, most_packs=largest, chunk_packs=pushed.chunk)
            made = plan.push(group, spec, pushed, common.blocks, common.alone, parameters)
            return replace(made, tailor=tailor)
        shape = plans.launch(count, self.dtype.itemsize, spec.ranks, spec.algo, common.blocks)
        spec = replace(spec, packs=shape.packs)
        staging = area(group, self.staged) or group.workspace.payload_bytes
        chunk_packs = plans.chunk(spec.work, count, staging // ranks.inside)
        pulled = ScatterParams(columns=1, most_packs=largest, chunk_packs=chunk_packs)
        return replace(plan.pull(spec, shape, largest, chunk_packs, pulled), tailor=tailor)
