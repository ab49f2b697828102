# SPDX-License-Identifier: Apache-2.0
"""The matrix-vector product with an RMSNorm of the first columns of its result, in numpy: the bits of the kernel, since
every rounding is done in the kernel's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import DTypeLike
from ..plans.gemv import ACT_SCALE_GROUPS, SCALE_GROUP
from .arithmetic import Floats, NDArray, butterfly, fma, round_to
from .norm import row_sum_of_squares

PACK_BYTES = 16
GROUP = 32


class Normed(NamedTuple):
    """The results: `normed` [..., n_normed] and `unnormed` [..., N - n_normed], in the dtype of the outputs."""

    normed: NDArray
    unnormed: NDArray


def row_products(
    act: NDArray, weight: NDArray, weight_scales: NDArray | None = None, act_scales: NDArray | None = None
) -> Floats:
    """act [M, K] . weight [N, K]^T as float32 sums [M, N], in the kernel's order.

    A pack is 16 bytes of a row of the weight. Products are added in order inside a pack, by fma if both types have at
    most 16 bits. If scales belong to groups of columns, the sum of a pack is multiplied by the scale of its columns,
    first the weight's, then act's. 32 packs are added by butterfly; lane l adds the sums l, l + 32, ... of these in
    order; and the 32 lanes are added by butterfly. Every sum begins at +0. Scales of rows, or of a whole array, are
    applied last, the weight's, then act's.
    """
    size = dtypes.get(weight.dtype).itemsize
    width = PACK_BYTES // size
    n, k = weight.shape
    groups = -(-k * size // (PACK_BYTES * GROUP))
    padded = groups * GROUP * width
    exact = size < 4 and dtypes.get(act.dtype).itemsize < 4

    def packs(values: NDArray) -> Floats:
        wide = np.zeros((values.shape[0], padded), np.float32)
        wide[:, :k] = values.astype(np.float32)
        return wide.reshape(values.shape[0], -1, width)

    a, w = packs(act), packs(weight)
    count = padded // width

    def of_packs(scales: NDArray, columns: int) -> Floats:
        """The scale of each pack [rows, packs]; each scale belongs to a group of `columns` columns."""
        repeated = np.repeat(scales.astype(np.float32), columns // width, axis=1)[:, :count]
        result = np.zeros((scales.shape[0], count), np.float32)
        result[:, : repeated.shape[1]] = repeated
        return result

    by_pack = weight_scales is not None and weight_scales.ndim == 2
    act_by_pack = act_scales is not None and act_scales.ndim == 2
    if act_scales is not None and act_scales.ndim == 2:
        columns = next(c for c in ACT_SCALE_GROUPS if act_scales.shape[1] == -(-k // c))
    result = np.zeros((act.shape[0], n), np.float32)
    with np.errstate(all="ignore"):
        for m in range(act.shape[0]):
            sums: Floats = np.zeros((n, count), np.float32)
            for e in range(width):
                left = np.broadcast_to(a[m, :, e], (n, count))
                sums = fma(left, w[..., e], sums) if exact else sums + left * w[..., e]
            if weight_scales is not None and by_pack:
                sums = sums * of_packs(weight_scales, SCALE_GROUP)
            if act_scales is not None and act_by_pack:
                sums = sums * of_packs(act_scales[m : m + 1], columns)
            of_group = butterfly(sums.reshape(n, groups, GROUP))
            lanes = np.zeros((n, GROUP), np.float32)
            for first in range(0, groups, GROUP):
                some = of_group[:, first : first + GROUP]
                lanes[:, : some.shape[1]] += some
            total = butterfly(lanes)
            if weight_scales is not None and not by_pack:
                total = total * weight_scales.astype(np.float32)
            if act_scales is not None and not act_by_pack:
                total = total * np.broadcast_to(act_scales.astype(np.float32), act.shape[:1])[m]
            result[m] = total
    return result


def gemv_partial_norm(
    act: NDArray,
    weight: NDArray,
    gamma: NDArray | None,
    *,
    n_normed: int,
    epsilon: float,
    act_scales: NDArray | None = None,
    weight_scales: NDArray | None = None,
    bias: NDArray | None = None,
    epilogue: Callable[[Floats], NDArray] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Normed:
    """The results of `drvfuse.gemv_partial_norm`. The norm reads y in float32, not rounded. act is [K] or [M, K].

    `epilogue` maps the float32 sums [M, N], to which the bias is added, to y; it should compute in float32.
    """
    target = out_dtype or ("bfloat16" if dtypes.get(act.dtype).fp8_max is not None else act.dtype)
    lead = act.shape[:-1]
    # Make scales of rows [M], and scales of groups [M, groups]. A single scale has no axes, and stays as it is.
    if act_scales is not None and act_scales.ndim:
        act_scales = act_scales.reshape(-1, *act_scales.shape[len(lead) :])
    y = row_products(act.reshape(-1, act.shape[-1]), weight, weight_scales, act_scales)
    with np.errstate(all="ignore"):
        if bias is not None:
            y = y + bias.astype(np.float32)
        if epilogue is not None:
            y = np.asarray(epilogue(y), np.float32)
    y = round_to(y, "float32")
    first = np.ascontiguousarray(y[:, :n_normed])
    with np.errstate(all="ignore"):
        mean = row_sum_of_squares(first, "float32") / np.float32(max(n_normed, 1))
        factor = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        gammas = np.ones(0, np.float32) if gamma is None else np.asarray(gamma).astype(np.float32)
        scaled = (first * gammas) * factor[:, None]
    return Normed(
        round_to(scaled, target).reshape(*lead, n_normed),
        round_to(y[:, n_normed:], target).reshape(*lead, weight.shape[0] - n_normed),
    )
