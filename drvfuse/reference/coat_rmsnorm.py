# SPDX-License-Identifier: Apache-2.0
"""COAT's FP8 RMSNorm in numpy, with every rounding of the kernels and in their order.

The real value of an element is its FP8 value times its group scale. The approximate instructions (`sqrt.approx`,
`div.full`, `rcp.approx`) are correctly rounded here, as on the emulated driver. A GPU's may differ by an ulp or two, so
`rstd` and `reciprocal` can be passed as the GPU computes them; then all bits are those of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, SupportsFloat

import numpy as np

from .. import dtypes
from ..dtypes import DTypeLike
from ..plans.coat_backward import BackwardShape
from .arithmetic import Floats, NDArray, butterfly, fma, in_order, round_to

PACK = 16
SEGMENT = 32 * PACK
SEGMENTS = 8
SCALE_FLOOR = np.float32(1e-10)


class Forward(NamedTuple):
    """The results of the forward pass. `qy_t` has shape (N, M) for 2-D input or with transpose_output_2d, else (B, N,
    S). `s_y` is a 0-d bfloat16 array."""

    qy: NDArray
    s_y: NDArray
    qy_t: NDArray
    rstd: Floats


def dequantise(x: NDArray, s_x: NDArray, QB: int) -> Floats:
    """x times its group scales, [rows, columns], in fp32."""
    columns = x.shape[-1]
    values = np.asarray(x).astype(np.float32).reshape(-1, columns)
    scales = np.asarray(s_x).astype(np.float32).reshape(values.shape[0], -(-columns // QB))
    with np.errstate(all="ignore"):
        return values * np.repeat(scales, QB, axis=1)[:, :columns]


def packs_of(values: Floats) -> Floats:
    """Rows as packs [rows, packs, 16], padded with packs of zeros to a multiple of 4096 columns."""
    rows, columns = values.shape
    packs = -(-columns // (SEGMENTS * SEGMENT)) * SEGMENTS * SEGMENT // PACK
    padded = np.zeros((rows, packs * PACK), np.float32)
    padded[:, :columns] = values
    return padded.reshape(rows, packs, PACK)


def pack_scales(s_x: NDArray, QB: int, columns: int, packs: int) -> Floats:
    """The scale of each pack [rows, packs], 0 for the packs of padding."""
    existing = -(-columns // PACK)
    scales = np.asarray(s_x).astype(np.float32).reshape(-1, -(-columns // QB))
    result = np.zeros((scales.shape[0], packs), np.float32)
    result[:, :existing] = np.repeat(scales, QB // PACK, axis=1)[:, :existing]
    return result


def segment_tree(packs: Floats) -> Floats:
    """The sum of each row of pack sums [rows, packs]: by butterfly in each segment of 32, then in order."""
    return in_order(butterfly(packs.reshape(len(packs), packs.shape[1] // 32, 32)))


def row_rstd(x: NDArray, s_x: NDArray, QB: int, eps: float) -> Floats:
    """1 / sqrt(mean of squares + eps) of each row, in the kernels' order of additions."""
    columns = x.shape[-1]
    packs = packs_of(np.asarray(x).astype(np.float32).reshape(-1, columns))
    scales = pack_scales(s_x, QB, columns, packs.shape[1])
    with np.errstate(all="ignore"):
        squares = in_order(packs * packs)  # the products are exact, so this equals the kernel's fma
        mean = segment_tree((squares * scales) * scales) / np.float32(columns) + np.float32(eps)
        return (np.float32(1) / np.sqrt(mean)).astype(np.float32)


def scale_of(maximum: SupportsFloat, fp8: DTypeLike) -> NDArray:
    """bf16((maximum + 1e-10) / fp8_max), as a 0-d array."""
    limit = np.float32(dtypes.get(fp8).fp8_max or 0)
    return round_to(np.asarray((np.float32(maximum) + SCALE_FLOOR) / limit), "bfloat16").reshape(())


def tensor_scale(y: Floats, fp8: DTypeLike) -> NDArray:
    """The scale of a tensor of fp32 rows. It is NaN if all elements of a row are NaN; other NaNs are ignored."""
    empty = bool(np.isnan(y).all(axis=1).any()) if y.size else False
    numbers = np.abs(y[~np.isnan(y)])
    return scale_of(np.float32(np.nan) if empty else numbers.max(initial=np.float32(0)), fp8)


def quantise(y: Floats, s_y: NDArray, fp8: DTypeLike, reciprocal: SupportsFloat | None = None) -> NDArray:
    """fp32 values divided by a scale, as a product with its reciprocal, rounded once to FP8."""
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / s_y.astype(np.float32) if reciprocal is None else np.float32(reciprocal)
        return round_to(y * inverse, fp8)


def transpose(qy: NDArray, transpose_output_2d: bool) -> NDArray:
    """qy transposed: [M, N] becomes [N, M], and [B, S, N] becomes [B, N, S], or [N, B * S] with
    `transpose_output_2d`."""
    if qy.ndim == 3 and not transpose_output_2d:
        return np.ascontiguousarray(qy.transpose(0, 2, 1))
    return np.ascontiguousarray(qy.reshape(-1, qy.shape[-1]).T)


