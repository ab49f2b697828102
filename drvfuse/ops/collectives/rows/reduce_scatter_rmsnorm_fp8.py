# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter_rmsnorm_fp8`: reduce-scatter, optional residual, norm and FP8 quantisation of rows in one kernel."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ....plans import nodes_parts as shares
from ....plans import push, sums, traffic
from ....plans import rows as plans
from ....plans.quantisation import Quantisation
from ....plans.shared import PACK_BYTES, naive_slot
from ....runtime.interop import ArrayLike
from ...call import operands
from ...call.op import op
from ...call.options import PDLLevel
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence, Prepared
from ...call.streams import Streams
from ..shared import naive, plan, split
from ..shared.options import CallOptions
from ..shared.split import ALGORITHMS, ROW_FORMS
from ..sums import over_nodes
from .arguments import InputRows, NormArguments, NormResult, RowsResults, quantisation_of
from .call import Addresses, RowsCall, prepare
from .kernel import RowsKernel
from .params import OwnRowsNodesParams, OwnRowsParams, OwnRowsPushParams, RowParts, RowsParams, params_of

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....trace.buffer import Trace


@dataclass(frozen=True)
class OwnRowsCall(RowsCall):
    """The properties of one reduce-scatter with norm that are the same on every rank. `algo` is the algorithm of an
    all-reduce, by which a rank sums its rows (`ROW_FORMS`)."""

    op: ClassVar[str] = "reduce_scatter_rmsnorm_fp8"

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
            summed = sums.traffic(self.name, layout.inside, nbytes, self.staged)
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
        step = min(naive_slot(group.workspace.payload_bytes, group.size, row_bytes) // row_bytes, self.rows)
        done = range(0, self.rows, step)  # the rows of each rank before each chunk
        counts = [[max(0, min(step, self.counts[rank.index] - rows)) for rank in group] for rows in done]

        def launches(number: int, table: list[list[int]]) -> list[Ready]:
            first = done[number]
            part = [self._from_row(of_rank, first)._replace(input=of_rank.input) for of_rank in arrays]
            ready = self._ready(table, part, self.rows, first)
            self._have_rows(ready, counts[number])
            for rank, one in zip(group, ready, strict=True):
                one.parameters.parts.starts[rank.index] = starts[rank.index] + first
            return ready

        chunks = [
            [
                ((starts[rank.index] + rows) * row_bytes, count * row_bytes)
                for rank, count in zip(group, own, strict=True)
            ]
            for rows, own in zip(done, counts, strict=True)
        ]
        return naive.sequence(group, inputs, step * row_bytes, chunks, launches, whole=False)

    def _across_nodes(self, arrays: Sequence[Addresses]) -> tuple[LaunchSequence, list[Ready]]:
        group, inputs = self.options.group, [of_rank.input for of_rank in arrays]
        partial = over_nodes.PartialSums(self.options, self.dtype, self.algo, self.staged)

        def finish(first: int, chunk: shares.ScatterChunk) -> list[Ready]:
            part = [self._from_row(of_rank, first) for of_rank in arrays]
            rows = [(end - begin) // self.columns for begin, end in chunk.parts]
            ready = self._ready([[]] * len(part), part, max(rows), first)
            self._have_rows(ready, [rows[rank.index] for rank in group])
            over_nodes.point(ready, group, chunk, skewed=True)
            return ready

        width, nbytes = PACK_BYTES // self.dtype.itemsize, group.workspace.payload_bytes
        area = over_nodes.area(group, self.staged)
        chunks = shares.row_chunks(self.counts, self.columns, width, group.nodes, area, nbytes)
        return partial.sequence(list(chunks), inputs, finish)

    def _kernel(self) -> RowsKernel:
        """Return the kernel, with the defaults for all fields that depend on the number of rows. Over several nodes it
        is the kernel that adds the nodes' partial sums."""
        if self.options.group.link is None:
            return super()._kernel()
        finishing = replace(self, algo="naive", staged=False)
        return replace(RowsCall._kernel(finishing), ranks=1)

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

        def parameters(kind: type[RowsParams], chunk: int) -> ctypes.Structure:
            return params_of(kind, self.form)(chunk_rows=chunk, columns=self.columns, parts=parts)

        nbytes = common.group.workspace.payload_bytes
        if spec.nodes:
            shape = plans.launch(rows, self.columns, self.dtype.itemsize, 1, spec.algo, common.blocks)
            made = parameters(OwnRowsNodesParams, 1)
            return plan.pull(replace(spec, packs=shape.packs), shape, rows, 1, made)
        if spec.pushes:
            pushed = push.rows_shape(spec.work, rows, self.columns, nbytes, self.clusters)
            packs, threads, cluster = pushed.packs, pushed.threads, pushed.cluster
            spec = replace(spec, packs=packs, threads=threads, cluster=cluster, exact=pushed.exact)
            made = parameters(OwnRowsPushParams, pushed.chunk)
            return plan.push(common.group, spec, pushed, common.blocks, common.alone, made)
        shape = plans.launch(rows, self.columns, self.dtype.itemsize, spec.ranks, spec.algo, common.blocks)
        chunk = plans.chunk(spec.work, rows, self.columns, nbytes // common.group.size)
        return plan.pull(replace(spec, packs=shape.packs), shape, rows, chunk, parameters(OwnRowsParams, chunk))


@op
def reduce_scatter_rmsnorm_fp8(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    gammas: ArrayLike | Sequence[ArrayLike],
    *,
    epsilon: float,
    splits: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    residuals: ArrayLike | Sequence[ArrayLike] | None = None,
    residual_outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    norm: str = "rms",
    betas: ArrayLike | Sequence[ArrayLike] | None = None,
    head_columns: int | None = None,
    quantisation: Quantisation | None = None,
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    scales: ArrayLike | Sequence[ArrayLike] | None = None,
    normed_outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[NormResult]:
    """Sum `inputs` over the ranks, and on each rank add the residual to its own rows, normalise and quantise these.

    The inputs' leading dimensions are one dimension of rows [rows, columns], which is split as by `reduce_scatter`:
    `splits[r]` are the rows of rank r, and None splits them as equally as possible. All other arrays have only the rows
    of their rank: `residuals`, `residual_outputs`, `outputs` and `normed_outputs` are [rows of the rank, columns], and
    `scales` are those of these rows, with `head_columns` [rows of the rank, heads]. Each row has the bits that
    `allreduce_rmsnorm_fp8` gives it, and the other arguments are those of that op. Residuals are not replicated: the
    `residual_outputs` of one call are the residuals of the next.

    `algo` is "push", "pull", "naive" or "auto", as for `reduce_scatter`, over several nodes too. `pdl_level`,
    `max_num_blocks`, `streams`, `trace`, arrays and errors are as for `allreduce`. The rule, rounding by rounding, is
    `drvfuse.reference.reduce_scatter_rmsnorm_fp8`.

    Returns (output, scales, residual): lists, or bare arrays if `inputs` is a bare array of the one local rank.
    """
    common = CallOptions.of("reduce_scatter_rmsnorm_fp8", group, algo, ALGORITHMS, pdl_level, max_num_blocks, trace)
    rows = InputRows.of(operands.of_ranks(group, "inputs", inputs), head_columns).split(group, splits)
    normed = NormArguments.of(group, rows, norm, gammas, betas, residuals, epsilon, weight_offset)
    quantised = quantisation_of(rows, quantisation)
    results = RowsResults.of(group, rows, normed, quantised, outputs, scales, normed_outputs, residual_outputs)
    received = (group.layout.inside - 1) * max(rows.counts) * rows.input_bytes
    algos = [ROW_FORMS[name] for name in split.algorithms(common.op, group, algo, received, rows.inputs)]
    bare = operands.is_bare(group, inputs)
    return prepare(OwnRowsCall, common, rows, normed, quantised, results, algos, streams, bare)
