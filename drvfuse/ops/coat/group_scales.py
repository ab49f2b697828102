# SPDX-License-Identifier: Apache-2.0
"""The residual add and RMSNorm with group scales as results, under COAT's signatures, and both in one launch.

Group scales are those of 1 x QB elements of a row, bfloat16. For the largest magnitude `most` of a group in fp32, the
scale is (most + 1e-10) / fp8_max; values are divided by it as it is, and it is rounded when it is stored. `most` is
over the numbers of the group: a NaN stays in its element, an infinity makes the finite elements of its group 0 and
itself NaN, and only a group of NaN alone has a NaN scale. A group of zeros has bf16(1e-10 / fp8_max).

All calls take drvfuse Arrays or any DLPack or CUDA-array-interface object; inputs but w may be column slices of wider
arrays. `outputs`: the arrays to write, in the order that each function names, C-contiguous and without overlap with
another; else they are allocated. `stream`: None for the device's own, "current" for that of the first argument's
framework, or a stream. The launch does not block, needs no workspace and can be captured with outputs given.
ArgumentError for arguments that do not fit, before any launch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, TypeVar

from ... import dtypes
from ...dtypes import DType
from ...plans.coat_rows import MAX_COLUMNS, RowPlan
from ...runtime.array import Array
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ..call import operands, results
from ..call.faults import planted
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.planned import PlanCache, Planned, limits, resident
from ..call.prepared import Prepared, on_device, op
from ..call.results import Wanted
from ..call.specialisation import FP8_CAPABILITY, Defines, Specialisation
from ..call.streams import StreamArgument, resolve_stream
from ..call.turns import DeviceTurns
from .quantised import (
    COAT_WARPS,
    Outputs,
    column_weights,
    group_size,
    matrix_shape,
    quantised_rows,
    require_columns,
)

R = TypeVar("R")


class GroupParams(ctypes.Structure):
    """`struct GroupParams` of cu/coat/fp8_group_scales.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("a", "b", "sum", "x", "scales", "weight", "qy", "out_scales", "rstd")),
        *((name, ctypes.c_int64) for name in ("rows", "a_stride", "b_stride", "x_stride", "scale_stride")),
        ("columns", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("early_trigger", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


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
    """RMSNorm of x with group scales in and out: `(qy, s_y, (w, rstd, num_warps))`.

    x [M, N] or [B, S, N] FP8, s_x [..., ceil(N / QB)] bfloat16, w [N] bfloat16 or float32, QB 16, 32, 64 or 128, N at
    most 32768. qy has x's shape and dtype, s_y the shape and dtype of s_x, rstd [M] float32: that of
    `fp8_rmsnorm_forward`, bit for bit. y = (x * s_x * rstd) * w in fp32, its groups quantised as this module says.
    `transpose_output_2d` has no effect: there is no transpose. `outputs` is (qy, s_y, rstd).
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x=x, s_x=s_x, w=w)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    weight = column_weights(driver, w, shape[-1])
    return _prepare(
        "fp8_rmsnorm_pg2pg_forward",
        {"x": xs, "scales": scales, "weight": weight},
        _norm_outputs(shape, xs.dtype, QB),
        outputs,
        (QB, xs.dtype, real("eps", eps, least=0.0)),
        stream,
        level,
        lambda qy, s_y, rstd: (qy, s_y, (w, rstd, COAT_WARPS)),
    )


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
    """The residual add: `(sum, (x, s_x))`, the sum in bfloat16 and quantised with group scales.

    x1 and x2 [M, N] or [B, S, N] bfloat16, added in fp32; `fp8type` "E4M3", "E5M2" or a dtype; QB 16, 32, 64 or 128;
    N at most 32768. sum and x have the inputs' shape, s_x is [..., ceil(N / QB)]. x and s_x are of the fp32 sum, not of
    the rounded one. `outputs` is (sum, x, s_x).
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x1=x1, x2=x2)
    first, second, shape = _addends(driver, x1, x2, QB)
    target = dtypes.fp8(fp8type, "fp8type")
    return _prepare(
        "fp8_add_Ifp_Ifp_Ofp_Og16",
        {"a": first, "b": second},
        _add_outputs(shape, target, QB),
        outputs,
        (QB, target, 0.0),
        stream,
        level,
        lambda total, x, s_x: (total, (x, s_x)),
    )


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
    """`(sum, (x, s_x), (qy, s_y, (w, rstd, num_warps)))`: the residual add and RMSNorm of x in one launch.

    Bit for bit `fp8_add_Ifp_Ifp_Ofp_Og16(x1, x2, fp8type, QB)` and then `fp8_rmsnorm_pg2pg_forward(x, s_x, w, QB,
    eps)`, whose arguments these are, without reading x again. `outputs` is (sum, x, s_x, qy, s_y, rstd).
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x1=x1, x2=x2, w=w)
    first, second, shape = _addends(driver, x1, x2, QB)
    target = dtypes.fp8(fp8type, "fp8type")
    weight = column_weights(driver, w, shape[-1])
    return _prepare(
        "fp8_add_rmsnorm_pg2pg_forward",
        {"a": first, "b": second, "weight": weight},
        _add_outputs(shape, target, QB) | _norm_outputs(shape, target, QB),
        outputs,
        (QB, target, real("eps", eps, least=0.0)),
        stream,
        level,
        lambda total, x, s_x, qy, s_y, rstd: (total, (x, s_x), (qy, s_y, (w, rstd, COAT_WARPS))),
    )


def _addends(driver: Driver, x1: Any, x2: Any, QB: Any) -> tuple[Operand, Operand, tuple[int, ...]]:
    group_size(QB)
    first, second = (operands.rows(name, value, driver, ["bfloat16"]) for name, value in (("x1", x1), ("x2", x2)))
    shape = matrix_shape(first)
    operands.require_shape(second, shape, "that of x1")
    return first, second, shape


def _groups(shape: tuple[int, ...], QB: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // QB))


def _add_outputs(shape: tuple[int, ...], target: DType, QB: int) -> dict[str, Wanted]:
    """By the names of the parameters that take them."""
    bf16 = dtypes.get("bfloat16")
    return {"sum": ("sum", shape, bf16), "x": ("x", shape, target), "scales": ("s_x", _groups(shape, QB), bf16)}


def _norm_outputs(shape: tuple[int, ...], target: DType, QB: int) -> dict[str, Wanted]:
    bf16, f32 = dtypes.get("bfloat16"), dtypes.get("float32")
    rstd = "rstd", (math.prod(shape[:-1]),), f32
    return {"qy": ("qy", shape, target), "out_scales": ("s_y", _groups(shape, QB), bf16), "rstd": rstd}


def _prepare(
    name: str,
    inputs: dict[str, Operand],
    wanted: dict[str, Wanted],
    given: Any,
    numbers: tuple[int, DType, float],
    stream: Any,
    level: PDLLevel,
    result: Callable[..., R],
) -> Prepared[R]:
    """The call of the op `name`: arrays by the names of the parameters that take them, (QB, FP8 type, epsilon), and
    what it returns for its outputs."""
    QB, fp8, epsilon = numbers
    read = list(inputs.values())
    first, weight, shape = read[0], inputs.get("weight"), read[0].shape
    device = operands.one_device(read)
    require_columns(first, MAX_COLUMNS)
    queue = resolve_stream(device, stream, first)
    written, values = results.outputs(device, queue, list(wanted.values()), given)
    operands.no_overlap(read, written)
    rows, columns, add = math.prod(shape[:-1]), shape[-1], "a" in inputs
    wide = [o for o in (*read, *written) if o.shape == shape]  # the scales, weights and rstd are read by the element
    aligned = columns % 16 == 0 and all(o.rows_aligned for o in wide) and (weight is None or weight.ptr % 16 == 0)
    weight_type = dtypes.get("bfloat16") if weight is None else weight.dtype

    def plan() -> Planned:
        plan = RowPlan.of(limits(device), rows, columns, 1 if add else 2)
        defines: Defines = (
            ("DRVFUSE_DTYPE", fp8.cxx),
            ("DRVFUSE_WEIGHT_DTYPE", weight_type.cxx),
            ("DRVFUSE_GROUP", QB),
            ("DRVFUSE_ADD", int(add)),
            ("DRVFUSE_NORM", int(weight is not None)),
            ("DRVFUSE_ALIGNED", int(aligned)),
            *plan.defines,
        )
        return Planned(
            device,
            Specialisation("coat", "fp8_group_scales", defines, capability=FP8_CAPABILITY),
            lambda kernel: plan.grid(rows, resident(kernel, device, plan.threads)),
            plan.threads,
            GroupParams(rows=rows, columns=columns, early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING)),
            pdl=level,
        )

    key = ("groups", name, rows, columns, QB, fp8, weight_type, aligned, level, planted())
    ready = device.part(PlanCache).get(key, plan).take()
    parameters = ready.parameters
    for field, operand in (*inputs.items(), *zip(wanted, written, strict=True)):
        setattr(parameters, field, operand.ptr)
        if field in _STRIDES and operand in read:
            setattr(parameters, _STRIDES[field], operand.stride)
    parameters.epsilon = epsilon
    return on_device(name, DeviceTurns(device), queue, result(*values), read, written, ready)


_STRIDES = {"a": "a_stride", "b": "b_stride", "x": "x_stride", "scales": "scale_stride"}
