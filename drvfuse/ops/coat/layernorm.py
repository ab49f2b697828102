# SPDX-License-Identifier: Apache-2.0
"""FP8 LayerNorm with COAT's signatures, with parameters and without, in one launch each way.

Arrays, `outputs`, `workspace`, `stream` and `pdl_level` are as in `fp8_rmsnorm`, of which these are the siblings.
COAT's own kernels let the lanes beyond the last column into the variance and into the maximum; these do not, so that
rows of every length, powers of two or not, are right.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, TypeVar

from ... import dtypes
from ...errors import ArgumentError, Unsupported
from ...plans.coat_rows import MAX_COLUMNS, LayerNormTiles, RowPlan, column_run
from ...plans.scratch import GRID_BYTES
from ...runtime.array import Array
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ..call import operands, results, scratch
from ..call.faults import planted
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.planned import PlanCache, Planned, limits, resident
from ..call.prepared import Prepared, on_device, op
from ..call.scratch import ScratchParams, Workspace
from ..call.specialisation import FP8_CAPABILITY, Specialisation
from ..call.streams import StreamArgument, resolve_stream
from ..call.turns import WorkspaceTurns
from .quantised import COAT_WARPS, WEIGHTS, Outputs, quantised_rows, require_columns, transposed_shape
from .rmsnorm_backward import Gradients, Inputs, gradient, gradient_operands, named, row_values

R = TypeVar("R")


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


@op
def fp8_layernorm_param_forward(
    x: ArrayLike,
    s_x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, Array, Array, tuple[ArrayLike, ArrayLike, Array, Array, int]]]:
    """Quantised LayerNorm of x: `(qy, s_y, qy_t, (w, b, mean, rstd, num_warps))`.

    x [M, N] or [B, S, N] FP8, s_x [..., ceil(N / QB)] bfloat16, w and b [N], both bfloat16 or both float32, QB 16, 32,
    64 or 128, N at most 32768. qy, s_y and qy_t as of `fp8_rmsnorm_forward`; mean and rstd [M] float32. mean = sum / N,
    rstd = 1 / sqrt(sum of (x - mean)^2 / N + eps), y = (x * s_x - mean) * rstd * w + b, all in fp32; s_y =
    bf16((max|y| + 1e-10) / fp8_max); qy = FP8(y / s_y), without a rounding of y before the quotient.

    No rows give s_y of an all-zero tensor. A row whose y are all NaN (one NaN in x does that) makes s_y NaN, and so
    every qy; other NaN stay in their column. An infinite y makes s_y infinite: every finite y becomes 0.

    `outputs` is (qy, s_y, qy_t, mean, rstd). `workspace` needs `fp8_workspace_bytes(N)`.
    """
    return _forward(
        "fp8_layernorm_param_forward",
        x,
        s_x,
        (w, b),
        QB,
        eps,
        transpose_output_2d,
        outputs,
        workspace,
        stream,
        pdl_level,
        lambda qy, s_y, qy_t, mean, rstd: (qy, s_y, qy_t, (w, b, mean, rstd, COAT_WARPS)),
    )


@op
def fp8_layernorm_noparam_forward(
    x: ArrayLike,
    s_x: ArrayLike,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, Array, Array, tuple[Array, Array, int]]]:
    """`(qy, s_y, qy_t, (mean, rstd, num_warps))`: `fp8_layernorm_param_forward` without w and b."""
    return _forward(
        "fp8_layernorm_noparam_forward",
        x,
        s_x,
        None,
        QB,
        eps,
        transpose_output_2d,
        outputs,
        workspace,
        stream,
        pdl_level,
        lambda qy, s_y, qy_t, mean, rstd: (qy, s_y, qy_t, (mean, rstd, COAT_WARPS)),
    )


@op
def fp8_layernorm_param_backward(
    x: ArrayLike,
    s_x: ArrayLike,
    g: Gradients,
    QB: int,
    w: ArrayLike,
    b: ArrayLike,
    m: ArrayLike,
    v: ArrayLike,
    num_warps: int = COAT_WARPS,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, Array, Array]]:
    """Gradients `(dx, dw, db)` of LayerNorm for the gradient g of its unquantised output.

    x, s_x, w, b and QB as in the forward, m and v its mean and rstd [M]; g as in `fp8_rmsnorm_backward`, so a list of
    up to three arrays is their sum. dx is bfloat16 in x's shape, dw and db [N] in w's dtype: xhat = (x * s_x - m) * v,
    c1 = mean(xhat * w * g), c2 = mean(w * g), dx = (w * g - (xhat * c1 + c2)) * v; dw = sum of g * xhat and db = sum of
    g over the rows, in fp32, rounded once. The same bits in every run and on every device. `num_warps` and the values
    of b have no effect.

    `outputs` is (dx, dw, db). `workspace` needs `fp8_workspace_bytes(2 * N)`. Time-outs as of `fp8_rmsnorm_backward`.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x=x, s_x=s_x, **named(g), w=w, b=b, m=m, v=v)
    inputs, name = _gradient_inputs(driver, x, s_x, g, QB, (w, b), m, v), "fp8_layernorm_param_backward"
    return gradient(name, inputs, QB, outputs, workspace, stream, level, lambda dx, dw, db: (dx, dw, db))


