# SPDX-License-Identifier: Apache-2.0
"""FP8 RMSNorm with COAT's signature, in one launch. `rmsnorm_backward` has the gradient.

The real value of an element is its FP8 value times its scale. x is [M, N] or [B, S, N], e4m3fn or e5m2, with a bfloat16
scale for each 1 x QB elements of a row. All arrays may be drvfuse Arrays or any DLPack or CUDA-array-interface object;
x, s_x and g may be column slices of wider arrays. The rounding rules are those of `drvfuse.reference.coat_rmsnorm`.
"""

from __future__ import annotations

from ...plans.coat_forward import MAX_COLUMNS, forward_plan
from ...plans.definitions import defines
from ...plans.scratch import WORDS_BYTES
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands
from ..call.op import op
from ..call.options import PDLLevel, real
from ..call.planned import Planned, limits
from ..call.prepared import Prepared
from ..call.streams import StreamArgument
from .forward_launch import planned_forward
from .fp8_call import Fp8Call, Options
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


@op
def fp8_rmsnorm_forward(
    x: ArrayLike,
    s_x: ArrayLike,
    w: ArrayLike,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, Array, Array, tuple[ArrayLike, Array, int]]]:
    """RMSNorm of x, quantised. Returns `(qy, s_y, qy_t, (w, rstd, num_warps))`.

    x [M, N] or [B, S, N] is FP8, s_x [..., ceil(N / QB)] bfloat16, w [N] bfloat16 or float32. QB is 16, 32, 64 or 128,
    and N at most 262144. qy has x's shape and dtype. s_y is a 0-d bfloat16 array; qy * s_y are the real values. rstd
    [M] is float32. qy_t is (N, M); for 3-D x without `transpose_output_2d` it is (B, N, S) with qy_t[b] = qy[b].T.
    Arrays may be drvfuse's or those of any library with DLPack or `__cuda_array_interface__`; x and s_x may be slices
    of the columns of wider arrays.

    y = (x * s_x * rstd) * w in fp32; s_y = bf16((max|y| + 1e-10) / fp8_max); qy = FP8(bf16(y) / s_y). If x has no rows,
    s_y is the scale of a tensor of zeros. If all y of a row are NaN (one NaN in x makes them NaN), s_y and all qy are
    NaN; any other NaN, such as one in w, stays in its column. An infinite y makes s_y infinite, and all finite y become
    0.

    With a `pdl_level` other than OFF w may be read before the wait for the previous kernel; all other inputs are read
    after that wait.

    `outputs` is (qy, s_y, qy_t, rstd); None allocates them. `workspace` is a uint8 array of `fp8_workspace_bytes(N)`
    bytes, which is zeroed once and serves one launch at a time; by default each stream has one. `stream` is None for
    the device's own stream, "current" for that of x's framework, or a stream (0 or 1: the legacy default stream). The
    launch is cooperative, or for few rows one cluster or one block. It does not block the host, and can be captured if
    outputs are given. If blocks wait for one another longer than `spin_timeout`, the outputs are undefined, and the
    next call with the workspace raises GridTimeout. Arguments that do not fit raise ArgumentError before any launch.
    The rule is COAT's, rounding by rounding in `drvfuse.reference.coat_rmsnorm`; docs/fp8.md lists the differences.
    """
    given, driver = Options.of(outputs, stream, pdl_level, workspace), operands.driver_of(x=x, s_x=s_x, w=w)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    weights = column_weights(driver, shape[-1], {"w": w})
    epsilon = real("eps", eps, least=0.0)
    turned, batch_rows = transposed_shape(shape, transpose_output_2d)
    require_columns(xs, MAX_COLUMNS)
    read = {"x": xs, "scales": scales, **weights}
    wanted = quantised_outputs(shape, xs.dtype, turned) | row_outputs(shape, "rstd")
    call = Fp8Call("fp8_rmsnorm_forward", given, read, wanted, WORDS_BYTES)
    aligned = call.aligned("x", "qy", "weight")
    address = call.arrays["qy_t"].ptr % 16  # the alignment of qy_t decides the size of its stores

    def plan() -> Planned:
        plan = forward_plan(limits(call.device), call.rows, call.columns, QB)
        kinds = defines(dtype=xs.dtype, weight_dtype=weight_type(read), group=QB, aligned=aligned)
        return planned_forward(call, plan, kinds + defines(layer=False, affine=False), batch_rows, address)

    ready = call.ready(("rmsnorm_forward", batch_rows, xs.dtype, weight_type(read), QB, aligned, address), plan)
    ready.parameters.epsilon = epsilon
    qy, s_y, qy_t, rstd = call.values
    return call.prepared(ready, (qy, s_y, qy_t, (w, rstd, COAT_WARPS)), workspace=True)
