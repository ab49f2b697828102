# SPDX-License-Identifier: Apache-2.0
"""`allreduce_rmsnorm_fp8`: all-reduce, optional residual, RMSNorm and FP8 quantisation of rows in one kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import dtypes
from ...errors import ArgumentError
from ...plans import traffic, tuning
from ..call import options, validate
from ..call.options import PDLLevel
from ..call.prepared import Prepared, Schedule, collective
from ..call.results import Results
from ..call.streams import resolve_streams
from ..call.tracing import CallTrace
from ..call.validate import RankArray
from . import kernels, naive, plan

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.kernel import Launch
    from ...trace.buffer import Section, Trace

ALGORITHMS = ("auto", "one_stage", "two_stage", "naive")


class NormResult(NamedTuple):
    """Lists with an array a local rank (or bare arrays); `scales` and `residual` are None where there are none."""

    output: Any
    scales: Any
    residual: Any


@collective
def allreduce_rmsnorm_fp8(
    group: Group,
    inputs: Any,
    gammas: Any,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    scale_ub: float = math.inf,
    residuals: Any = None,
    residual_outputs: Any = None,
    out_dtype: str | DType = "float8_e4m3fn",
    scales_dtype: str | DType = "float32",
    outputs: Any = None,
    scales: Any = None,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Any = None,
    trace: Trace | None = None,
) -> Prepared[NormResult]:
    """Sum `inputs` over the ranks, add the residual, normalise each row and quantise it, on every rank.

    `inputs`: a list with one array [..., columns] a local rank, of one shape and dtype (bfloat16, float16 or float32),
    1 to 16384 columns. `gammas`: one array [columns] a rank, of the inputs' dtype. `residuals`: one array a rank, like
    the inputs. Gammas and residuals are replicated by contract: equal on all ranks, which nothing checks. With a
    `pdl_level` other than OFF gammas may be read before the kernel in front has finished: it must not write them.

    For each row, in float32 and in this order: x = the sum over ranks 0, 1, ... from +0; with residuals, x + residual
    rounded to the input dtype, which is also stored in `residual_outputs`; f = 1 / sqrt(mean(x^2) + epsilon);
    y = (x * (gamma + weight_offset)) * f. The scale is min(max|y|, scale_ub) / (largest FP8 value), in `scales_dtype`
    ("float32" or "bfloat16"); the output is y / scale, saturated and rounded once to `out_dtype` ("float8_e4m3fn",
    "float8_e5m2", or the inputs' dtype for no quantisation: then there are no scales). y is about output * scale. A row
    whose scale is 0 has output 0; a row with a NaN has a NaN scale. Every algorithm, rank and batch size gives the same
    bits.

    `outputs`, `scales` [...] and `residual_outputs` are allocated where None. `residual_outputs[i]` may be
    `residuals[i]`; otherwise nothing that is written may share memory with anything. `algo`, `pdl_level`,
    `max_num_blocks`, `streams`, `trace`, arrays and errors are as for `allreduce`.

    Returns (output, scales, residual): lists, or bare arrays if `inputs` is a bare array of the one local rank.
    """
    group.require_open()
    options.one_of("algo", algo, ALGORITHMS)
    pdl = options.pdl_level(pdl_level)
    blocks = options.block_limit(max_num_blocks, group.max_blocks)
    traced = CallTrace(group, trace) if trace is not None else None

    sources = validate.rank_arrays(group, "inputs", inputs)
    first = sources[0]
    shape, dtype = first.array.shape, first.array.dtype
    options.one_of(f"dtype of {first.name}", dtype.name, kernels.INPUT_DTYPES)
    if not shape or not 1 <= shape[-1] <= kernels.MAX_COLUMNS:
        raise ArgumentError(first.name, f"of shape {shape}", f"of shape [..., 1 to {kernels.MAX_COLUMNS} columns]")
    validate.same_shape(sources, shape, f"that of {first.name}")
    validate.same_dtype(sources, dtype, f"that of {first.name}")
    weights = validate.rank_arrays(group, "gammas", gammas)
    validate.same_shape(weights, shape[-1:], "the columns of the inputs")
    validate.same_dtype(weights, dtype, "that of the inputs")
    out = dtypes.get(out_dtype, "out_dtype")
    options.one_of("out_dtype", out.name, (*kernels.FP8_DTYPES, dtype.name))
    scale_type = dtypes.get(scales_dtype, "scales_dtype")
    options.one_of("scales_dtype", scale_type.name, kernels.SCALES_DTYPES)
    numbers = _Numbers(
        epsilon=options.real("epsilon", epsilon, least=0.0),
        weight_offset=options.real("weight_offset", weight_offset),
        scale_ub=options.real("scale_ub", scale_ub, least=0.0, finite=False),
    )
    quantised = out.fp8_max is not None
    if scales is not None and not quantised:
        raise ArgumentError("scales", "given", f"None: out_dtype {out} is the inputs', so nothing is quantised")
    if residual_outputs is not None and residuals is None:
        raise ArgumentError("residual_outputs", "given", "None, as there are no residuals")

    def given(argument: str, value: Any, of: tuple[int, ...], kind: DType, writable: bool = True) -> list[RankArray]:
        if value is None:
            return []
        vectors = validate.VECTOR_BYTES if len(of) == len(shape) else None
        found = validate.rank_arrays(group, argument, value, alignment=vectors, writable=writable)
        validate.same_shape(found, of, "as the inputs' shape requires")
        validate.same_dtype(found, kind, "as the other arguments require")
        return found

    added = given("residuals", residuals, shape, dtype, writable=False)
    targets = given("outputs", outputs, shape, out)
    scale_targets = given("scales", scales, shape[:-1], scale_type)
    residual_targets = given("residual_outputs", residual_outputs, shape, dtype)
    validate.no_overlap(
        [*sources, *weights, *added],
        [*targets, *scale_targets, *residual_targets],
        list(zip(added, residual_targets, strict=False)),
    )
    rows = math.prod(shape[:-1])
    row_bytes = shape[-1] * dtype.itemsize
    automatic = algo == "auto"
    if algo != "auto":
        plan.require_peers(group, algo)
    elif not group.peers_readable:
        algo = "naive"
    else:
        algo = tuning.fused_algorithm(group.size, rows, row_bytes, bool(added))

    queue_on = resolve_streams(group, streams, sources)
    result = Results(group, "outputs", outputs, targets, shape, out, queue_on)
    scale_result = (
        Results(group, "scales", scales, scale_targets, shape[:-1], scale_type, queue_on) if quantised else None
    )
    residual_result = (
        Results(group, "residual_outputs", residual_outputs, residual_targets, shape, dtype, queue_on)
        if added
        else None
    )

    schedule: Schedule | None = None
    moved = traffic.NONE
    if rows:
        staged = algo != "naive" and not plan.readable_by_peers(group, sources)
        call = _Call(
            group, dtype, out, scale_type, rows, shape[-1], algo, staged, bool(added), blocks, pdl, numbers, traced
        )
        addresses = [
            _Addresses(
                input=source.array.ptr,
                gamma=weights[i].array.ptr,
                residual=added[i].array.ptr if added else 0,
                residual_output=residual_result.operands[i].array.ptr if residual_result is not None else 0,
                output=result.operands[i].array.ptr,
                scales=scale_result.operands[i].array.ptr if scale_result is not None else 0,
            )
            for i, source in enumerate(sources)
        ]
        try:
            schedule = call.schedule(addresses)
        except ArgumentError as error:
            if not automatic or algo != "two_stage" or error.argument != "workspace_bytes":
                raise
            algo = "one_stage"  # which needs less of the workspace, or none
            call = dataclasses.replace(call, algo=algo)
            schedule = call.schedule(addresses)
        moved = call.traffic()
    written = [r for r in (result, scale_result, residual_result) if r is not None]
    return Prepared(
        group,
        "allreduce_rmsnorm_fp8",
        algo,
        NormResult(*(r.returned(inputs) if r is not None else None for r in (result, scale_result, residual_result))),
        [[of_rank[i] for of_rank in (sources, weights, added) if of_rank] for i in range(len(group))],
        [[r.operands[i] for r in written] for i in range(len(group))],
        schedule,
        streams,
        moved,
        trace=traced,
    )


@dataclass(frozen=True)
class _Numbers:
    epsilon: float
    weight_offset: float
    scale_ub: float


@dataclass(frozen=True)
class _Addresses:
    """The arrays of one rank; 0 where there is none."""

    input: int
    gamma: int
    residual: int
    residual_output: int
    output: int
    scales: int


@dataclass(frozen=True)
class _Call:
    """What is the same on every rank of one fused call of at least one row."""

    group: Group
    dtype: DType
    out_dtype: DType
    scales_dtype: DType
    rows: int
    columns: int
    algo: str
    staged: bool
    residual: bool
    blocks: int
    pdl: PDLLevel
    numbers: _Numbers
    trace: CallTrace | None

    @property
    def scale_bytes(self) -> int:
        return self.scales_dtype.itemsize if self.out_dtype.fp8_max is not None else 0

    def traffic(self) -> traffic.Traffic:
        elements = self.rows * self.columns
        nbytes, ranks = elements * self.dtype.itemsize, self.group.size
        result = elements * self.out_dtype.itemsize + self.rows * self.scale_bytes
        total = traffic.reading_sources(self.algo, ranks, nbytes, self.staged)
        if self.residual:
            written = traffic.writing_results("one_stage", ranks, result)
            return total + traffic.adding_residual(self.algo, ranks, nbytes) + written
        return total + traffic.writing_results(self.algo, ranks, result)

    def schedule(self, arrays: Sequence[_Addresses]) -> Schedule:
        inputs = [of_rank.input for of_rank in arrays]
        if self.algo == "naive":
            return self._naive(arrays, inputs)
        return plan.Direct(*self._launches([inputs] * len(arrays), arrays, self.rows))

    def _naive(self, arrays: Sequence[_Addresses], inputs: Sequence[int]) -> Schedule:
        row_bytes = self.columns * self.dtype.itemsize
        slot = min(naive.slot_bytes(self.group, row_bytes), self.rows * row_bytes)
        chunks = []
        for offset in range(0, self.rows * row_bytes, slot):
            nbytes = min(slot, self.rows * row_bytes - offset)
            part = [self._from_row(of_rank, offset // row_bytes) for of_rank in arrays]
            table = [naive.sources(self.group, position, a.input, slot) for position, a in enumerate(part)]
            launches, _ = self._launches(table, part, nbytes // row_bytes)
            chunks.append(naive.Chunk(offset, nbytes, launches))
        return naive.Naive(self.group, inputs, slot, chunks)

    def _from_row(self, arrays: _Addresses, row: int) -> _Addresses:
        elements = row * self.columns
        return _Addresses(
            input=arrays.input + elements * self.dtype.itemsize,
            gamma=arrays.gamma,
            residual=arrays.residual + elements * self.dtype.itemsize,
            residual_output=arrays.residual_output + elements * self.dtype.itemsize,
            output=arrays.output + elements * self.out_dtype.itemsize,
            scales=arrays.scales + row * self.scale_bytes,
        )

    def _launches(
        self, table: Sequence[Sequence[int]], arrays: Sequence[_Addresses], rows: int
    ) -> tuple[list[Launch], int]:
        """Launches for `rows` rows at `arrays`, and the barriers that each passes.

        `table[i]` are the addresses that rank i sums.
        """
        group, kernel_algo = self.group, "one_stage" if self.algo == "naive" else self.algo
        shape = kernels.rmsnorm_launch(rows, self.columns, self.dtype, group.size, kernel_algo, self.blocks)
        spec = kernels.CollectiveKernel(
            op="allreduce_rmsnorm_fp8",
            algo=kernel_algo,
            dtype=self.dtype,
            ranks=group.size,
            out_dtype=self.out_dtype,
            packs=shape.packs,
            ragged=self.columns % (kernels.PACK_BYTES // self.dtype.itemsize) != 0,
            staged=self.staged,
            local=self.algo == "naive",
            residual=self.residual,
            gamma_dtype=self.dtype,
            scales_dtype=self.scales_dtype if self.scale_bytes else dtypes.get("float32"),
        )
        chunk = kernels.rmsnorm_chunk(spec, rows, self.columns, group.workspace.payload_bytes)
        arguments = [
            [
                kernels.FusedParams(
                    call=plan.call_block(group, position, table[position], own.input, self.pdl),
                    gamma=own.gamma,
                    residual=own.residual,
                    residual_output=own.residual_output,
                    output=own.output,
                    scales=own.scales,
                    rows=rows,
                    chunk_rows=chunk,
                    columns=self.columns,
                    epsilon=self.numbers.epsilon,
                    weight_offset=self.numbers.weight_offset,
                    scale_ub=self.numbers.scale_ub,
                )
            ]
            for position, own in enumerate(arrays)
        ]
        sections: list[Section] = []
        if self.trace is not None:
            spec, sections = self.trace.reserve(spec, shape, rows, chunk)
        launches = plan.launches(group, spec, shape, arguments, self.pdl, sections)
        return launches, kernels.barriers(spec, rows, chunk)