@op
def fp8_layernorm_noparam_backward(
    x: ArrayLike,
    s_x: ArrayLike,
    g: Gradients,
    QB: int,
    m: ArrayLike,
    v: ArrayLike,
    num_warps: int = COAT_WARPS,
    stochastic: bool = False,
    *,
    outputs: Outputs = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[Array]:
    """dx as of `fp8_layernorm_param_backward` without w and b: no sums over the rows, and no workspace.

    stochastic=True is refused: COAT's does not compile. `outputs` is (dx,).
    """
    if stochastic:
        raise Unsupported("stochastic=True: the gradient is bfloat16, rounded to nearest; pass False")
    level, driver = checked_level(pdl_level), operands.driver_of(x=x, s_x=s_x, **named(g), m=m, v=v)
    inputs, name = _gradient_inputs(driver, x, s_x, g, QB, None, m, v), "fp8_layernorm_noparam_backward"
    return gradient(name, inputs, QB, outputs, None, stream, level, lambda dx: dx)


def _gradient_inputs(
    driver: Driver, x: Any, s_x: Any, g: Any, QB: Any, affine: tuple[Any, Any] | None, m: Any, v: Any
) -> Inputs:
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    gradients = gradient_operands(driver, g, shape)
    affines = _affine(driver, affine, shape[-1])
    mean, rstd = (row_values(name, value, driver, shape) for name, value in (("m", m), ("v", v)))
    return Inputs(xs, scales, gradients, affines[0] if affines else None, rstd, mean)


def _forward(
    name: str,
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
    result: Callable[..., R],
) -> Prepared[R]:
    given = {} if affine is None else dict(zip("wb", affine, strict=True))
    level, driver = checked_level(pdl_level), operands.driver_of(x=x, s_x=s_x, **given)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    require_columns(xs, MAX_COLUMNS)
    columns, count = shape[-1], math.prod(shape[:-1])
    affines = _affine(driver, affine, columns)
    epsilon = real("eps", eps, least=0.0)
    turned, batch_rows = transposed_shape(shape, transpose_output_2d)
    read = [xs, scales, *affines]
    device = operands.one_device(read)
    queue = resolve_stream(device, stream, xs)
    bf16, f32 = dtypes.get("bfloat16"), dtypes.get("float32")
    wanted = [("qy", shape, xs.dtype), ("s_y", (), bf16), ("qy_t", turned, xs.dtype)]
    wanted += [("mean", (count,), f32), ("rstd", (count,), f32)]
    written, values = results.outputs(device, queue, wanted, outputs)
    qy, s_y, qy_t, mean, rstd = written
    own = scratch.checked(workspace, driver, device, GRID_BYTES)
    operands.no_overlap(read, [*written, *own])
    aligned = columns % 16 == 0 and xs.rows_aligned and qy.rows_aligned and all(o.ptr % 16 == 0 for o in affines)
    weight_type, address = affines[0].dtype if affines else bf16, qy_t.ptr % 16  # of which runs are multiples

    def plan() -> Planned:
        plan, tiles = RowPlan.of(limits(device), count, columns, 2), LayerNormTiles.of(count * columns)
        defines = (
            ("DRVFUSE_DTYPE", xs.dtype.cxx),
            ("DRVFUSE_WEIGHT_DTYPE", weight_type.cxx),
            ("DRVFUSE_GROUP", QB),
            ("DRVFUSE_PARAMETERS", int(bool(affines))),
            ("DRVFUSE_ALIGNED", int(aligned)),
            ("DRVFUSE_RUN", column_run(tiles.rows, batch_rows, address)),
            ("DRVFUSE_TILE_ROWS", tiles.rows),
            ("DRVFUSE_ROW_LANES", tiles.lanes),
            *plan.defines,
        )
        template = LayerNormParams(
            rows=count,
            batch_rows=max(batch_rows, 1),
            columns=columns,
            early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
        )
        return Planned(
            device,
            Specialisation("coat", "fp8_layernorm_forward", defines, capability=FP8_CAPABILITY),
            lambda kernel: tiles.grid(plan, count, columns, resident(kernel, device, plan.threads)),
            plan.threads,
            template,
            waits=True,
            pdl=level,
        )

    types = xs.dtype, weight_type, QB, bool(affines), aligned
    key = ("layernorm", count, columns, batch_rows, types, address, level, planted())
    ready = device.part(PlanCache).get(key, plan).take()
    parameters = ready.parameters
    parameters.x, parameters.scales = xs.ptr, scales.ptr
    parameters.x_stride, parameters.scale_stride = xs.stride, scales.stride
    parameters.weight, parameters.bias = (operand.ptr for operand in affines) if affines else (0, 0)
    parameters.qy, parameters.qy_t, parameters.scale = qy.ptr, qy_t.ptr, s_y.ptr
    parameters.mean, parameters.rstd, parameters.epsilon = mean.ptr, rstd.ptr, epsilon

    def bind(space: Workspace) -> None:
        parameters.scratch = space.params

    turns = WorkspaceTurns(device, queue, own[0].array if own else None, GRID_BYTES, bind)
    return on_device(name, turns, queue, result(*values), read, written, ready)


def _affine(driver: Driver, affine: tuple[Any, Any] | None, columns: int) -> list[Operand]:
    """w and b, checked, or neither."""
    if affine is None:
        return []
    weight, bias = (operands.whole(name, value, driver, WEIGHTS) for name, value in zip("wb", affine, strict=True))
    for operand in (weight, bias):
        operands.require_shape(operand, (columns,), "one for each column of x")
    if bias.dtype is not weight.dtype:
        raise ArgumentError("b.dtype", str(bias.dtype), f"{weight.dtype}, as that of w")
    return [weight, bias]
