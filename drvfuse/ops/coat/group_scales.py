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
from typing import Any

from ... import dtypes
from ...dtypes import DType
from ...errors import ArgumentError
from ...plans.coat_rows import MAX_COLUMNS, RowPlan
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.stream import Stream
from ..call import launching, operands
from ..call.launching import Specialisation
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from .quantised import column_weights, group_size, matrix_shape, quantised_rows
from .rmsnorm_forward import COAT_WARPS


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


def fp8_rmsnorm_pg2pg_forward(
    x: Any,
    s_x: Any,
    w: Any,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, Any, tuple[Any, Any, int]]:
    """RMSNorm of x with group scales in and out: `(qy, s_y, (w, rstd, num_warps))`.

    x [M, N] or [B, S, N] FP8, s_x [..., ceil(N / QB)] bfloat16, w [N] bfloat16 or float32, QB 16, 32, 64 or 128, N at
    most 32768. qy has x's shape and dtype, s_y the shape and dtype of s_x, rstd [M] float32: that of
    `fp8_rmsnorm_forward`, bit for bit. y = (x * s_x * rstd) * w in fp32, its groups quantised as this module says.
    `transpose_output_2d` has no effect: there is no transpose. `outputs` is (qy, s_y, rstd).
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x, s_x, w)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    weight = column_weights(driver, w, shape[-1])
    epsilon = real("eps", eps, least=0.0)
    device = operands.one_device((xs, scales, weight))
    queue = operands.resolve_stream(stream, xs)
    wanted = _norm_outputs(shape, xs.dtype, QB)
    written = operands.new_outputs(device, queue, wanted, outputs)
    parameters = GroupParams(
        x=xs.ptr,
        scales=scales.ptr,
        x_stride=xs.stride,
        scale_stride=scales.stride,
        **_norm_parameters(weight, epsilon, *written),
    )
    _launch(device, queue, parameters, shape, QB, xs.dtype, False, [xs, scales, weight], written, weight, level)
    qy, s_y, rstd = _results(written, outputs)
    return qy, s_y, (w, rstd, COAT_WARPS)


def fp8_add_Ifp_Ifp_Ofp_Og16(
    x1: Any,
    x2: Any,
    fp8type: Any,
    QB: int,
    *,
    outputs: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, tuple[Any, Any]]:
    """The residual add: `(sum, (x, s_x))`, the sum in bfloat16 and quantised with group scales.

    x1 and x2 [M, N] or [B, S, N] bfloat16, added in fp32; `fp8type` "E4M3", "E5M2" or a dtype; QB 16, 32, 64 or 128;
    N at most 32768. sum and x have the inputs' shape, s_x is [..., ceil(N / QB)]. x and s_x are of the fp32 sum, not of
    the rounded one. `outputs` is (sum, x, s_x).
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x1, x2)
    first, second, shape = _addends(driver, x1, x2, QB)
    target = dtypes.fp8(fp8type, "fp8type")
    device = operands.one_device((first, second))
    queue = operands.resolve_stream(stream, first)
    written = operands.new_outputs(device, queue, _add_outputs(shape, target, QB), outputs)
    parameters = GroupParams(**_add_parameters(first, second, *written))
    _launch(device, queue, parameters, shape, QB, target, True, [first, second], written, None, level)
    total, x, s_x = _results(written, outputs)
    return total, (x, s_x)


