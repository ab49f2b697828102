# SPDX-License-Identifier: Apache-2.0
"""One fused call: its properties, and the launch sequence that follows from them for each algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from .... import dtypes
from ....plans import nodes as shares
from ....plans import push, traffic
from ....plans import shared as plans
from ....plans.quantisation import Quantisation
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence
from ..nodes import sums as nodes
from ..nodes.stages import AcrossNodes, Stage, link
from ..shared import multimem, naive, plan
from ..shared.kernel import CollectiveKernel
from ..shared.options import CallOptions
from ..shared.params import FusedMultimemParams, FusedNodesParams, FusedParams, FusedPushParams
from .form import NormForm
from .params import params_of

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
class FusedCall:
    """The properties of one fused call that are the same on every rank. `shape` is the shape of the inputs.

    `rows` is the number of rows of the kernel, and `columns` the length of such a row (`FusedRows`). If the rows are
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

    kind: ClassVar[type[CollectiveKernel]] = CollectiveKernel

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
        sent = work.sent_bytes(-(-self.columns * self.dtype.itemsize // plans.PACK_BYTES))
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
        slot = plans.naive_slot(group.workspace.payload_bytes, group.size, row_bytes)
        slot = min(slot, self.rows * row_bytes)
        chunks, every = [], []
        for offset in range(0, self.rows * row_bytes, slot):
            nbytes = min(slot, self.rows * row_bytes - offset)
            first = offset // row_bytes
            part = [self._from_row(of_rank, first) for of_rank in arrays]
            table = [naive.sources(group, position, a.input, slot) for position, a in enumerate(part)]
            ready = self._ready(table, part, nbytes // row_bytes, first)
            chunks.append(naive.Chunk([(offset, nbytes)] * len(ready), [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _across_nodes(self, arrays: Sequence[Addresses]) -> tuple[LaunchSequence, list[Ready]]:
        group, width = self.options.group, plans.PACK_BYTES // self.dtype.itemsize
        row_packs = -(-self.columns // width)
        result = plans.left_bytes(self._kernel().work, self.columns)
        share = shares.Share(row_packs, width, result, group.layout.inside, link(group).places, self.staged)
        stages: list[Stage] = []
        every: list[Ready] = []
        for chunk in shares.chunks(self.rows, share, group.workspace.payload_bytes):
            part = [self._from_row(of_rank, chunk.first) for of_rank in arrays]
            inputs = [of_rank.input for of_rank in part]
            before = nodes.sums_of_rows(self.options, self.dtype, self.columns, row_packs, chunk, inputs)
            after = self._ready([[]] * len(part), part, chunk.items, chunk.first)
            nodes.point(group, after, chunk)
            stages += nodes.stages(group, chunk, before, after)
            every += [*before, *after]
        return AcrossNodes(group, stages), every

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
            parameters.scale_ub = self.quantisation.given
            if self.form.has_more:
                parameters.all_rows, parameters.first_row = self.rows, first
        return found

    def _kernel(self) -> CollectiveKernel:
        """Return the kernel, with the defaults for all fields that depend on the number of rows."""
        across = self.options.group.link is not None
        return self.kind(
            op="allreduce_rmsnorm_fp8",
            algo="one_stage" if self.algo == "naive" else self.algo,
            dtype=self.dtype,
            ranks=self.options.group.layout.inside,
            out_dtype=self.out_dtype,
            ragged=plans.ragged(self.columns, self.dtype.itemsize),
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

        def parameters(kind: type[FusedParams], chunk: int) -> FusedParams:
            return params_of(kind, self.form)(rows=rows, chunk_rows=chunk, columns=self.columns)

        if spec.pushes:
            nbytes, clusters = common.group.workspace.payload_bytes, self.clusters
            pushed = push.fused_shape(spec.work, rows, self.columns, nbytes, clusters)
            spec = replace(
                spec,
                packs=pushed.packs,
                threads=pushed.threads,
                cluster=pushed.cluster,
                exact=pushed.exact,
                depth=pushed.depth,
                relays=pushed.relays,
            )
            made = parameters(FusedPushParams, pushed.chunk)
            return plan.push(common.group, spec, pushed, common.blocks, common.alone, made)
        shape = plans.rmsnorm_launch(rows, self.columns, self.dtype.itemsize, spec.ranks, spec.algo, common.blocks)
        spec = replace(spec, packs=shape.packs)
        if spec.nodes:
            largest = -(-rows // spec.ranks)
            return plan.pull(spec, shape, rows, largest, parameters(FusedNodesParams, largest))
        chunk = plans.rmsnorm_chunk(spec.work, rows, self.columns, common.group.workspace.payload_bytes)
        if self.multimem is not None:
            self.multimem.make_staging()
        return plan.pull(
            spec, shape, rows, chunk, parameters(FusedMultimemParams if spec.multimem else FusedParams, chunk)
        )
