# SPDX-License-Identifier: Apache-2.0
"""One fused call: its properties, and the launch sequence that follows from them for each algorithm."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from .... import dtypes
from ....plans import push, traffic
from ....plans import rows as plans
from ....plans.limits import ceil_div
from ....plans.nodes import Chunk, Share
from ....plans.quantisation import Quantisation
from ....plans.shared import PACK_BYTES, naive_slot, ragged
from ...call.operands import Operand
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence, Prepared
from ...call.streams import Streams, resolve_streams
from ..nodes import sums as nodes
from ..nodes.stages import link
from ..shared import multimem, naive, plan
from ..shared.kernel import PUSH
from ..shared.options import CallOptions
from ..shared.prepare import prepare as shared_prepare
from .arguments import InputRows, NormArguments, NormResult, RowsResults
from .kernel import NormForm, RowsKernel
from .params import RowsMultimemParams, RowsNodesParams, RowsParams, RowsPushParams, params_of

if TYPE_CHECKING:
    from ....dtypes import DType


_NUMBERS = ("epsilon", "weight_offset")


class Addresses(NamedTuple):
    """The addresses of one rank's arrays; 0 for an array that the call does not have."""

    input: int
    gamma: int
    residual: int
    residual_output: int
    output: int
    scales: int
    beta: int
    normed_output: int


