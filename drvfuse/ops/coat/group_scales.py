# SPDX-License-Identifier: Apache-2.0
"""COAT's ops whose results have group scales: the residual add, RMSNorm, and both in one launch.

A group is 1 x QB elements of a row, and its scale is bfloat16. If `most` is the largest magnitude of the group in fp32,
its scale is (most + 1e-10) / fp8_max. Values are divided by the unrounded scale, which is rounded when it is stored.
NaN elements do not enter `most`: they stay NaN, and a group has a NaN scale only if all of its elements are NaN. An
infinite element becomes NaN, and the finite elements of its group become 0. A group of zeros has the scale bf16(1e-10 /
fp8_max).

All calls take drvfuse Arrays or any DLPack or CUDA-array-interface object; all inputs except w may be column slices of
wider arrays. `outputs` are the arrays to write, in the order that each function names, C-contiguous and without
overlap; None allocates them. `stream` is None for the device's own stream, "current" for that of the first argument's
framework, or a stream. The launch does not block and needs no workspace, and can be captured if outputs are given.
Arguments that do not fit raise ArgumentError before any launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ... import dtypes
from ...dtypes import DType
from ...plans.coat_rows import MAX_COLUMNS, RowPlan
from ...plans.definitions import defines
from ...runtime.array import Array
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ...structures import laid_out
from ..call import operands
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.planned import Planned, limits, resident
from ..call.prepared import Prepared
from ..call.results import Wanted
from ..call.streams import StreamArgument
from .fp8_call import Fp8Call, Fp8Params, Options
from .quantised import (
    COAT_WARPS,
    Outputs,
    column_weights,
    group_size,
    matrix_shape,
    quantised_rows,
    require_columns,
    row_outputs,
    weight_type,
)

R = TypeVar("R")


@laid_out("coat/fp8_group_scales.cu")
class GroupParams(Fp8Params):
    """The kernel's parameters."""


@op
def fp8_rmsnorm_pg2pg_forward(
    x: ArrayLike,
    s_x: ArrayLike,
    w: ArrayLike,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Outputs = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, Array, tuple[ArrayLike, Array, int]]]:
    """RMSNorm of x with group scales, whose result has group scales. Returns `(qy, s_y, (w, rstd, num_warps))`.

    x [M, N] or [B, S, N] is FP8, s_x [..., ceil(N / QB)] bfloat16, w [N] bfloat16 or float32. QB is 16, 32, 64 or 128,
    and N at most 32768. qy has x's shape and dtype, and s_y the shape and dtype of s_x. rstd [M] is float32, and has
    the bits that `fp8_rmsnorm_forward` gives. `transpose_output_2d` has no effect, since there is no transpose.

    y = (x * s_x * rstd) * w in fp32. The scale of a group is (most + 1e-10) / fp8_max, where `most` is the group's
    largest |y|; y is divided by that scale and rounded once to FP8, and the scale is stored as bfloat16. NaN elements
    stay NaN and do not enter `most`; a group of NaNs has a NaN scale. An infinite y becomes NaN, and the finite
    elements of its group become 0.

    `outputs` is (qy, s_y, rstd). No workspace is needed. The other options, ownership, streams and errors are those of
    `fp8_rmsnorm_forward`. The rule is `drvfuse.reference.coat_groups.fp8_rmsnorm_pg2pg_forward`.
    """
    given, driver = Options.of(outputs, stream, pdl_level), operands.driver_of(x=x, s_x=s_x, w=w)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    read = {"x": xs, "scales": scales, **column_weights(driver, shape[-1], {"w": w})}
    wanted, epsilon = _norm_outputs(shape, xs.dtype, QB), real("eps", eps, least=0.0)
    call = _call("fp8_rmsnorm_pg2pg_forward", given, read, wanted)
    return _prepared(call, QB, xs.dtype, epsilon, lambda qy, s_y, rstd: (qy, s_y, (w, rstd, COAT_WARPS)))


@op
def fp8_add_Ifp_Ifp_Ofp_Og16(
    x1: ArrayLike,
    x2: ArrayLike,
    fp8type: str | DType,
    QB: int,
    *,
    outputs: Outputs = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, tuple[Array, Array]]]:
    """The residual add: x1 + x2 in bfloat16, and in FP8 with group scales. Returns `(sum, (x, s_x))`.

    x1 and x2 [M, N] or [B, S, N] are bfloat16 and are added in fp32. `fp8type` is "E4M3", "E5M2" or a dtype, QB is 16,
    32, 64 or 128, and N at most 32768. sum and x have the inputs' shape, and s_x is [..., ceil(N / QB)]. x is the fp32
    sum (not the bfloat16 sum), quantised by the rule of `fp8_rmsnorm_pg2pg_forward`. `outputs` is (sum, x, s_x). No
    workspace is needed; the other options, ownership, streams and errors are those of `fp8_rmsnorm_forward`.
    """
    given, driver = Options.of(outputs, stream, pdl_level), operands.driver_of(x1=x1, x2=x2)
    read, shape = _addends(driver, x1, x2, QB)
    target = dtypes.fp8(fp8type, "fp8type")
    call = _call("fp8_add_Ifp_Ifp_Ofp_Og16", given, read, _add_outputs(shape, target, QB))
    return _prepared(call, QB, target, 0.0, lambda total, x, s_x: (total, (x, s_x)))


