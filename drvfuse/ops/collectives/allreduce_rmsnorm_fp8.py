# SPDX-License-Identifier: Apache-2.0
"""`allreduce_rmsnorm_fp8`: all-reduce, optional residual, RMSNorm and FP8 quantisation of rows in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import dtypes
from ...errors import ArgumentError, require_kind
from ...plans import collectives as plans
from ...plans import nodes as shares
from ...plans import push, traffic, tuning
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands, options
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Ready
from ..call.prepared import Direct, Prepared, Schedule
from ..call.results import of_ranks
from ..call.streams import Streams, resolve_streams
from ..call.tracing import CallTrace
from ..call.turns import GroupTurns
from . import multimem, naive, nodes, plan
from .compared import compared
from .kernels import (
    ALGORITHMS,
    INPUT_DTYPES,
    PULL,
    PUSH,
    SCALES_DTYPES,
    CollectiveKernel,
    FusedMultimemParams,
    FusedNodesParams,
    FusedParams,
    FusedPushParams,
)
from .tuned import Tuned

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...trace.buffer import Trace


class NormResult(NamedTuple):
    """Lists with an array per local rank (or bare arrays); `scales` and `residual` are None where there are none.

    Arrays that were given come back as given.
    """

    output: list[Array]
    scales: list[Array] | None
    residual: list[Array] | None


@op
def allreduce_rmsnorm_fp8(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    gammas: ArrayLike | Sequence[ArrayLike],
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    scale_ub: float = math.inf,
    residuals: ArrayLike | Sequence[ArrayLike] | None = None,
    residual_outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    out_dtype: str | DType = "float8_e4m3fn",
    scales_dtype: str | DType = "float32",
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    scales: ArrayLike | Sequence[ArrayLike] | None = None,
    algo: str = "auto",
    use_multimem: bool = False,
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[NormResult]:
    """Sum `inputs` over the ranks, add the residual, normalise each row and quantise it, on every rank.

    `inputs`: a list with one array [..., columns] per local rank, of one shape and dtype (bfloat16, float16 or
    float32), 1 to 16384 columns. `gammas`: one array [columns] per rank, of the inputs' dtype. `residuals`: one array
    per rank, like the inputs. Gammas and residuals are replicated by contract: equal on all ranks, which nothing
    checks. With a `pdl_level` other than OFF gammas may be read before the kernel in front has finished: it must not
    write them.

    For each row, in float32 and in this order: x = the sum over ranks 0, 1, ... from +0; with residuals, x + residual
    rounded to the input dtype, which is also stored in `residual_outputs`; f = 1 / sqrt(mean(x^2) + epsilon);
    y = (x * (gamma + weight_offset)) * f. The scale is min(max|y|, scale_ub) / (largest FP8 value), in `scales_dtype`
    ("float32" or "bfloat16"); the output is y / scale, saturated and rounded once to `out_dtype` ("float8_e4m3fn",
    "float8_e5m2", or the inputs' dtype for no quantisation: then there are no scales). y is about output * scale. A row
    whose scale is 0 has output 0; a row with a NaN has a NaN scale. Every algorithm, rank and batch size gives the same
    bits, but for `use_multimem`.

    `use_multimem=True`: each row is summed through multicast memory by one rank, which normalises it and stores output
    and scale to all ranks, or with residuals the residual's output. It has one form, which `algo` "auto" and
    "two_stage" mean. What `allreduce` says of inputs, of the staging and of the sum holds, so x begins with the sum
    rounded to the inputs' dtype; rows that are no multiple of 16 bytes are staged too. All ranks hold equal bits: those
    of `drvfuse.reference` for the sum that was obtained.

    `outputs`, `scales` [...] and `residual_outputs` are allocated where None. `residual_outputs[i]` may be
    `residuals[i]`; otherwise nothing that is written may share memory with anything. `algo`, `pdl_level`,
    `max_num_blocks`, `streams`, `trace`, arrays and errors are as for `allreduce`.

    Returns (output, scales, residual): lists, or bare arrays if `inputs` is a bare array of the one local rank.
    """
    options.open_group(group)
    options.one_of("algo", algo, ALGORITHMS)
    require_kind("use_multimem", use_multimem, bool, "True or False")
    pdl = options.pdl_level(pdl_level)
    blocks = options.block_limit(max_num_blocks, group.max_blocks)
    traced = CallTrace([rank.device for rank in group], trace, "group") if trace is not None else None
    alone = group.max_blocks_alone if max_num_blocks is None and traced is None else blocks  # a trace is of one grid

    sources = operands.of_ranks(group, "inputs", inputs)
    first = sources[0]
    shape, dtype = first.shape, first.dtype
    options.one_of(f"dtype of {first.name}", dtype.name, INPUT_DTYPES)
    if not shape or not 1 <= shape[-1] <= plans.MAX_COLUMNS:
        raise ArgumentError(first.name, f"of shape {shape}", f"of shape [..., 1 to {plans.MAX_COLUMNS} columns]")
    weights = operands.of_ranks(group, "gammas", gammas, shape[-1:], dtype, "as the inputs require")
    out = dtypes.get(out_dtype, "out_dtype")
    options.one_of("out_dtype", out.name, (*dtypes.FP8, dtype.name))
    scale_type = dtypes.get(scales_dtype, "scales_dtype")
    options.one_of("scales_dtype", scale_type.name, SCALES_DTYPES)
    numbers = (
        options.real("epsilon", epsilon, least=0.0),
        options.real("weight_offset", weight_offset),
        options.real("scale_ub", scale_ub, least=0.0, finite=False),
    )
    quantised = out.fp8_max is not None
    if scales is not None and not quantised:
        raise ArgumentError("scales", "given", f"None: out_dtype {out} is the inputs', so nothing is quantised")
    if residual_outputs is not None and residuals is None:
        raise ArgumentError("residual_outputs", "given", "None, as there are no residuals")

    def given(argument: str, value: Any, of: tuple[int, ...], kind: DType, writable: bool = True) -> list[Operand]:
        if value is None:
            return []
        vectors, why = operands.VECTOR if len(of) == len(shape) else 1, "as the other arguments require"
        return operands.of_ranks(group, argument, value, of, kind, why, alignment=vectors, writable=writable)

    added = given("residuals", residuals, shape, dtype, writable=False)
    wanted = [("outputs", outputs, shape, out)]
    wanted += [("scales", scales, shape[:-1], scale_type)] if quantised else []
    wanted += [("residual_outputs", residual_outputs, shape, dtype)] if added else []
    targets = [given(*one) for one in wanted]
    operands.no_overlap(
        [*sources, *weights, *added],
        [operand for of_ranks in targets for operand in of_ranks],
        list(zip(added, targets[-1], strict=False)),
    )
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if group.link is not None:
        algos = [nodes.algorithm(group, algo, use_multimem)]
    elif use_multimem:
        algos = [multimem.algorithm(group, algo, PULL[1:])]
    elif algo != "auto":
        plan.require_peers(group, algo)
        algos = [algo]
    elif not group.peers_readable:
        algos = ["naive"]
    else:
        sizes = columns * dtype.itemsize, columns * out.itemsize
        best = tuning.fused_algorithm(group.part(Tuned).costs, group.size, *sizes, rows, bool(added))
        algos = [best, "one_stage"]  # which needs less of the workspace, or none

    queues = resolve_streams(group, streams, sources)
    written: dict[str, list[Operand]] = {}
    returned: dict[str, Any] = {}
    bare = operands.is_bare(group, inputs)
    for (argument, value, of, kind), found in zip(wanted, targets, strict=True):
        written[argument], values = of_ranks(group, argument, value, found, of, kind, queues)
        returned[argument] = values[0] if bare else values
    schedule: Schedule | None = None
    text = f"allreduce_rmsnorm_fp8 {algos[0]} of {shape} {dtype}"
    moved: Callable[[], traffic.Traffic] | None = None
    ready: list[Ready] = []
    if rows:
        none = [0] * len(sources)
        each = sources, weights, added, *(written.get(name) for name in _WRITTEN)
        arrays = list(map(_Addresses, *([o.ptr for o in of_ranks] if of_ranks else none for of_ranks in each)))

        def scheduled(algo: str) -> tuple[_Call, Schedule, list[Ready]]:
            placed = None
            if use_multimem:
                addresses = [] if plans.ragged(columns, dtype.itemsize) else [source.ptr for source in sources]
                placed = multimem.Placement.of(group, queues, addresses, [], first.array.nbytes)
                staged = placed.staged
            else:
                staged = algo not in (*PUSH, "naive") and not plan.readable_by_peers(group, sources)
            types = dtype, out, scale_type
            limits = blocks, alone
            call = _Call(group, *types, rows, columns, algo, staged, bool(added), *limits, pdl, numbers, traced, placed)
            return call, *call.schedule(arrays)

        call, schedule, ready = plan.first_that_fits(algos, scheduled)
        moved = call.traffic
        text = call.text(shape)
    schedule, ready = compared(group, text, schedule, ready)
    return Prepared(
        "allreduce_rmsnorm_fp8",
        GroupTurns(group),
        NormResult(returned["outputs"], returned.get("scales"), returned.get("residual_outputs")),
        _by_rank(sources, weights, *([added] if added else [])),
        _by_rank(*written.values()),
        schedule,
        queues,
        ready,
        algo=multimem.NAMES[algos[0]] if use_multimem else call.algo if rows else algos[0],
        traffic=moved,
        trace=traced,
    )


def _by_rank(*arguments: list[Operand]) -> list[list[Operand]]:
    return list(map(list, zip(*arguments, strict=True)))


_NUMBERS = ("epsilon", "weight_offset", "scale_ub")
_WRITTEN = ("residual_outputs", "outputs", "scales")


class _Addresses(NamedTuple):
    """The arrays of one rank; 0 where there is none."""

    input: int
    gamma: int
    residual: int
    residual_output: int
    output: int
    scales: int


@dataclass(slots=True)
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
    alone: int
    pdl: PDLLevel
    numbers: tuple[float, float, float]
    trace: CallTrace | None
    multimem: multimem.Placement | None

    @property
    def scale_bytes(self) -> int:
        return self.scales_dtype.itemsize if self.out_dtype.fp8_max is not None else 0

    def text(self, shape: Sequence[int]) -> str:
        """All that must be equal on all ranks, whose inputs have that shape."""
        algo = self.algo if self.multimem is None else multimem.NAMES[self.algo]
        options = [f"allreduce_rmsnorm_fp8 {algo} of {shape} {self.dtype} to {self.out_dtype}"]
        options += [f"{name}={value!r}" for name, value in zip(_NUMBERS, self.numbers, strict=True)]
        if self.scale_bytes:
            options.append(f"scales {self.scales_dtype}")
        options += [word for word, said in (("residuals", self.residual), ("staged", self.staged)) if said]
        return ", ".join(options)

    def traffic(self) -> traffic.Traffic:
        elements = self.rows * self.columns
        nbytes, ranks = elements * self.dtype.itemsize, self.group.layout.inside
        result = elements * self.out_dtype.itemsize + self.rows * self.scale_bytes
        name = self.algo if self.multimem is None else multimem.NAMES[self.algo]
        total = traffic.reading_sources(name, ranks, nbytes, self.staged)
        if self.residual:
            written = traffic.writing_results("one_stage", ranks, result)
            total += traffic.adding_residual(name, ranks, nbytes) + written
        else:
            total += traffic.writing_results(name, ranks, result)
        joined = self.group.link
        return total if joined is None else traffic.of_nodes(self.group.nodes, total, elements, joined.places)

    def schedule(self, arrays: Sequence[_Addresses]) -> tuple[Schedule, list[Ready]]:
        inputs = [of_rank.input for of_rank in arrays]
        if self.algo == "naive":
            return self._naive(arrays, inputs)
        if self.group.link is not None:
            return self._across_nodes(arrays)
        table = plan.sources(self.group, inputs, self.multimem is not None)
        ready = self._ready([table] * len(arrays), arrays, self.rows)
        if self.multimem is not None:
            self.multimem.point(ready)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, arrays: Sequence[_Addresses], inputs: Sequence[int]) -> tuple[Schedule, list[Ready]]:
        row_bytes, group = self.columns * self.dtype.itemsize, self.group
        slot = plans.naive_slot(group.workspace.payload_bytes, group.size, row_bytes)
        slot = min(slot, self.rows * row_bytes)
        chunks, every = [], []
        for offset in range(0, self.rows * row_bytes, slot):
            nbytes = min(slot, self.rows * row_bytes - offset)
            part = [self._from_row(of_rank, offset // row_bytes) for of_rank in arrays]
            table = [naive.sources(group, position, a.input, slot) for position, a in enumerate(part)]
            ready = self._ready(table, part, nbytes // row_bytes)
            chunks.append(naive.Chunk([(offset, nbytes)] * len(ready), [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _across_nodes(self, arrays: Sequence[_Addresses]) -> tuple[Schedule, list[Ready]]:
        group, width = self.group, plans.PACK_BYTES // self.dtype.itemsize
        row_packs, results = -(-self.columns // width), self.dtype if self.residual else self.out_dtype
        result = plans.result_bytes(row_packs * width * results.itemsize)
        share = shares.Share(row_packs, width, result, group.layout.inside, nodes.link(group).places, self.staged)
        steps, every = [], []
        for chunk in shares.chunks(self.rows, share, group.workspace.payload_bytes):
            part = [self._from_row(of_rank, chunk.first) for of_rank in arrays]
            tensor = nodes.Tensor(self.dtype, self.columns, row_packs)
            inputs = [of_rank.input for of_rank in part]
            before = nodes.sums(group, tensor, chunk, inputs, self.blocks, self.pdl, self.trace)
            after = self._ready([[]] * len(part), part, chunk.items)
            nodes.point(group, after, chunk)
            steps.append(nodes.Step.of(group, chunk, before, after))
            every += [*before, *after]
        return nodes.AcrossNodes(group, steps), every

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

    def _ready(self, table: Sequence[Sequence[int]], arrays: Sequence[_Addresses], rows: int) -> list[Ready]:
        """Launches for `rows` rows at `arrays`; `table[i]` are the addresses that rank i sums."""
        types = self.dtype.name, self.out_dtype.name, self.scales_dtype.name
        options = (self.staged, self.residual, self.blocks, self.alone, self.multimem is not None)
        key = ("fused", self.algo, types, rows, self.columns, *options)
        inputs = [own.input for own in arrays]
        found = plan.take(self.group, key, lambda: self._plan(rows), table, inputs, self.pdl, self.trace)
        for one, own in zip(found, arrays, strict=True):
            for field, address in zip(own._fields[1:], own[1:], strict=True):
                one.point(field, address)
            parameters = one.parameters
            parameters.epsilon, parameters.weight_offset, parameters.scale_ub = self.numbers
        return found

    def _plan(self, rows: int) -> plan.Plan:
        group, algo = self.group, "one_stage" if self.algo == "naive" else self.algo
        itemsize = self.dtype.itemsize
        spec = CollectiveKernel(
            op="allreduce_rmsnorm_fp8",
            algo=algo,
            dtype=self.dtype,
            ranks=group.layout.inside,
            out_dtype=self.out_dtype,
            ragged=plans.ragged(self.columns, itemsize),
            staged=self.staged and group.link is None,
            nodes=group.link is not None,
            local=self.algo == "naive",
            compares=plan.compares(group) and self.algo != "naive" and group.link is None,
            residual=self.residual,
            gamma_dtype=self.dtype,
            scales_dtype=self.scales_dtype if self.scale_bytes else dtypes.get("float32"),
            multimem=self.multimem is not None,
        )
        if spec.pushes:
            nbytes, clusters = group.workspace.payload_bytes, plan.capability(group) >= push.CLUSTER_CAPABILITY
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
            parameters = FusedPushParams(rows=rows, chunk_rows=pushed.chunk, columns=self.columns)
            return plan.push(group, spec, pushed, self.blocks, self.alone, parameters)
        shape = plans.rmsnorm_launch(rows, self.columns, itemsize, spec.ranks, algo, self.blocks)
        spec = replace(spec, packs=shape.packs)
        if spec.nodes:
            largest = -(-rows // spec.ranks)
            return plan.pull(
                spec, shape, rows, largest, FusedNodesParams(rows=rows, chunk_rows=largest, columns=self.columns)
            )
        chunk = plans.rmsnorm_chunk(spec.work, rows, self.columns, group.workspace.payload_bytes)
        if self.multimem is not None:
            self.multimem.make_staging()
        kind = FusedMultimemParams if spec.multimem else FusedParams
        return plan.pull(spec, shape, rows, chunk, kind(rows=rows, chunk_rows=chunk, columns=self.columns))