@dataclass(frozen=True)
class RowsCall:
    """The properties of one fused call that are the same on every rank. `shape` is the shape of the inputs.

    `rows` is the number of rows of the kernel, and `columns` the length of such a row (`InputRows`). If the rows are
    split among the ranks, `counts` has the number of rows of each rank, and `rows` is the largest of these numbers;
    otherwise `counts` is empty.
    """

    options: CallOptions
    shape: tuple[int, ...]
    dtype: DType
    quantisation: Quantisation
    rows: int
    columns: int
    algo: str
    staged: bool
    residual: bool
    gamma_dtype: DType
    form: NormForm
    numbers: tuple[float, float]
    multimem: multimem.Placement | None
    counts: tuple[int, ...]

    op: ClassVar[str] = "allreduce_rmsnorm_fp8"

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return self.algo if self.multimem is None else multimem.NAMES[self.algo]

    @property
    def out_dtype(self) -> DType:
        return self.quantisation.output_dtype(self.dtype)

    @property
    def scales_dtype(self) -> DType:
        return self.quantisation.scales or dtypes.get("float32")

    @property
    def output_bytes(self) -> int:
        """The bytes of a row of the output."""
        return self.quantisation.row_bytes(self.columns, self.dtype)

    @property
    def scale_bytes(self) -> int:
        """The bytes of a row's scales."""
        head = self.form.head or self.columns
        return self.columns // head * self.quantisation.row_scale_bytes(head)

    @property
    def clusters(self) -> bool:
        """Whether the blocks of a cluster may share a row. With heads they may not: each sum is over one head, so a
        cluster would gain nothing."""
        return plan.capability(self.options.group) >= push.CLUSTER_CAPABILITY and not self.form.head

    @property
    def residual_dtype(self) -> DType:
        return self.form.residual or self.dtype

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        options = [f"{self.options.op} {self.name} of {self.shape} {self.dtype} to {self.out_dtype}"]
        options += [f"{name}={np.float32(value)!s}" for name, value in zip(_NUMBERS, self.numbers, strict=True)]
        options.append(f"quantised {self.quantisation}")
        options += [word for word, said in (("residuals", self.residual), ("staged", self.staged)) if said]
        if self.gamma_dtype != self.dtype:
            options.append(f"gammas {self.gamma_dtype}")
        options += self.form.text(self.dtype)
        if (self.form.head or self.columns) != self.shape[-1]:
            options.append(f"heads of {self.form.head or self.columns}")
        return ", ".join(options)

    def traffic(self) -> traffic.Traffic:
        elements = self.rows * self.columns
        nbytes, ranks = elements * self.dtype.itemsize, self.options.group.layout.inside
        result = self.rows * (self.output_bytes + self.scale_bytes)
        if self.form.normed:
            result += nbytes
        name = self.name
        total = traffic.reading_sources(name, ranks, nbytes, self.staged)
        if self.residual:
            written = traffic.writing_results("one_stage", ranks, result)
            total += traffic.adding_residual(name, ranks, elements * self.residual_dtype.itemsize) + written
        else:
            total += traffic.writing_results(name, ranks, result)
            if name == "push_two_shot":
                total += traffic.sending_words(ranks, self.rows * self._padding())
        joined = self.options.group.link
        return total if joined is None else traffic.of_nodes(self.options.group.nodes, total, elements, joined.places)

    def _padding(self) -> int:
        """Return the bytes by which a row of results and its scales grow when they are sent in whole packs and
        words."""
        work = self._kernel().work
        sent = work.sent_bytes(ceil_div(self.columns * self.dtype.itemsize, PACK_BYTES))
        own = self.output_bytes + (self.columns * self.dtype.itemsize if self.form.normed else 0)
        scales = work.sent_scale_bytes(self.columns) - self.scale_bytes if self.scale_bytes else 0
        return sent - own + scales

    def sequence(self, arrays: Sequence[Addresses]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence of a call with at least one row, and the launches in it. `arrays[i]` has the
        addresses for local rank i."""
        inputs = [of_rank.input for of_rank in arrays]
        if self.algo == "naive":
            return self._naive(arrays, inputs)
        if self.options.group.link is not None:
            return self._across_nodes(arrays)
        table = plan.sources(self.options.group, inputs, self.multimem is not None)
        ready = self._ready([table] * len(arrays), arrays, self.rows)
        if self.multimem is not None:
            self.multimem.point(ready)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, arrays: Sequence[Addresses], inputs: Sequence[int]) -> tuple[LaunchSequence, list[Ready]]:
        row_bytes, group = self.columns * self.dtype.itemsize, self.options.group
        nbytes = self.rows * row_bytes
        slot = min(naive_slot(group.workspace.payload_bytes, group.size, row_bytes), nbytes)
        chunks = [[(begin, min(slot, nbytes - begin))] * len(inputs) for begin in range(0, nbytes, slot)]

        def launches(number: int, table: list[list[int]]) -> list[Ready]:
            first, rows = (size // row_bytes for size in chunks[number][0])
            return self._ready(table, [self._from_row(of_rank, first) for of_rank in arrays], rows, first)

        return naive.sequence(group, inputs, slot, chunks, launches, whole=True)

    def _across_nodes(self, arrays: Sequence[Addresses]) -> tuple[LaunchSequence, list[Ready]]:
        group, width = self.options.group, PACK_BYTES // self.dtype.itemsize
        row_packs = ceil_div(self.columns, width)

        def part(chunk: Chunk) -> list[Addresses]:
            return [self._from_row(of_rank, chunk.first) for of_rank in arrays]

        def before(chunk: Chunk) -> list[Ready]:
            own = [of_rank.input for of_rank in part(chunk)]
            return nodes.sums_of_rows(self.options, self.dtype, self.columns, row_packs, chunk, own)

        def after(chunk: Chunk) -> list[Ready]:
            return self._ready([[]] * len(arrays), part(chunk), chunk.items, chunk.first)

        result = plans.left_bytes(self._kernel().work, self.columns)
        share = Share(row_packs, width, result, group.layout.inside, link(group).places, self.staged)
        return nodes.sequence(group, self.rows, share, before, after)

    def _from_row(self, arrays: Addresses, row: int) -> Addresses:
        elements = row * self.columns
        return Addresses(
            input=arrays.input + elements * self.dtype.itemsize,
            gamma=arrays.gamma,
            residual=arrays.residual + elements * self.residual_dtype.itemsize,
            residual_output=arrays.residual_output + elements * self.residual_dtype.itemsize,
            output=arrays.output + row * self.output_bytes,
            scales=arrays.scales + (row * self.scale_bytes if self.form.layout == "row" else 0),
            beta=arrays.beta,
            normed_output=arrays.normed_output + elements * self.dtype.itemsize,
        )

    def _key(self, rows: int) -> tuple[object, ...]:
        """Return everything that the plan for this number of rows depends on, except the group."""
        types = self.dtype.name, self.out_dtype.name, self.scales_dtype.name, self.gamma_dtype.name, self.form
        common = self.options
        options = (self.staged, self.residual, common.blocks, common.alone, self.multimem is not None)
        return ("fused", self.algo, types, rows, self.columns, *options)

    def _ready(
        self, table: Sequence[Sequence[int]], arrays: Sequence[Addresses], rows: int, first: int = 0
    ) -> list[Ready]:
        """Return launches for `rows` rows from row `first` on, whose addresses are `arrays`; rank i sums from the
        addresses `table[i]`."""
        inputs = [own.input for own in arrays]
        group, pdl, trace = self.options.group, self.options.pdl, self.options.trace
        found = plan.take(group, self._key(rows), lambda: self._plan(rows), table, inputs, pdl, trace)
        fields = Addresses._fields[1 : None if self.form.has_more else -2]
        for one, own in zip(found, arrays, strict=True):
            for field, address in zip(fields, own[1:], strict=False):
                one.point(field, address)
            parameters = one.parameters
            parameters.epsilon, parameters.weight_offset = self.numbers
            parameters.given = self.quantisation.given
            if self.form.has_more:
                parameters.all_rows, parameters.first_row = self.rows, first
        return found

    def _kernel(self) -> RowsKernel:
        """Return the kernel, with the defaults for all fields that depend on the number of rows."""
        across = self.options.group.link is not None
        return RowsKernel(
            op=self.op,
            algo="one_stage" if self.algo == "naive" else self.algo,
            dtype=self.dtype,
            ranks=self.options.group.layout.inside,
            out_dtype=self.out_dtype,
            ragged=ragged(self.columns, self.dtype.itemsize),
            staged=self.staged and not across,
            nodes=across,
            local=self.algo == "naive",
            compares=plan.compares(self.options.group) and self.algo != "naive" and not across,
            residual=self.residual,
            gamma_dtype=self.gamma_dtype,
            scales_dtype=self.scales_dtype,
            form=self.form,
            multimem=self.multimem is not None,
        )

    def _plan(self, rows: int) -> plan.Plan:
        common, spec = self.options, self._kernel()

        def parameters(kind: type[RowsParams], chunk: int) -> ctypes.Structure:
            return params_of(kind, self.form)(rows=rows, chunk_rows=chunk, columns=self.columns)

        if spec.pushes:
            nbytes, clusters = common.group.workspace.payload_bytes, self.clusters
            pushed = push.rows_shape(spec.work, rows, self.columns, nbytes, clusters)
            spec = replace(
                spec,
                packs=pushed.packs,
                threads=pushed.threads,
                cluster=pushed.cluster,
                exact=pushed.exact,
                depth=pushed.depth,
                relays=pushed.relays,
            )
            made = parameters(RowsPushParams, pushed.chunk)
            return plan.push(common.group, spec, pushed, common.blocks, common.alone, made)
        shape = plans.launch(rows, self.columns, self.dtype.itemsize, spec.ranks, spec.algo, common.blocks)
        spec = replace(spec, packs=shape.packs)
        if spec.nodes:
            largest = ceil_div(rows, spec.ranks)
            return plan.pull(spec, shape, rows, largest, parameters(RowsNodesParams, largest))
        chunk = plans.chunk(spec.work, rows, self.columns, common.group.workspace.payload_bytes)
        if self.multimem is not None:
            self.multimem.make_staging()
        return plan.pull(
            spec, shape, rows, chunk, parameters(RowsMultimemParams if spec.multimem else RowsParams, chunk)
        )


def prepare(
    kind: type[RowsCall],
    common: CallOptions,
    rows: InputRows,
    norm: NormArguments,
    quantisation: Quantisation,
    results: RowsResults,
    algos: Sequence[str],
    streams: Streams,
    bare: bool,
    use_multimem: bool = False,
) -> Prepared[NormResult]:
    """Prepare a call of the class `kind` by the first of `algos` for which the workspace is large enough. `bare`: the
    call returns bare arrays in place of lists."""
    group, sources, dtype = common.group, rows.inputs, rows.dtype
    queues = resolve_streams(group, streams, sources)
    written, result = results.allocate(group, queues, bare)
    added = norm.residuals
    form = NormForm(
        kind=quantisation.kind if quantisation.kind in ("static", "group") else "",
        group=quantisation.group,
        layout=quantisation.layout,
        head=rows.head,
        residual=added[0].dtype if added and added[0].dtype != dtype else None,
        layer=norm.layer,
        beta=bool(norm.betas),
        normed=results.normed,
    )

    def make(algo: str) -> RowsCall:
        placed = None
        if use_multimem:
            whole = not ragged(rows.columns, dtype.itemsize)
            addresses = [source.ptr for source in sources] if whole and rows.rows else []
            placed = multimem.Placement.of(group, queues, addresses, [], sources[0].array.nbytes)
            staged = placed.staged
        else:
            pulls = algo not in (*PUSH, "naive") and rows.rows > 0
            staged = pulls and not plan.readable_by_peers(group, sources)
        return kind(
            options=common,
            shape=sources[0].shape,
            dtype=dtype,
            quantisation=quantisation,
            rows=max(rows.counts, default=rows.rows),
            columns=rows.columns,
            algo=algo,
            staged=staged,
            residual=bool(added),
            gamma_dtype=norm.gammas[0].dtype,
            form=form,
            numbers=norm.numbers,
            multimem=placed,
            counts=rows.counts,
        )

    lacking: list[Operand] = []
    named = written.get("residual_outputs", lacking), written["outputs"], written.get("scales", lacking)
    each = sources, norm.gammas, added, *named, norm.betas, written.get("normed_outputs", lacking)
    arrays = []
    for position in range(len(sources)):
        arrays.append(Addresses(*[of_ranks[position].ptr if of_ranks else 0 for of_ranks in each]))
    return shared_prepare(
        common,
        algos,
        make,
        (lambda call: call.sequence(arrays)) if rows.rows else None,
        result,
        list(zip(sources, *norm.arrays, strict=True)),
        list(zip(*written.values(), strict=True)),
        queues,
    )