def fp8_rmsnorm_forward(
    x: NDArray,
    s_x: NDArray,
    w: NDArray,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    rstd: Floats | None = None,
    reciprocal: SupportsFloat | None = None,
) -> Forward:
    """The results of the op. s_y is NaN if all y of a row are NaN; other NaNs do not enter the maximum."""
    values = dequantise(x, s_x, QB)
    if rstd is None:
        rstd = row_rstd(x, s_x, QB, eps)
    with np.errstate(all="ignore"):
        y = (values * rstd[:, None]) * np.asarray(w).astype(np.float32)
        s_y = tensor_scale(y, x.dtype)
        qy = quantise(round_to(y, "bfloat16").astype(np.float32), s_y, x.dtype, reciprocal).reshape(x.shape)
    return Forward(qy, s_y, transpose(qy, transpose_output_2d), rstd)


def add_gradients(gradients: Sequence[NDArray]) -> NDArray:
    """The sum of bfloat16 arrays, rounded after each addition."""
    total = np.asarray(gradients[0])
    for more in gradients[1:]:
        with np.errstate(all="ignore"):
            total = round_to(total.astype(np.float32) + np.asarray(more).astype(np.float32), "bfloat16")
    return total


def fp8_rmsnorm_backward(
    x: NDArray, s_x: NDArray, g: NDArray | Sequence[NDArray], w: NDArray, v: Floats, QB: int
) -> tuple[NDArray, NDArray]:
    """(dx, dw): dx is bfloat16 in x's shape, dw has w's dtype.

    Only the numbers of rows and columns determine the order of the sums (`BackwardShape`). Segment s has the rows s,
    s + segments, ... Team t of a segment has every teams-th of these rows, from the t-th on. The teams of a segment are
    added in order, then strand i adds segments i, i + strands, ..., and the strands are added in order.
    """
    columns = x.shape[-1]
    values = dequantise(x, s_x, QB)
    rows = values.shape[0]
    shape = BackwardShape.of(rows, columns)
    total_g = add_gradients(g) if isinstance(g, (list, tuple)) else np.asarray(g)
    gradient = total_g.astype(np.float32).reshape(rows, columns)
    rstd = np.asarray(v, np.float32).reshape(rows, 1)
    with np.errstate(all="ignore"):
        xhat = values * rstd
        wdy = np.asarray(w).astype(np.float32) * gradient
        c1 = backward_mean(xhat * wdy, shape)
        dx = round_to(fma(-xhat, np.broadcast_to(c1, xhat.shape), wdy) * rstd, "bfloat16")
    return dx.reshape(x.shape), round_to(column_sums(gradient, xhat, shape), w.dtype)


def column_sums(a: Floats, b: Floats, shape: BackwardShape) -> Floats:
    """The sum of a * b over the rows for each column, in the order of the backward kernel."""
    teams, segments, strands = shape.teams, shape.segments, shape.strands
    rows, columns = a.shape
    with np.errstate(all="ignore"):
        sums = np.zeros((segments, teams, columns), np.float32)
        for place in range(-(-rows // segments) if rows else 0):
            some = slice(place * segments, min((place + 1) * segments, rows))
            taken = some.stop - some.start
            sums[:taken, place % teams] = fma(a[some], b[some], sums[:taken, place % teams])
        partials = in_order(sums, axis=1)
        return in_order(np.array([in_order(partials[strand::strands], axis=0) for strand in range(strands)]), axis=0)


def backward_mean(products: Floats, shape: BackwardShape) -> Floats:
    """The mean of each row [rows, 1], in the backward kernel's order of additions."""
    with np.errstate(all="ignore"):
        return (_row_sum(products, shape.team_warps) * (np.float32(1) / np.float32(products.shape[1])))[:, None]


def _row_sum(products: Floats, team_warps: int) -> Floats:
    rows, columns = products.shape
    width = 8
    span = team_warps * 32 * width
    packs = -(-columns // span)
    padded = np.zeros((rows, packs * span), np.float32)
    padded[:, :columns] = products
    elements = padded.reshape(rows, packs, team_warps * 32, width)
    threads = in_order(in_order(elements), axis=1)
    warps = butterfly(threads.reshape(rows, team_warps, 32))
    return warps[:, 0] if team_warps == 1 else in_order(warps)


def fp8_division(x: NDArray, fp8type: DTypeLike, s_y: NDArray | None = None) -> tuple[NDArray, NDArray]:
    """(y, s_y): a bfloat16 or float32 array quantised with one scale for the tensor, and the scale.

    If `s_y` is None, the scale is (max|x| + 1e-10) / fp8_max with each step rounded to x's dtype.
    """
    values, target = np.asarray(x).astype(np.float32), dtypes.fp8(fp8type, "fp8type")
    limit = np.float32(target.fp8_max or 0)
    with np.errstate(all="ignore"):
        if s_y is None:
            maximum = np.abs(values).max(initial=np.float32(0))
            floored = round_to(maximum + SCALE_FLOOR, x.dtype).astype(np.float32)
            s_y = round_to(floored / limit, x.dtype).reshape(())
        return round_to(values / s_y.astype(np.float32).reshape(()), target), s_y
