# SPDX-License-Identifier: Apache-2.0
"""One all-reduce: its properties, and the launch sequence that follows from them for each algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....errors import CompileError
from ....plans import nodes as shares
from ....plans import push, traffic
from ....plans import shared as plans
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence
from ..nodes import sums as nodes
from ..nodes.stages import AcrossNodes, Stage, link
from ..shared import multimem, naive, plan
from ..shared.epilogue import BoundEpilogue
from ..shared.kernel import CollectiveKernel
from ..shared.options import CallOptions
from ..shared.params import AllreduceMultimemParams, AllreduceNodesParams, AllreduceParams, AllreducePushParams

if TYPE_CHECKING:
    from ....dtypes import DType


@dataclass(frozen=True)
class AllreduceCall:
    """The properties of one all-reduce that are the same on every rank."""

    options: CallOptions
    dtype: DType
    shape: tuple[int, ...]
    algo: str
    staged: bool
    epilogue: BoundEpilogue | None
    multimem: multimem.Placement | None

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return self.algo if self.multimem is None else multimem.NAMES[self.algo]

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        options = [f"allreduce {self.name} of {self.shape} {self.dtype}"]
        if self.epilogue is not None:
            options.append(self.epilogue.described)
        if self.staged:
            options.append("staged")
        if self.multimem is not None and self.multimem.to_outputs:
            options.append("to multicast outputs")
        return ", ".join(options)

    def traffic(self) -> traffic.Traffic:
        group, name = self.options.group, self.name
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        to_outputs = self.multimem is not None and self.multimem.to_outputs
        inside = group.layout.inside
        stored = traffic.writing_results(name, inside, nbytes, to_outputs)
        total = traffic.reading_sources(name, inside, nbytes, self.staged) + stored
        if group.link is None:
            return total
        return traffic.of_nodes(group.nodes, total, math.prod(self.shape), group.link.places)

    def sequence(self, inputs: list[int], outputs: list[int]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence for arrays of at least one element at these addresses, and the launches in it."""
        count = math.prod(self.shape)
        if self.algo == "naive":
            return self._naive(inputs, outputs, count)
        if self.options.group.link is not None:
            return self._across_nodes(inputs, outputs, count)
        table = plan.sources(self.options.group, inputs, self.multimem is not None)
        ready = self._ready([table] * len(inputs), inputs, outputs, 0, count)
        if self.multimem is not None:
            self.multimem.point(ready)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, inputs: list[int], outputs: list[int], count: int) -> tuple[LaunchSequence, list[Ready]]:
        size, group = self.dtype.itemsize, self.options.group
        slot = min(plans.naive_slot(group.workspace.payload_bytes, group.size, plans.PACK_BYTES), count * size)
        chunks, every = [], []
        for offset in range(0, count * size, slot):
            nbytes = min(slot, count * size - offset)
            own = [address + offset for address in inputs]
            table = [naive.sources(group, p, address, slot) for p, address in enumerate(own)]
            to = [address + offset for address in outputs]
            ready = self._ready(table, own, to, offset // size, nbytes // size)
            chunks.append(naive.Chunk([(offset, nbytes)] * len(ready), [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _across_nodes(self, inputs: list[int], outputs: list[int], count: int) -> tuple[LaunchSequence, list[Ready]]:
        group, size, width = self.options.group, self.dtype.itemsize, plans.PACK_BYTES // self.dtype.itemsize
        share = shares.Share(1, width, plans.PACK_BYTES, group.layout.inside, link(group).places, self.staged)
        stages: list[Stage] = []
        every: list[Ready] = []
        for chunk in shares.chunks(-(-count // width), share, group.workspace.payload_bytes):
            first = chunk.first * width
            elements = min(chunk.items * width, count - first)
            own = [address + first * size for address in inputs]
            before = nodes.sums_of_rows(self.options, self.dtype, elements, chunk.items, chunk, own)
            to = [address + first * size for address in outputs]
            after = self._ready([[]] * len(own), own, to, first, elements)
            nodes.point(group, after, chunk)
            stages += nodes.stages(group, chunk, before, after)
            every += [*before, *after]
        return AcrossNodes(group, stages), every

    def _ready(
        self, table: Sequence[Sequence[int]], own: Sequence[int], outputs: Sequence[int], first: int, count: int
    ) -> list[Ready]:
        """Return launches for `count` elements from element `first` on; rank i sums from the addresses `table[i]`."""
        columns = self.shape[-1] if self.shape else 1
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        form = None if self.multimem is None else self.multimem.to_outputs
        common = self.options
        options = (self.staged, common.blocks, common.alone, text, form)
        key = ("allreduce", self.algo, self.dtype.name, count, columns, *options)
        try:
            found = plan.take(
                common.group,
                key,
                lambda: self._plan(count, columns, text),
                table,
                own,
                common.pdl,
                common.trace,
                more,
            )
        except CompileError as error:
            if self.epilogue is None:
                raise
            raise self.epilogue.explained(error) from None
        for one, output in zip(found, outputs, strict=True):
            one.point("output", output)
            one.parameters.first = first
        return found

    def _plan(self, count: int, columns: int, text: str) -> plan.Plan:
        group, algo = self.options.group, "one_stage" if self.algo == "naive" else self.algo
        itemsize = self.dtype.itemsize
        spec = CollectiveKernel(
            op="allreduce",
            algo=algo,
            dtype=self.dtype,
            ranks=group.layout.inside,
            out_dtype=self.dtype,
            ragged=plans.ragged(count, itemsize),
            staged=self.staged and group.link is None,
            nodes=group.link is not None,
            local=self.algo == "naive",
            compares=plan.compares(group) and self.algo != "naive" and group.link is None,
            epilogue=text,
            multimem=self.multimem is not None,
            to_outputs=self.multimem is not None and self.multimem.to_outputs,
        )
        if spec.pushes:
            pushed = push.allreduce_shape(spec.work, count, group.workspace.payload_bytes)
            spec = replace(spec, threads=pushed.threads, exact=pushed.exact, depth=pushed.depth, relays=pushed.relays)
            parameters = AllreducePushParams(count=count, columns=columns, chunk_packs=pushed.chunk)
            return plan.push(group, spec, pushed, self.options.blocks, self.options.alone, parameters)
        shape = plans.allreduce_launch(count, itemsize, spec.ranks, algo, self.options.blocks, spec.multimem)
        spec = replace(spec, packs=shape.packs)
        if spec.nodes:
            largest = -(-count // (plans.PACK_BYTES // itemsize * spec.ranks))
            return plan.pull(
                spec, shape, count, largest, AllreduceNodesParams(count=count, columns=columns, chunk_packs=largest)
            )
        chunk = plans.allreduce_chunk(spec.work, count, group.workspace.payload_bytes)
        if self.multimem is not None and spec.uses_staging:
            self.multimem.make_staging()
        kind = AllreduceMultimemParams if spec.multimem else AllreduceParams
        return plan.pull(spec, shape, count, chunk, kind(count=count, columns=columns, chunk_packs=chunk))
