# SPDX-License-Identifier: Apache-2.0
"""`allreduce_rmsnorm_fp8`: all-reduce, optional residual, RMSNorm and FP8 quantisation of rows in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import dtypes
from ...errors import ArgumentError, require_integer, require_kind
from ...plans import collectives as plans
from ...plans import traffic, tuning
from ...plans.quantisation import Quantisation
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands, options
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Ready
from ..call.prepared import Prepared, Schedule
from ..call.results import of_ranks
from ..call.streams import Streams, resolve_streams
from ..call.tracing import CallTrace
from ..call.turns import GroupTurns
from . import multimem, nodes, own_parts, plan
from .compared import compared
from .fused_call import Addresses, FusedCall
from .fused_scatter_call import FusedScatterCall
from .kernels import ALGORITHMS, INPUT_DTYPES, PULL, PUSH, SCALES_DTYPES
from .norm_form import NORMS, NormForm
from .scatter_kernels import ALGORITHMS as SCATTERS
from .scatter_kernels import ROW_FORMS
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
    norm: str = "rms",
    betas: ArrayLike | Sequence[ArrayLike] | None = None,
    head_columns: int | None = None,
    quantisation: Quantisation | None = None,
    out_dtype: str | DType = "float8_e4m3fn",
    scales_dtype: str | DType = "float32",
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    scales: ArrayLike | Sequence[ArrayLike] | None = None,
    normed_outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    algo: str = "auto",
    use_multimem: bool = False,
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[NormResult]:
    """Sum `inputs` over the ranks, add the residual, normalise each row and quantise it, on every rank.

    `inputs`: a list with one array [..., columns] per local rank, of one shape and dtype (bfloat16, float16 or
    float32), 1 to 16384 columns. `gammas`: one array [columns] per rank, of the inputs' dtype or float32. `residuals`:
    one array per rank, of the inputs' shape, in their dtype or float32. Gammas, betas and residuals are replicated by
    contract: equal on all ranks, which nothing checks. With a `pdl_level` other than OFF gammas and betas may be read
    before the kernel in front has finished: it must not write them.

    For each row, in float32 and in this order: x = the sum over ranks 0, 1, ... from +0; with residuals, x + residual
    rounded to the residuals' dtype, which is also stored in `residual_outputs`; f = 1 / sqrt(mean(x^2) + epsilon);
    y = (x * (gamma + weight_offset)) * f. The scale is min(max|y|, scale_ub) / (largest FP8 value), in `scales_dtype`
    ("float32" or "bfloat16"); the output is y / scale, saturated and rounded once to `out_dtype` ("float8_e4m3fn",
    "float8_e5m2", or the inputs' dtype for no quantisation: then there are no scales). y is about output * scale. A row
    whose scale is 0 has output 0; a row with a NaN has a NaN scale. Every algorithm, rank and batch size gives the same
    bits, but for `use_multimem`.

    `norm="layer"`: LayerNorm. x is replaced by x - mean(x) before f is computed, and `betas`, if there are any, are
    added to y: one array per rank, like the gammas. `drvfuse.reference.norms` has the order of all operations.

    `head_columns`: the last dimension is split into heads of so many columns, a number that divides it, and each head
    is a row of its own. Gammas and betas then have the shape [head_columns], and scales [..., heads]. The bits are
    those of the call on arrays of the shape [..., heads, head_columns].

    `quantisation`: how y becomes the output, as `drvfuse.Quantisation` says, which has the shapes of outputs and
    scales too: per group, MXFP8, NVFP4 and others. `out_dtype`, `scales_dtype` and `scale_ub` stand for
    `Quantisation.per_row` and are left out beside it.

    `normed_outputs`: arrays like the inputs for y before quantisation, rounded to the inputs' dtype; what
    `Quantisation.none()` would give as outputs.

    `use_multimem=True`: each row is summed through multicast memory by one rank, which normalises it and stores output
    and scale to all ranks, or with residuals the residual's output. It has one form, which `algo` "auto" and
    "two_stage" mean. What `allreduce` says of inputs, of the staging and of the sum holds, so x begins with the sum
    rounded to the inputs' dtype; rows that are no multiple of 16 bytes are staged too. All ranks hold equal bits: those
    of `drvfuse.reference` for the sum that was obtained.

    `outputs`, `scales` [...] and `residual_outputs` (of the residuals' dtype) are allocated where None.
    `residual_outputs[i]` may be `residuals[i]`; otherwise nothing that is written may share memory with anything.
    `algo`, `pdl_level`, `max_num_blocks`, `streams`, `trace`, arrays and errors are as for `allreduce`.

    Returns (output, scales, residual): lists, or bare arrays if `inputs` is a bare array of the one local rank.
    """
    return prepared(
        group,
        inputs,
        gammas,
        epsilon=epsilon,
        weight_offset=weight_offset,
        scale_ub=scale_ub,
        residuals=residuals,
        residual_outputs=residual_outputs,
        norm=norm,
        betas=betas,
        head_columns=head_columns,
        out_dtype=out_dtype,
        scales_dtype=scales_dtype,
        quantisation=quantisation,
        outputs=outputs,
        scales=scales,
        normed_outputs=normed_outputs,
        algo=algo,
        use_multimem=use_multimem,
        pdl_level=pdl_level,
        max_num_blocks=max_num_blocks,
        streams=streams,
        trace=trace,
    )


def prepared(
    group: Group,
    inputs: Any,
    gammas: Any,
    *,
    epsilon: Any,
    weight_offset: Any,
    scale_ub: Any,
    residuals: Any,
    residual_outputs: Any,
    norm: Any,
    betas: Any,
    head_columns: Any,
    out_dtype: Any,
    scales_dtype: Any,
    quantisation: Any,
    outputs: Any,
    scales: Any,
    normed_outputs: Any,
    algo: Any,
    pdl_level: Any,
    max_num_blocks: Any,
    streams: Streams,
    trace: Trace | None,
    use_multimem: Any = False,
    scatters: bool = False,
    splits: Any = None,
) -> Prepared[NormResult]:
    """The call of `allreduce_rmsnorm_fp8` or, with `scatters`, of `reduce_scatter_rmsnorm_fp8`, checked and planned."""
    options.open_group(group)
    options.one_of("algo", algo, SCATTERS if scatters else ALGORITHMS)
    require_kind("use_multimem", use_multimem, bool, "True or False")
    pdl = options.pdl_level(pdl_level)
    blocks = options.block_limit(max_num_blocks, group.max_blocks)
    traced = CallTrace([rank.device for rank in group], trace, "group") if trace is not None else None
    alone = group.max_blocks_alone if max_num_blocks is None and traced is None else blocks  # a trace is of one grid

    sources = operands.of_ranks(group, "inputs", inputs)
    first = sources[0]
    shape, dtype = first.shape, first.dtype
    options.one_of(f"dtype of {first.name}", dtype.name, INPUT_DTYPES)
    row_shape, columns = _rows(first, head_columns)
    rows, kept, head = math.prod(row_shape), columns, 0  # as the kernel counts them
    if plans.heads_in_warps(math.prod(shape[:-1]), shape[-1], columns, dtype.itemsize):
        rows, kept, head = math.prod(shape[:-1]), shape[-1], columns
    counts: tuple[int, ...] = ()
    whole: Any = shape  # the shape of arrays that have all columns of each row
    each_row: Any = row_shape  # and of what has a value for each
    if scatters:
        heads = row_shape[len(shape) - 1 :]
        counts = own_parts.owned_rows(group, math.prod(shape[:-1]), splits)
        whole = [(counts[rank.index], shape[-1]) for rank in group]
        each_row = [(counts[rank.index], *heads) for rank in group]
        if not head:
            counts = tuple(count * math.prod(heads) for count in counts)  # each head is a row of its own
    either = dict.fromkeys((dtype.name, "float32"))
    weights = _like(group, "gammas", gammas, (columns,), either)
    added = [] if residuals is None else _like(group, "residuals", residuals, whole, either)
    options.one_of("norm", norm, NORMS)
    if betas is not None and norm != "layer":
        raise ArgumentError("betas", "given", 'None, as norm is "rms"')
    shifts = [] if betas is None else _like(group, "betas", betas, (columns,), [weights[0].dtype.name])
    if quantisation is None:
        quantised_as = _per_row(dtype, out_dtype, scales_dtype, scale_ub)
    else:
        require_kind("quantisation", quantisation, Quantisation, "a drvfuse.Quantisation or None")
        if (out_dtype, scales_dtype, scale_ub) != ("float8_e4m3fn", "float32", math.inf):
            expected = "None beside out_dtype, scales_dtype or scale_ub, which it has itself"
            raise ArgumentError("quantisation", "given", expected)
        quantisation.check(columns, dtype)
        quantised_as = quantisation
    out = quantised_as.output_dtype(dtype)
    numbers = (
        options.real("epsilon", epsilon, least=0.0),
        options.real("weight_offset", weight_offset),
    )
    scales_shape = _each(lambda of_rows: quantised_as.scales_shape(of_rows, columns), each_row)
    if scales is not None and scales_shape is None:
        why = "the scale is given" if quantised_as.kind == "static" else f"outputs of {out} are not quantised"
        raise ArgumentError("scales", "given", f"None: {why}")
    if normed_outputs is not None and out == dtype:
        raise ArgumentError("normed_outputs", "given", f"None: outputs of {out} are not quantised")
    if residual_outputs is not None and residuals is None:
        raise ArgumentError("residual_outputs", "given", "None, as there are no residuals")
    wanted = [("outputs", outputs, _each(quantised_as.output_shape, whole), out, operands.VECTOR)]
    if scales_shape is not None and quantised_as.scales is not None:
        wanted.append(("scales", scales, scales_shape, quantised_as.scales, quantised_as.scales_alignment))
    wanted += [("normed_outputs", normed_outputs, whole, dtype, operands.VECTOR)] if normed_outputs is not None else []
    wanted += [("residual_outputs", residual_outputs, whole, added[0].dtype, operands.VECTOR)] if added else []
    targets = [
        []
        if value is None
        else operands.of_ranks(group, argument, value, of, kind, _WHY, alignment=vectors, writable=True)
        for argument, value, of, kind, vectors in wanted
    ]
    operands.no_overlap(
        [*sources, *weights, *shifts, *added],
        [operand for of_ranks in targets for operand in of_ranks],
        list(zip(added, targets[-1], strict=False)),
    )
    form = NormForm(
        kind=quantised_as.kind if quantised_as.kind in ("static", "group") else "",
        group=quantised_as.group,
        layout=quantised_as.layout,
        head=head,
        residual=added[0].dtype if added and added[0].dtype != dtype else None,
        layer=norm == "layer",
        beta=bool(shifts),
        normed=normed_outputs is not None,
    )
    if scatters:
        received = (group.size - 1) * max(counts) * kept * dtype.itemsize
        algos = [ROW_FORMS[name] for name in own_parts.algorithms(group, algo, received, sources)]
    elif group.link is not None:
        algos = [nodes.algorithm(group, algo, use_multimem)]
    elif use_multimem:
        algos = [multimem.algorithm(group, algo, PULL[1:])]
    elif algo != "auto":
        plan.require_peers(group, algo)
        algos = [algo]
    elif not group.peers_readable:
        algos = ["naive"]
    else:
        row_bytes, sent = kept * dtype.itemsize, quantised_as.row_bytes(kept, dtype)
        sent = kept * added[0].dtype.itemsize if added else sent + (row_bytes if form.normed else 0)
        sizes = row_bytes, sent
        best = tuning.fused_algorithm(group.part(Tuned).costs, group.size, *sizes, rows)
        algos = [best, "one_stage"]  # which needs less of the workspace, or none

    chosen = multimem.NAMES[algos[0]] if use_multimem else algos[0]
    queues = resolve_streams(group, streams, sources)
    written: dict[str, list[Operand]] = {}
    returned: dict[str, Any] = {}
    bare = operands.is_bare(group, inputs)
    for (argument, value, of, kind, _), found in zip(wanted, targets, strict=True):
        written[argument], values = of_ranks(group, argument, value, found, of, kind, queues)
        returned[argument] = values[0] if bare else values
    schedule: Schedule | None = None
    made: type[FusedCall] = FusedScatterCall if scatters else FusedCall
    text = f"{made.op} {algos[0]} of {shape} {dtype}"
    more: dict[str, Any] = {"counts": counts} if scatters else {}
    moved: Callable[[], traffic.Traffic] | None = None
    ready: list[Ready] = []
    if rows:
        none = [0] * len(sources)
        results = (written.get(name) for name in ("residual_outputs", "outputs", "scales"))
        each = sources, weights, added, *results, shifts, written.get("normed_outputs")
        arrays = list(map(Addresses, *([o.ptr for o in of_ranks] if of_ranks else none for of_ranks in each)))

        def scheduled(algo: str) -> tuple[FusedCall, Schedule, list[Ready]]:
            placed = None
            if use_multimem:
                addresses = [] if plans.ragged(kept, dtype.itemsize) else [source.ptr for source in sources]
                placed = multimem.Placement.of(group, queues, addresses, [], first.array.nbytes)
                staged = placed.staged
            else:
                staged = algo not in (*PUSH, "naive") and not plan.readable_by_peers(group, sources)
            call = made(
                group=group,
                dtype=dtype,
                quantisation=quantised_as,
                rows=max(counts, default=rows),
                columns=kept,
                algo=algo,
                staged=staged,
                residual=bool(added),
                gamma_dtype=weights[0].dtype,
                form=form,
                blocks=blocks,
                alone=alone,
                pdl=pdl,
                numbers=numbers,
                trace=traced,
                multimem=placed,
                **more,
            )
            return call, *call.schedule(arrays)

        call, schedule, ready = plan.first_that_fits(algos, scheduled)
        moved, chosen = call.traffic, call.name
        text = call.text(shape)
    schedule, ready = compared(group, text, schedule, ready)
    return Prepared(
        made.op,
        GroupTurns(group),
        NormResult(returned["outputs"], returned.get("scales"), returned.get("residual_outputs")),
        _by_rank(*(of_ranks for of_ranks in (sources, weights, shifts, added) if of_ranks)),
        _by_rank(*written.values()),
        schedule,
        queues,
        ready,
        algo=chosen,
        traffic=moved,
        trace=traced,
    )


def _each(function: Callable[[tuple[int, ...]], Any], shapes: Any) -> Any:
    """Of a shape, or a list with that of each in a list of shapes; None where that is None."""
    if not isinstance(shapes, list):
        return function(shapes)
    found = [function(shape) for shape in shapes]
    return None if None in found else found


def _by_rank(*arguments: list[Operand]) -> list[list[Operand]]:
    return list(map(list, zip(*arguments, strict=True)))


_WHY = "as the other arguments require"


def _per_row(dtype: DType, out_dtype: str | DType, scales_dtype: str | DType, scale_ub: float) -> Quantisation:
    """The quantisation by row that these arguments mean for inputs of `dtype`."""
    out = dtypes.get(out_dtype, "out_dtype")
    options.one_of("out_dtype", out.name, (*dtypes.FP8, dtype.name))
    scales = dtypes.get(scales_dtype, "scales_dtype")
    options.one_of("scales_dtype", scales.name, SCALES_DTYPES)
    bound = options.real("scale_ub", scale_ub, least=0.0, finite=False)
    return Quantisation.none() if out == dtype else Quantisation.per_row(out, scales, bound)


def _rows(first: Operand, head_columns: int | None) -> tuple[tuple[int, ...], int]:
    """The shape of the rows of inputs like `first`, one for each scale, and their columns."""
    shape = first.shape
    if head_columns is None:
        if not shape or not 1 <= shape[-1] <= plans.MAX_COLUMNS:
            raise ArgumentError(first.name, f"of shape {shape}", f"of shape [..., 1 to {plans.MAX_COLUMNS} columns]")
        return shape[:-1], shape[-1]
    if not shape or not shape[-1]:
        raise ArgumentError(first.name, f"of shape {shape}", "of shape [..., columns] with at least one column")
    needed = f"None, or a number from 1 to {plans.MAX_COLUMNS} that divides the {shape[-1]} columns"
    columns = require_integer("head_columns", head_columns, needed, 1, plans.MAX_COLUMNS)
    if shape[-1] % columns:
        raise ArgumentError("head_columns", columns, needed)
    return (*shape[:-1], shape[-1] // columns), columns


def _like(group: Group, argument: str, value: Any, shape: Any, names: Iterable[str]) -> list[Operand]:
    """Arrays of that shape (a list: of one for each), one per local rank, of one of the dtypes of these names."""
    found = operands.of_ranks(group, argument, value, shape, None, "as the inputs require")
    if found[0].dtype.name not in names:
        wanted = f"of dtype {' or '.join(names)}, as the inputs require"
        raise ArgumentError(found[0].name, f"of dtype {found[0].dtype}", wanted)
    return found
