# SPDX-License-Identifier: Apache-2.0
"""One reduce-scatter: its properties, and the launch sequence that follows from them for each algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....errors import CompileError
from ....plans import nodes_parts as shares
from ....plans import push, traffic
from ....plans import shared as plans
from ....plans import sums as scatter
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence
from ..nodes import parts as node_scatter
from ..nodes.stages import AcrossNodes, Kernels
from ..shared import naive, plan
from ..shared.epilogue import BoundEpilogue
from ..shared.options import CallOptions
from ..shared.split import FORMS
from .scatter_kernel import Range, ScatterKernel, ScatterNodesParams, ScatterParams, ScatterPushParams

if TYPE_CHECKING:
    from ....dtypes import DType


@dataclass(frozen=True)
class ScatterCall:
    """The properties of one reduce-scatter that are the same on every rank."""

    options: CallOptions
    dtype: DType
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    parts: scatter.Parts
    algo: str
    staged: bool
    epilogue: BoundEpilogue | None

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return self.algo

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        options = [f"reduce_scatter {self.algo} of {self.shape} {self.dtype}, splits {list(self.rows)}"]
        if self.epilogue is not None:
            options.append(self.epilogue.described)
        if self.staged:
            options.append("staged")
        return ", ".join(options)

    def traffic(self) -> traffic.Traffic:
        group, elements = self.options.group, math.prod(self.shape)
        itemsize, layout = self.dtype.itemsize, group.layout
        if group.link is None:
            summed = scatter.traffic(self.algo, group.size, elements * itemsize, self.staged)
        else:
            summed = shares.traffic(self.algo, layout.count, layout.inside, elements, itemsize, self.staged)
        return summed + traffic.Traffic(elements * itemsize, 0)

    def sequence(self, inputs: list[int], outputs: list[int]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence for arrays of at least one element at these addresses, and the launches in it."""
        if self.algo == "naive":
            return self._naive(inputs, outputs)
        if self.options.group.link is not None:
            return self._across_nodes(inputs, outputs)
        table = plan.sources(self.options.group, inputs, False)
        ready = self._ready([table] * len(inputs), inputs, outputs)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, inputs: list[int], outputs: list[int]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence of "naive", in which each rank copies its part from the inputs of the other ranks.
        A copy begins with the pack that holds the first element of the part.
        """
        group, parts, itemsize = self.options.group, self.parts, self.dtype.itemsize
        slot = plans.naive_slot(group.workspace.payload_bytes, group.size, plans.PACK_BYTES)
        packs = min(slot // plans.PACK_BYTES, parts.largest)
        slot = packs * plans.PACK_BYTES
        count = -(-parts.largest // packs)
        ranges = [scatter.naive_chunks(parts, rank.index, packs, count) for rank in group]
        chunks, every = [], []
        for number in range(count):
            bounds = [of_rank[number] for of_rank in ranges]
            offsets = [begin // parts.width * plans.PACK_BYTES for begin, _ in bounds]
            copies = [
                (offset, end * itemsize - offset if begin < end else 0)
                for offset, (begin, end) in zip(offsets, bounds, strict=True)
            ]
            table = [
                naive.sources(group, position, inputs[position] + offset, slot, offset)
                for position, offset in enumerate(offsets)
            ]
            to = [
                address + (begin - parts.starts[rank.index]) * itemsize
                for rank, address, (begin, _) in zip(group, outputs, bounds, strict=True)
            ]
            ready = self._ready(table, inputs, to)
            for rank, one, (begin, end) in zip(group, ready, bounds, strict=True):
                one.parameters.parts[rank.index] = Range(begin, end)
            chunks.append(naive.Chunk(copies, [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _across_nodes(self, inputs: list[int], outputs: list[int]) -> tuple[LaunchSequence, list[Ready]]:
        group, parts = self.options.group, self.parts
        sums = node_scatter.PartialSums(self.options, self.dtype, FORMS[self.algo], self.staged)
        stages, every = sums.opening()
        area = node_scatter.area(group, self.staged)
        for chunk in shares.pack_chunks(parts, group.nodes, area, group.workspace.payload_bytes):
            before, launches = sums.stages(chunk, inputs)
            to = [
                address + (chunk.parts[rank.index][0] - parts.starts[rank.index]) * self.dtype.itemsize
                for rank, address in zip(group, outputs, strict=True)
            ]
            ready = self._ready([[]] * len(inputs), inputs, to, chunk)
            node_scatter.point(ready, group, chunk)
            stages += [*before, Kernels(ready)]
            every += [*launches, *ready]
        return AcrossNodes(group, stages), every

    def _ready(
        self,
        table: Sequence[Sequence[int]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        chunk: shares.ScatterChunk | None = None,
    ) -> list[Ready]:
        """Return launches of all ranks; rank i sums from the addresses `table[i]`. With `chunk`, in a group over
        several nodes, the launches add the nodes' partial sums of that chunk instead."""
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        columns = self.shape[-1]
        common = self.options
        options = (self.staged, common.blocks, common.alone, text)
        key = ("reduce_scatter", self.algo, self.dtype.name, columns, chunk or self.parts.starts, *options)

        def planned() -> plan.Plan:
            return self._plan(columns, text) if chunk is None else self._finishing(columns, text, chunk)

        try:
            found = plan.take(common.group, key, planned, table, inputs, common.pdl, common.trace, more)
        except CompileError as error:
            if self.epilogue is None:
                raise
            raise self.epilogue.explained(error) from None
        for one, output in zip(found, outputs, strict=True):
            one.point("output", output)
        return found

    def _plan(self, columns: int, text: str) -> plan.Plan:
        group, parts, itemsize = self.options.group, self.parts, self.dtype.itemsize
        spec = ScatterKernel(
            op="allreduce",
            algo=FORMS[self.algo],
            dtype=self.dtype,
            ranks=group.size,
            out_dtype=self.dtype,
            ragged=parts.ragged,
            staged=self.staged,
            local=self.algo == "naive",
            compares=plan.compares(group) and self.algo != "naive",
            epilogue=text,
        )
        most = parts.largest
        count = most * parts.width
        common = {"columns": columns, "most_packs": most}
        if spec.pushes:
            pushed = push.allreduce_shape(spec.work, count, group.workspace.payload_bytes)
            pushed = replace(pushed, depth=scatter.depth(most))
            spec = replace(spec, threads=pushed.threads, depth=pushed.depth)
            parameters = ScatterPushParams(**common, chunk_packs=pushed.chunk)
            parameters.own(parts.ranges)
            return plan.push(group, spec, pushed, self.options.blocks, self.options.alone, parameters)
        shape = plans.allreduce_launch(count, itemsize, spec.ranks, spec.algo, self.options.blocks)
        spec = replace(spec, packs=shape.packs)
        chunk = plans.allreduce_chunk(spec.work, count, group.workspace.payload_bytes // group.size)
        pulled = ScatterParams(**common, chunk_packs=chunk)
        pulled.own(parts.ranges)
        return plan.pull(spec, shape, count, chunk, pulled)

    def _finishing(self, columns: int, text: str, chunk: shares.ScatterChunk) -> plan.Plan:
        """Return the plan of the kernel that adds the nodes' partial sums of a chunk."""
        count = chunk.largest * chunk.width
        shape = plans.allreduce_launch(count, self.dtype.itemsize, 1, "one_stage", self.options.blocks)
        spec = ScatterKernel(
            op="allreduce",
            algo="one_stage",
            dtype=self.dtype,
            ranks=1,
            out_dtype=self.dtype,
            packs=shape.packs,
            ragged=chunk.ragged,
            local=True,
            nodes=True,
            epilogue=text,
        )

        def tailor(parameters: Any, rank: int) -> None:
            parameters.call.rank = rank
            parameters.own([chunk.parts[rank]])

        made = plan.pull(spec, shape, count, 1, ScatterNodesParams(columns=columns, most_packs=chunk.largest))
        return replace(made, tailor=tailor)
