# SPDX-License-Identifier: Apache-2.0
"""One reduce-scatter with norm: its properties, and the launch sequence that follows from them for each algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ....plans import nodes_parts as shares
from ....plans import push, traffic
from ....plans import shared as plans
from ....plans import sums as scatter
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence
from ..nodes import parts as node_scatter
from ..nodes.stages import AcrossNodes, Kernels
from ..shared import naive, plan
from ..shared.kernel import CollectiveKernel
from ..shared.params import FusedParams
from ..shared.split import ROW_FORMS
from ..sums.scatter_kernel import (
    FusedScatterNodesParams,
    FusedScatterParams,
    FusedScatterPushParams,
    RowParts,
    ScatterKernel,
)
from .call import Addresses, FusedCall
from .params import params_of


@dataclass(frozen=True)
class FusedScatterCall(FusedCall):
    """The properties of one reduce-scatter with norm that are the same on every rank. `algo` is the algorithm of an
    all-reduce, by which a rank sums its rows (`ROW_FORMS`)."""

    kind: ClassVar[type[CollectiveKernel]] = ScatterKernel

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return next(name for name, form in ROW_FORMS.items() if form == self.algo)

    @property
    def starts(self) -> list[int]:
        """The index of each rank's first row, followed by the number of all rows."""
        return list(itertools.accumulate(self.counts, initial=0))

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        return f"{super().text}, splits {list(self.counts)}"

    def traffic(self) -> traffic.Traffic:
        rows = sum(self.counts)
        elements = rows * self.columns
        nbytes = elements * self.dtype.itemsize
        written = rows * (self.output_bytes + self.scale_bytes)
        written += nbytes if self.form.normed else 0
        written += 2 * elements * self.residual_dtype.itemsize if self.residual else 0
        layout = self.options.group.layout
        if self.options.group.link is None:
            summed = scatter.traffic(self.name, layout.inside, nbytes, self.staged)
        else:
            size = self.dtype.itemsize
            summed = shares.traffic(self.name, layout.count, layout.inside, elements, size, self.staged)
        return summed + traffic.Traffic(written, 0)

    def sequence(self, arrays: Sequence[Addresses]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence of a call with at least one row, and the launches in it. `arrays[i]` has the
        addresses for local rank i."""
        inputs = [of_rank.input for of_rank in arrays]
        if self.algo == "naive":
            return self._naive(arrays, inputs)
        if self.options.group.link is not None:
            return self._across_nodes(arrays)
        table = plan.sources(self.options.group, inputs, False)
        ready = self._ready([table] * len(arrays), arrays, self.rows)
        self._have_rows(ready, [self.counts[rank.index] for rank in self.options.group])
        return Direct([one.launch for one in ready]), ready

    def _naive(self, arrays: Sequence[Addresses], inputs: Sequence[int]) -> tuple[LaunchSequence, list[Ready]]:
        group, row_bytes, starts = self.options.group, self.columns * self.dtype.itemsize, self.starts
        slot = plans.naive_slot(group.workspace.payload_bytes, group.size, row_bytes)
        step = min(slot // row_bytes, self.rows)
        slot = step * row_bytes
        chunks, every = [], []
        for done in range(0, self.rows, step):
            counts = [max(0, min(step, self.counts[rank.index] - done)) for rank in group]
            offsets = [(starts[rank.index] + done) * row_bytes for rank in group]
            part = [self._from_row(of_rank, done)._replace(input=of_rank.input) for of_rank in arrays]
            table = [
                naive.sources(group, position, inputs[position] + offset, slot, offset)
                for position, offset in enumerate(offsets)
            ]
            ready = self._ready(table, part, self.rows, done)
            self._have_rows(ready, counts)
            for rank, one in zip(group, ready, strict=True):
                one.parameters.parts.starts[rank.index] = starts[rank.index] + done
            copies = [(offset, count * row_bytes) for offset, count in zip(offsets, counts, strict=True)]
            chunks.append(naive.Chunk(copies, [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _across_nodes(self, arrays: Sequence[Addresses]) -> tuple[LaunchSequence, list[Ready]]:
        group, inputs = self.options.group, [of_rank.input for of_rank in arrays]
        sums = node_scatter.PartialSums(self.options, self.dtype, self.algo, self.staged)
        stages, every = sums.opening()
        width, nbytes = plans.PACK_BYTES // self.dtype.itemsize, group.workspace.payload_bytes
        area = node_scatter.area(group, self.staged)
        chunks = shares.row_chunks(self.counts, self.columns, width, group.nodes, area, nbytes)
        for first, chunk in chunks:
            before, launches = sums.stages(chunk, inputs)
            part = [self._from_row(of_rank, first) for of_rank in arrays]
            rows = [(end - begin) // self.columns for begin, end in chunk.parts]
            ready = self._ready([[]] * len(part), part, max(rows), first)
            self._have_rows(ready, [rows[rank.index] for rank in group])
            node_scatter.point(ready, group, chunk, skewed=True)
            stages += [*before, Kernels(ready)]
            every += [*launches, *ready]
        return AcrossNodes(group, stages), every

    def _kernel(self) -> CollectiveKernel:
        """Return the kernel, with the defaults for all fields that depend on the number of rows. Over several nodes it
        is the kernel that adds the nodes' partial sums."""
        if self.options.group.link is None:
            return super()._kernel()
        finishing = replace(self, algo="naive", staged=False)
        return replace(FusedCall._kernel(finishing), ranks=1)

    def _have_rows(self, ready: Sequence[Ready], counts: Sequence[int]) -> None:
        """Write to the parameters how many rows each rank gets: in this launch (`counts`), and in all launches of the
        call."""
        for rank, one, count in zip(self.options.group, ready, counts, strict=True):
            one.parameters.rows = count
            if self.form.has_more:
                one.parameters.all_rows = self.counts[rank.index]

    def _key(self, rows: int) -> tuple[object, ...]:
        """Return everything that the plan for this number of rows depends on, except the group."""
        return (*super()._key(rows), self.counts)

    def _plan(self, rows: int) -> plan.Plan:
        common, spec = self.options, self._kernel()
        parts = RowParts(most=rows)
        if not spec.nodes:
            parts.starts[: len(self.counts) + 1] = self.starts

        def parameters(kind: type[FusedParams], chunk: int) -> FusedParams:
            return params_of(kind, self.form)(chunk_rows=chunk, columns=self.columns, parts=parts)

        nbytes = common.group.workspace.payload_bytes
        if spec.nodes:
            shape = plans.rmsnorm_launch(rows, self.columns, self.dtype.itemsize, 1, spec.algo, common.blocks)
            made = parameters(FusedScatterNodesParams, 1)
            return plan.pull(replace(spec, packs=shape.packs), shape, rows, 1, made)
        if spec.pushes:
            pushed = push.fused_shape(spec.work, rows, self.columns, nbytes, self.clusters)
            packs, threads, cluster = pushed.packs, pushed.threads, pushed.cluster
            spec = replace(spec, packs=packs, threads=threads, cluster=cluster, exact=pushed.exact)
            made = parameters(FusedScatterPushParams, pushed.chunk)
            return plan.push(common.group, spec, pushed, common.blocks, common.alone, made)
        shape = plans.rmsnorm_launch(rows, self.columns, self.dtype.itemsize, spec.ranks, spec.algo, common.blocks)
        chunk = plans.rmsnorm_chunk(spec.work, rows, self.columns, nbytes // common.group.size)
        return plan.pull(replace(spec, packs=shape.packs), shape, rows, chunk, parameters(FusedScatterParams, chunk))