@op
def fp8_add_rmsnorm_pg2pg_forward(
    x1: ArrayLike,
    x2: ArrayLike,
    fp8type: str | DType,
    w: ArrayLike,
    QB: int,
    eps: float,
    *,
    outputs: Outputs = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, tuple[Array, Array], tuple[Array, Array, tuple[ArrayLike, Array, int]]]]:
    """The residual add and RMSNorm of its result in one launch. Returns `(sum, (x, s_x), (qy, s_y, (w, rstd,
    num_warps)))`.

    The arguments and the bits are those of `fp8_add_Ifp_Ifp_Ofp_Og16(x1, x2, fp8type, QB)` followed by
    `fp8_rmsnorm_pg2pg_forward(x, s_x, w, QB, eps)`, but x is not read again. `outputs` is (sum, x, s_x, qy, s_y, rstd).
    """
    given, driver = Options.of(outputs, stream, pdl_level), operands.driver_of(x1=x1, x2=x2, w=w)
    read, shape = _addends(driver, x1, x2, QB)
    target = dtypes.fp8(fp8type, "fp8type")
    read |= column_weights(driver, shape[-1], {"w": w})
    wanted, epsilon = _add_outputs(shape, target, QB) | _norm_outputs(shape, target, QB), real("eps", eps, least=0.0)

    def result(total: Any, x: Any, s_x: Any, qy: Any, s_y: Any, rstd: Any) -> Any:
        return total, (x, s_x), (qy, s_y, (w, rstd, COAT_WARPS))

    return _prepared(_call("fp8_add_rmsnorm_pg2pg_forward", given, read, wanted), QB, target, epsilon, result)


def _addends(driver: Driver, x1: Any, x2: Any, QB: Any) -> tuple[dict[str, Operand], tuple[int, ...]]:
    group_size(QB)
    first, second = (operands.rows(name, value, driver, ["bfloat16"]) for name, value in (("x1", x1), ("x2", x2)))
    shape = matrix_shape(first)
    operands.require_shape(second, shape, "that of x1")
    return {"a": first, "b": second}, shape


def _groups(shape: tuple[int, ...], QB: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // QB))


def _add_outputs(shape: tuple[int, ...], target: DType, QB: int) -> dict[str, Wanted]:
    """Descriptions of the arrays that the residual addition writes. The keys are the kernel parameters that get their
    addresses."""
    bf16 = dtypes.get("bfloat16")
    return {"sum": ("sum", shape, bf16), "x": ("x", shape, target), "scales": ("s_x", _groups(shape, QB), bf16)}


def _norm_outputs(shape: tuple[int, ...], target: DType, QB: int) -> dict[str, Wanted]:
    scales = "s_y", _groups(shape, QB), dtypes.get("bfloat16")
    return {"qy": ("qy", shape, target), "out_scales": scales, **row_outputs(shape, "rstd")}


def _call(name: str, given: Options, read: dict[str, Operand], wanted: dict[str, Wanted]) -> Fp8Call:
    require_columns(next(iter(read.values())), MAX_COLUMNS)
    return Fp8Call(name, given, read, wanted)


def _prepared(call: Fp8Call, QB: int, fp8: DType, epsilon: float, result: Callable[..., R]) -> Prepared[R]:
    """The prepared call, which returns `result(*outputs)`."""
    add, norm, weight = "a" in call.arrays, "weight" in call.arrays, weight_type(call.arrays)
    # The alignment of scales and rstd does not matter, since they are accessed by single elements.
    aligned = call.aligned("a", "b", "sum", "x", "qy", "weight")

    def plan() -> Planned:
        plan = RowPlan.of(limits(call.device), call.rows, call.columns, 1 if add else 2)
        kinds = defines(dtype=fp8, weight_dtype=weight, group=QB, add=add, norm=norm, aligned=aligned)
        return call.planned(
            "fp8_group_scales",
            kinds + plan.defines,
            lambda kernel: plan.grid(call.rows, resident(kernel, call.device, plan.threads)),
            plan.threads,
            GroupParams(rows=call.rows),
        )

    ready = call.ready(("groups", add, norm, QB, fp8, weight, aligned), plan)
    ready.parameters.epsilon = epsilon
    return call.prepared(ready, result(*call.values), workspace=False)
