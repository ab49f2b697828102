# SPDX-License-Identifier: Apache-2.0
"""FP8 LayerNorm with COAT's signatures, with parameters and without. Forward and backward pass are one launch each.

Arrays, `outputs`, `workspace`, `stream` and `pdl_level` are those of `fp8_rmsnorm_forward` and `fp8_rmsnorm_backward`;
but with a `pdl_level` other than OFF b too is read before the wait for the previous kernel. COAT's own kernels include
the lanes beyond the last column in the variance and in the maximum. drvfuse's kernels do not, so the results are right
for rows of every length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...errors import Unsupported
from ...plans.coat_forward import layernorm_plan
from ...plans.coat_rows import MAX_COLUMNS, LayerNormTiles, RowPlan, column_run
from ...plans.definitions import defines
from ...plans.scratch import GRID_BYTES, WORDS_BYTES
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ...structures import laid_out
from ..call import operands
from ..call.op import op
from ..call.options import PDLLevel, real
from ..call.planned import Planned, limits, resident
from ..call.prepared import Prepared
from ..call.scratch import ScratchParams
from ..call.streams import StreamArgument
from .forward_launch import planned_forward
from .fp8_call import Fp8Call, Fp8Params, Options
from .quantised import (
    COAT_WARPS,
    Outputs,
    column_weights,
    quantised_outputs,
    quantised_rows,
    require_columns,
    row_outputs,
    transposed_shape,
    weight_type,
)
from .rmsnorm_backward import Gradients, gradient

R = TypeVar("R")


@laid_out("coat/fp8_layernorm_forward.cu", parts=(ScratchParams,))
class LayerNormParams(Fp8Params):
    """The kernel's parameters."""


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
    """LayerNorm of x, quantised. Returns `(qy, s_y, qy_t, (w, b, mean, rstd, num_warps))`.

    x [M, N] or [B, S, N] is FP8, and s_x [..., ceil(N / QB)] bfloat16. w and b [N] are both bfloat16 or both float32.
    QB is 16, 32, 64 or 128, and N at most 32768. qy, s_y and qy_t are those of `fp8_rmsnorm_forward`; mean and rstd [M]
    are float32. mean = sum / N, rstd = 1 / sqrt(sum of (x - mean)^2 / N + eps), y = (x * s_x - mean) * rstd * w + b,
    all in fp32; s_y = bf16((max|y| + 1e-10) / fp8_max); qy = FP8(y / s_y), without a rounding of y before the quotient.

    If x has no rows, s_y is the scale of a tensor of zeros. If all y of a row are NaN (one NaN in x makes them NaN),
    s_y and all qy are NaN; any other NaN, such as one in w, stays in its column. An infinite y makes s_y infinite, and
    all finite y become 0.

    `outputs` is (qy, s_y, qy_t, mean, rstd). `workspace` needs `fp8_workspace_bytes(N)` bytes. All other options are
    those of `fp8_rmsnorm_forward`. The rule is `drvfuse.reference.coat_layernorm.fp8_layernorm_forward`.
    """
    return _forward(
        "fp8_layernorm_param_forward",
        Options.of(outputs, stream, pdl_level, workspace),
        *(x, s_x, {"w": w, "b": b}, QB, eps, transpose_output_2d),
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
    """`fp8_layernorm_param_forward` without w and b. Returns `(qy, s_y, qy_t, (mean, rstd, num_warps))`."""
    return _forward(
        "fp8_layernorm_noparam_forward",
        Options.of(outputs, stream, pdl_level, workspace),
        *(x, s_x, {}, QB, eps, transpose_output_2d),
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
    """The gradients `(dx, dw, db)` of LayerNorm for the gradient g of its unquantised output.

    x, s_x, w, b and QB are those of the forward pass, and m and v [M] its mean and rstd. g is as in
    `fp8_rmsnorm_backward`: a list of up to three arrays means their sum. dx is bfloat16 in x's shape, and dw and
    db [N] have w's dtype: xhat = (x * s_x - m) * v, c1 = mean(xhat * w * g), c2 = mean(w * g), dx = (w * g - (xhat * c1
    + c2)) * v; dw = sum of g * xhat and db = sum of g over the rows, in fp32, rounded once. The bits are the same in
    every run and on every device. `num_warps` and the values of b have no effect.

    `outputs` is (dx, dw, db). `workspace` needs `fp8_workspace_bytes(2 * N)` bytes. All other options, and time-outs,
    are those of `fp8_rmsnorm_backward`. The rule is `drvfuse.reference.coat_layernorm.fp8_layernorm_backward`.
    """
    given, affine, saved = Options.of(outputs, stream, pdl_level, workspace), {"w": w, "b": b}, {"m": m, "v": v}
    name = "fp8_layernorm_param_backward"
    return gradient(name, given, x, s_x, g, QB, affine, saved, lambda dx, dw, db: (dx, dw, db))


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
    """The gradient dx of LayerNorm without w and b; see `fp8_layernorm_param_backward`. It needs no workspace.

    stochastic=True is refused, since COAT's kernel for it does not compile. `outputs` is (dx,).
    """
    if stochastic:
        raise Unsupported("stochastic=True: the gradient is bfloat16, rounded to nearest; pass False")
    given, name = Options.of(outputs, stream, pdl_level), "fp8_layernorm_noparam_backward"
    return gradient(name, given, x, s_x, g, QB, {}, {"m": m, "v": v}, lambda dx: dx)


def _forward(
    name: str,
    given: Options,
    x: Any,
    s_x: Any,
    affine: dict[str, Any],
    QB: Any,
    eps: Any,
    transpose_output_2d: Any,
    result: Callable[..., R],
) -> Prepared[R]:
    """The prepared call of the op `name`. It returns `result(qy, s_y, qy_t, mean, rstd)`. `affine` maps "w" and "b" to
    the caller's arrays, or is empty."""
    driver = operands.driver_of(x=x, s_x=s_x, **affine)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    require_columns(xs, MAX_COLUMNS)
    weights = column_weights(driver, shape[-1], affine)
    epsilon = real("eps", eps, least=0.0)
    turned, batch_rows = transposed_shape(shape, transpose_output_2d)
    wanted = quantised_outputs(shape, xs.dtype, turned) | row_outputs(shape, "mean", "rstd")
    call = Fp8Call(name, given, {"x": xs, "scales": scales, **weights}, wanted, max(GRID_BYTES, WORDS_BYTES))
    rows, columns, aligned = call.rows, call.columns, call.aligned("x", "qy", "weight", "bias")
    weight = weight_type(weights)
    address = call.arrays["qy_t"].ptr % 16  # the alignment of qy_t decides the size of its stores

    def plan() -> Planned:
        kinds = defines(dtype=xs.dtype, weight_dtype=weight, group=QB, aligned=aligned)
        shared = layernorm_plan(limits(call.device), rows, columns, QB, bool(weights))
        if shared is not None:
            return planned_forward(call, shared, kinds + defines(layer=True, affine=bool(weights)), batch_rows, address)
        plan, tiles = RowPlan.of(limits(call.device), rows, columns, 2), LayerNormTiles.of(rows * columns)
        run = column_run(tiles.rows, batch_rows, address)
        kinds += defines(parameters=bool(weights))
        return call.planned(
            "fp8_layernorm_forward",
            kinds + defines(run=run, tile_rows=tiles.rows, row_lanes=tiles.lanes) + plan.defines,
            lambda kernel: tiles.grid(plan, rows, columns, resident(kernel, call.device, plan.threads)),
            plan.threads,
            LayerNormParams(rows=rows, batch_rows=max(batch_rows, 1)),
            waits=True,
        )

    ready = call.ready(("layernorm", batch_rows, xs.dtype, weight, QB, bool(weights), aligned, address), plan)
    ready.parameters.epsilon = epsilon
    return call.prepared(ready, result(*call.values), workspace=True)
