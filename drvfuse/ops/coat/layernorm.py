# SPDX-License-Identifier: Apache-2.0
"""FP8 LayerNorm with COAT's signatures, with parameters and without, in one launch each way.

Arrays, `outputs`, `workspace`, `stream` and `pdl_level` are as in `fp8_rmsnorm`, of which these are the siblings.
COAT's own kernels let the lanes beyond the last column into the variance and into the maximum; these do not, so that
rows of every length, powers of two or not, are right.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ... import dtypes
from ...errors import ArgumentError, Unsupported
from ...plans.coat_forward import column_run
from ...plans.coat_rows import MAX_COLUMNS, RowPlan
from ...runtime.array import Array
from ...runtime.driver import Driver
from ..call import launching, operands
from ..call.launching import Specialisation
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.scratch import HEADER_BYTES, ScratchParams, acquire
from . import rmsnorm_backward as backward
from .quantised import WEIGHTS, quantised_rows
from .rmsnorm_forward import COAT_WARPS

_LARGE = 4 << 20
_MAX_GRID = 512


class LayerNormParams(ctypes.Structure):
    """`struct LayerNormParams` of cu/coat/fp8_layernorm_forward.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "scales", "weight", "bias", "qy", "qy_t", "scale", "mean", "rstd")),
        ("scratch", ScratchParams),
        *((name, ctypes.c_int64) for name in ("rows", "batch_rows", "x_stride", "scale_stride")),
        ("columns", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("early_trigger", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def fp8_layernorm_param_forward(
    x: Any,
    s_x: Any,
    w: Any,
    b: Any,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, Any, Any, tuple[Any, Any, Any, Any, int]]:
    """Quantised LayerNorm of x: `(qy, s_y, qy_t, (w, b, mean, rstd, num_warps))`.

    x [M, N] or [B, S, N] FP8, s_x [..., ceil(N / QB)] bfloat16, w and b [N], both bfloat16 or both float32, QB 16, 32,
    64 or 128, N at most 32768. qy, s_y and qy_t as of `fp8_rmsnorm_forward`; mean and rstd [M] float32. mean = sum / N,
    rstd = 1 / sqrt(sum of (x - mean)^2 / N + eps), y = (x * s_x - mean) * rstd * w + b, all in fp32; s_y =
    bf16((max|y| + 1e-10) / fp8_max); qy = FP8(y / s_y), without a rounding of y before the quotient.

    No rows give s_y of an all-zero tensor. A row whose y are all NaN (one NaN in x does that) makes s_y NaN, and so
    every qy; other NaN stay in their column. An infinite y makes s_y infinite: every finite y becomes 0.

    `outputs` is (qy, s_y, qy_t, mean, rstd). `workspace` needs `fp8_workspace_bytes(N)`.
    """
    results = _forward(x, s_x, (w, b), QB, eps, transpose_output_2d, outputs, workspace, stream, pdl_level)
    qy, s_y, qy_t, mean, rstd = results
    return qy, s_y, qy_t, (w, b, mean, rstd, COAT_WARPS)


def fp8_layernorm_noparam_forward(
    x: Any,
    s_x: Any,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, Any, Any, tuple[Any, Any, int]]:
    """`(qy, s_y, qy_t, (mean, rstd, num_warps))`: `fp8_layernorm_param_forward` without w and b."""
    qy, s_y, qy_t, mean, rstd = _forward(
        x, s_x, None, QB, eps, transpose_output_2d, outputs, workspace, stream, pdl_level
    )
    return qy, s_y, qy_t, (mean, rstd, COAT_WARPS)


def fp8_layernorm_param_backward(
    x: Any,
    s_x: Any,
    g: Any,
    QB: int,
    w: Any,
    b: Any,
    m: Any,
    v: Any,
    num_warps: int = COAT_WARPS,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, Any, Any]:
    """Gradients `(dx, dw, db)` of LayerNorm for the gradient g of its unquantised output.

    x, s_x, w, b and QB as in the forward, m and v its mean and rstd [M]; g as in `fp8_rmsnorm_backward`, so a list of
    up to three arrays is their sum. dx is bfloat16 in x's shape, dw and db [N] in w's dtype: xhat = (x * s_x - m) * v,
    c1 = mean(xhat * w * g), c2 = mean(w * g), dx = (w * g - (xhat * c1 + c2)) * v; dw = sum of g * xhat and db = sum of
    g over the rows, in fp32, rounded once. The same bits in every run and on every device. `num_warps` and the values
    of b have no effect.

    `outputs` is (dx, dw, db). `workspace` needs `fp8_workspace_bytes(2 * N)`. Time-outs as of `fp8_rmsnorm_backward`.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x, s_x, *backward.as_list(g), w, b, m, v)
    inputs, shape = _gradient_inputs(driver, x, s_x, g, QB, (w, b), m, v)
    dx, dw, db = backward.run(inputs, shape, QB, outputs, workspace, stream, level)
    return dx, dw, db


def fp8_layernorm_noparam_backward(
    x: Any,
    s_x: Any,
    g: Any,
    QB: int,
    m: Any,
    v: Any,
    num_warps: int = COAT_WARPS,
    stochastic: bool = False,
    *,
    outputs: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Any:
    """dx as of `fp8_layernorm_param_backward` without w and b: no sums over the rows, and no workspace.

    stochastic=True is refused: COAT's does not compile. `outputs` is (dx,).
    """
    if stochastic:
        raise Unsupported("stochastic=True: the gradient is bfloat16, rounded to nearest; pass False")
    level, driver = checked_level(pdl_level), operands.driver_of(x, s_x, *backward.as_list(g), m, v)
    inputs, shape = _gradient_inputs(driver, x, s_x, g, QB, None, m, v)
    return backward.run(inputs, shape, QB, outputs, None, stream, level)[0]


def _gradient_inputs(
    driver: Driver, x: Any, s_x: Any, g: Any, QB: Any, affine: tuple[Any, Any] | None, m: Any, v: Any
) -> tuple[backward.Inputs, tuple[int, ...]]:
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    gradients = backward.gradient_operands(driver, g, shape)
    affines = _affine(driver, affine, shape[-1])
    mean, rstd = (backward.row_values(name, value, driver, shape) for name, value in (("m", m), ("v", v)))
    return backward.Inputs(xs, scales, gradients, affines[0] if affines else None, rstd, mean), shape


def _forward(
    x: Any,
    s_x: Any,
    affine: tuple[Any, Any] | None,
    QB: Any,
    eps: Any,
    transpose_output_2d: Any,
    outputs: Any,
    workspace: Any,
    stream: Any,
    pdl_level: Any,
) -> list[Array]:
    level, driver = checked_level(pdl_level), operands.driver_of(x, s_x, *(affine or ()))
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    columns, count = shape[-1], math.prod(shape[:-1])
    if columns > MAX_COLUMNS:
        raise ArgumentError("x", f"of {columns} columns", f"of at most {MAX_COLUMNS} columns")
    affines = _affine(driver, affine, columns)
    epsilon = real("eps", eps, least=0.0)
    if not isinstance(transpose_output_2d, bool):
        raise ArgumentError("transpose_output_2d", repr(transpose_output_2d), "True or False")
    read = [xs, scales, *affines]
    device = operands.one_device(read)
    queue = operands.resolve_stream(stream, xs)
    batched = len(shape) == 3 and not transpose_output_2d
    turned = (shape[0], columns, shape[1]) if batched else (columns, count)
    bf16, f32 = dtypes.get("bfloat16"), dtypes.get("float32")
    wanted = [("qy", shape, xs.dtype), ("s_y", (), bf16), ("qy_t", turned, xs.dtype)]
    written = operands.new_outputs(device, queue, [*wanted, ("mean", (count,), f32), ("rstd", (count,), f32)], outputs)
    qy, s_y, qy_t, mean, rstd = written
    space = acquire(device, queue, workspace, HEADER_BYTES)
    operands.no_overlap(read, [*written, *operands.workspace(driver, workspace)])
    batch_rows = shape[1] if batched else count
    aligned = columns % 16 == 0 and xs.rows_aligned and qy.rows_aligned and all(o.ptr % 16 == 0 for o in affines)
    plan = RowPlan.of(device, count, columns, 2)
    tile_rows, row_lanes = _tile(count * columns)
    lane_columns = 32 // row_lanes * 8
    spec = Specialisation(
        "coat",
        "fp8_layernorm_forward",
        (
            ("DRVFUSE_DTYPE", xs.dtype.cxx),
            ("DRVFUSE_WEIGHT_DTYPE", affines[0].dtype.cxx if affines else bf16.cxx),
            ("DRVFUSE_GROUP", QB),
            ("DRVFUSE_PARAMETERS", int(bool(affines))),
            ("DRVFUSE_ALIGNED", int(aligned)),
            ("DRVFUSE_RUN", column_run(tile_rows, batch_rows, qy_t.ptr)),
            ("DRVFUSE_TILE_ROWS", tile_rows),
            ("DRVFUSE_ROW_LANES", row_lanes),
            *plan.defines,
        ),
    )
    kernel = launching.load(device, spec)
    resident = kernel.occupancy(device, plan.threads) * device.sm_count
    tiles = -(-count // (tile_rows * row_lanes)) * -(-columns // lane_columns)
    useful = max(-(-count // plan.teams), -(-tiles // (plan.threads // 32)))
    grid = max(1, min(useful, resident, _MAX_GRID))
    parameters = LayerNormParams(
        x=xs.ptr,
        scales=scales.ptr,
        weight=affines[0].ptr if affines else 0,
        bias=affines[1].ptr if affines else 0,
        qy=qy.ptr,
        qy_t=qy_t.ptr,
        scale=s_y.ptr,
        mean=mean.ptr,
        rstd=rstd.ptr,
        scratch=space.params,
        rows=count,
        batch_rows=max(batch_rows, 1),
        x_stride=xs.stride,
        scale_stride=scales.stride,
        columns=columns,
        epsilon=epsilon,
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    launching.launch(kernel, device, queue, grid, plan.threads, 0, parameters, level, read, written, space)
    return [o.span for o in written] if outputs is None else list(outputs)


def _tile(elements: int) -> tuple[int, int]:
    """Rows of a thread's part of a tile, and threads over one another: small ones where there is little to share."""
    return (16, 2) if elements >= _LARGE else (4, 8)


def _affine(driver: Driver, affine: tuple[Any, Any] | None, columns: int) -> list[operands.Operand]:
    """w and b, checked, or neither."""
    if affine is None:
        return []
    weight, bias = (operands.whole(name, value, driver, WEIGHTS) for name, value in zip("wb", affine, strict=True))
    for operand in (weight, bias):
        operands.require_shape(operand, (columns,), "one for each column of x")
    if bias.dtype is not weight.dtype:
        raise ArgumentError("b.dtype", str(bias.dtype), f"{weight.dtype}, as that of w")
    return [weight, bias]