def fp8_add_rmsnorm_pg2pg_forward(
    x1: Any,
    x2: Any,
    fp8type: Any,
    w: Any,
    QB: int,
    eps: float,
    *,
    outputs: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, tuple[Any, Any], tuple[Any, Any, tuple[Any, Any, int]]]:
    """`(sum, (x, s_x), (qy, s_y, (w, rstd, num_warps)))`: the residual add and RMSNorm of x in one launch.

    Bit for bit `fp8_add_Ifp_Ifp_Ofp_Og16(x1, x2, fp8type, QB)` and then `fp8_rmsnorm_pg2pg_forward(x, s_x, w, QB,
    eps)`, whose arguments these are, without reading x again. `outputs` is (sum, x, s_x, qy, s_y, rstd).
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x1, x2, w)
    first, second, shape = _addends(driver, x1, x2, QB)
    target = dtypes.fp8(fp8type, "fp8type")
    weight = column_weights(driver, w, shape[-1])
    epsilon = real("eps", eps, least=0.0)
    device = operands.one_device((first, second, weight))
    queue = operands.resolve_stream(stream, first)
    wanted = [*_add_outputs(shape, target, QB), *_norm_outputs(shape, target, QB)]
    written = operands.new_outputs(device, queue, wanted, outputs)
    parameters = GroupParams(
        **_add_parameters(first, second, *written[:3]), **_norm_parameters(weight, epsilon, *written[3:])
    )
    _launch(device, queue, parameters, shape, QB, target, True, [first, second, weight], written, weight, level)
    total, x, s_x, qy, s_y, rstd = _results(written, outputs)
    return total, (x, s_x), (qy, s_y, (w, rstd, COAT_WARPS))


_Wanted = list[tuple[str, tuple[int, ...], DType]]


def _addends(driver: Driver, x1: Any, x2: Any, QB: Any) -> tuple[Operand, Operand, tuple[int, ...]]:
    group_size(QB)
    first, second = (operands.rows(name, value, driver, ["bfloat16"]) for name, value in (("x1", x1), ("x2", x2)))
    shape = matrix_shape(first)
    operands.require_shape(second, shape, "that of x1")
    return first, second, shape


def _groups(shape: tuple[int, ...], QB: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // QB))


def _add_outputs(shape: tuple[int, ...], target: DType, QB: int) -> _Wanted:
    bf16 = dtypes.get("bfloat16")
    return [("sum", shape, bf16), ("x", shape, target), ("s_x", _groups(shape, QB), bf16)]


def _norm_outputs(shape: tuple[int, ...], target: DType, QB: int) -> _Wanted:
    bf16, f32 = dtypes.get("bfloat16"), dtypes.get("float32")
    return [("qy", shape, target), ("s_y", _groups(shape, QB), bf16), ("rstd", (math.prod(shape[:-1]),), f32)]


def _add_parameters(first: Operand, second: Operand, total: Operand, x: Operand, s_x: Operand) -> dict[str, int]:
    pointers = {"a": first.ptr, "b": second.ptr, "sum": total.ptr, "x": x.ptr, "scales": s_x.ptr}
    return pointers | {"a_stride": first.stride, "b_stride": second.stride}


def _norm_parameters(weight: Operand, epsilon: float, qy: Operand, s_y: Operand, rstd: Operand) -> dict[str, Any]:
    pointers = {"weight": weight.ptr, "qy": qy.ptr, "out_scales": s_y.ptr, "rstd": rstd.ptr}
    return pointers | {"epsilon": epsilon}


def _launch(
    device: Device,
    queue: Stream,
    parameters: GroupParams,
    shape: tuple[int, ...],
    QB: int,
    fp8: DType,
    add: bool,
    read: list[Operand],
    written: list[Operand],
    weight: Operand | None,
    level: PDLLevel,
) -> None:
    columns, rows = shape[-1], math.prod(shape[:-1])
    if columns > MAX_COLUMNS:
        raise ArgumentError(read[0].name, f"of {columns} columns", f"of at most {MAX_COLUMNS} columns")
    operands.no_overlap(read, written)
    plan = RowPlan.of(device, rows, columns, 1 if add else 2)
    wide = [o for o in (*read, *written) if o.shape == shape]  # the scales, weights and rstd are read by the element
    aligned = columns % 16 == 0 and all(o.rows_aligned for o in wide) and (weight is None or weight.ptr % 16 == 0)
    spec = Specialisation(
        "coat",
        "fp8_group_scales",
        (
            ("DRVFUSE_DTYPE", fp8.cxx),
            ("DRVFUSE_WEIGHT_DTYPE", dtypes.get("bfloat16").cxx if weight is None else weight.dtype.cxx),
            ("DRVFUSE_GROUP", QB),
            ("DRVFUSE_ADD", int(add)),
            ("DRVFUSE_NORM", int(weight is not None)),
            ("DRVFUSE_ALIGNED", int(aligned)),
            *plan.defines,
        ),
    )
    kernel = launching.load(device, spec)
    resident = kernel.occupancy(device, plan.threads) * device.sm_count
    grid = max(1, min(-(-rows // plan.teams), resident))
    parameters.rows, parameters.columns = rows, columns
    parameters.early_trigger = int(level is PDLLevel.OVERLAP_AT_BEGINNING)
    launching.launch(
        kernel, device, queue, grid, plan.threads, 0, parameters, level, read, written, None, cooperative=False
    )


def _results(written: list[Operand], outputs: Any) -> list[Array]:
    """What the caller gave as outputs, or the new arrays."""
    return [o.span for o in written] if outputs is None else list(outputs)
