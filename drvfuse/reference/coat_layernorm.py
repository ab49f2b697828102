# SPDX-License-Identifier: Apache-2.0
"""COAT's FP8 LayerNorm in numpy, with every rounding of the kernels and in their order.

As in `coat_rmsnorm`, approximate instructions are correctly rounded here, and results of a GPU can be passed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, SupportsFloat

import numpy as np

from ..plans.coat_backward import BackwardShape
from .arithmetic import Floats, NDArray, fma, in_order, round_to
from .coat_rmsnorm import (
    add_gradients,
    backward_mean,
    column_sums,
    dequantise,
    pack_scales,
    packs_of,
    quantise,
    segment_tree,
    tensor_scale,
    transpose,
)


class Forward(NamedTuple):
    """The results of the forward pass. `qy_t` has shape (N, M) for 2-D input or with transpose_output_2d, else (B, N,
    S). `s_y` is a 0-d bfloat16 array."""

    qy: NDArray
    s_y: NDArray
    qy_t: NDArray
    mean: Floats
    rstd: Floats


def row_mean(x: NDArray, s_x: NDArray, QB: int) -> Floats:
    """The mean of each row, in the kernel's order of additions."""
    columns = x.shape[-1]
    packs = packs_of(np.asarray(x).astype(np.float32).reshape(-1, columns))
    scales = pack_scales(s_x, QB, columns, packs.shape[1])
    with np.errstate(all="ignore"):
        return segment_tree(in_order(packs) * scales) / np.float32(columns)


def row_rstd(x: NDArray, s_x: NDArray, QB: int, eps: float, mean: Floats) -> Floats:
    """1 / sqrt(variance + eps) of each row, in the kernel's order of additions."""
    values = dequantise(x, s_x, QB)
    with np.errstate(all="ignore"):
        away = values - mean[:, None]
        variance = segment_tree(in_order(packs_of(away * away))) / np.float32(values.shape[1])
        return (np.float32(1) / np.sqrt(variance + np.float32(eps))).astype(np.float32)


def fp8_layernorm_forward(
    x: NDArray,
    s_x: NDArray,
    w: NDArray | None,
    b: NDArray | None,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    mean: Floats | None = None,
    rstd: Floats | None = None,
    reciprocal: SupportsFloat | None = None,
) -> Forward:
    """The forward pass, with w and b or with neither. s_y is NaN if all y of a row are NaN; other NaNs are ignored."""
    values = dequantise(x, s_x, QB)
    mean = row_mean(x, s_x, QB) if mean is None else mean
    rstd = row_rstd(x, s_x, QB, eps, mean) if rstd is None else rstd
    with np.errstate(all="ignore"):
        y = (values - mean[:, None]) * rstd[:, None]
        if w is not None and b is not None:
            y = y * np.asarray(w).astype(np.float32) + np.asarray(b).astype(np.float32)
        s_y = tensor_scale(y, x.dtype)
        qy = quantise(y, s_y, x.dtype, reciprocal).reshape(x.shape)
    return Forward(qy, s_y, transpose(qy, transpose_output_2d), mean, rstd)


def fp8_layernorm_backward(
    x: NDArray, s_x: NDArray, g: NDArray | Sequence[NDArray], w: NDArray | None, m: Floats, v: Floats, QB: int
) -> tuple[NDArray, ...]:
    """(dx, dw, db), or (dx,) without a weight; sums in the order of `coat_rmsnorm.fp8_rmsnorm_backward`."""
    values = dequantise(x, s_x, QB)
    shape = BackwardShape.of(*values.shape)
    total_g = add_gradients(g) if isinstance(g, (list, tuple)) else np.asarray(g)
    gradient = total_g.astype(np.float32).reshape(values.shape)
    mean, rstd = (np.asarray(saved, np.float32)[:, None] for saved in (m, v))
    with np.errstate(all="ignore"):
        xhat = (values - mean) * rstd
        wdy = gradient if w is None else np.asarray(w).astype(np.float32) * gradient
        c1, c2 = (np.broadcast_to(backward_mean(terms, shape), xhat.shape) for terms in (xhat * wdy, wdy))
        dx = round_to((wdy - fma(xhat, c1, c2)) * rstd, "bfloat16").reshape(x.shape)
    if w is None:
        return (dx,)
    ones = np.ones_like(gradient)
    return dx, *(round_to(column_sums(gradient, factor, shape), w.dtype) for factor in (xhat, ones))
