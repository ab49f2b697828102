# SPDX-License-Identifier: Apache-2.0
"""COAT's FP8 ops whose results have group scales, in numpy, with every rounding of the kernels and in their order.

The approximate instructions are correctly rounded here, as on the emulated driver. A GPU's may differ by an ulp or two.
With an `Arithmetic` that computes these instructions as the GPU does, all bits of the results are the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import DTypeLike
from .arithmetic import Floats, NDArray, round_to
from .coat_rmsnorm import SCALE_FLOOR, dequantise, row_rstd


class Arithmetic(NamedTuple):
    """The instructions `div.full` and `rcp.approx.ftz`, with their roundings, as functions of fp32 arrays."""

    divide: Callable[[Any, Any], Floats] = np.divide
    reciprocal: Callable[[Any], Floats] = np.reciprocal


class Quantised(NamedTuple):
    """FP8 values, and their group scales in bfloat16."""

    values: NDArray
    scales: NDArray


class Sum(NamedTuple):
    """The results of `fp8_add`: the sum in bfloat16, and the sum quantised."""

    total: NDArray
    x: NDArray
    s_x: NDArray


class Normalised(NamedTuple):
    """The results of `fp8_rmsnorm_pg2pg_forward`."""

    qy: NDArray
    s_y: NDArray
    rstd: Floats


EXACT = Arithmetic()


def quantise_groups(values: Floats, fp8: DTypeLike, QB: int, arithmetic: Arithmetic = EXACT) -> Quantised:
    """fp32 values [..., columns] quantised in groups of QB columns. They are divided by the unrounded scales of their
    groups; the result has the scales rounded to bfloat16."""
    *leading, columns = values.shape
    target = dtypes.fp8(fp8)
    groups = -(-columns // QB)
    limit = np.float32(target.fp8_max or 0)
    padded = np.full((*leading, groups * QB), np.nan, np.float32)
    padded[..., :columns] = values
    grouped = padded.reshape(*leading, groups, QB)
    with np.errstate(all="ignore"):
        most = np.fmax.reduce(np.abs(grouped), axis=-1)
        scales = arithmetic.divide(most + SCALE_FLOOR, limit)
        inverse = arithmetic.reciprocal(scales)
        quotients = (grouped * inverse[..., None]).reshape(padded.shape)[..., :columns]
    return Quantised(round_to(quotients, target), round_to(scales, "bfloat16"))


def fp8_add(x1: NDArray, x2: NDArray, fp8: DTypeLike, QB: int, arithmetic: Arithmetic = EXACT) -> Sum:
    """The residual addition of two bfloat16 arrays. `fp8` is the op's `fp8type`."""
    with np.errstate(all="ignore"):
        total = np.asarray(x1).astype(np.float32) + np.asarray(x2).astype(np.float32)
    return Sum(round_to(total, "bfloat16"), *quantise_groups(total, fp8, QB, arithmetic))


def fp8_rmsnorm_pg2pg_forward(
    x: NDArray,
    s_x: NDArray,
    w: NDArray,
    QB: int,
    eps: float,
    *,
    rstd: Floats | None = None,
    arithmetic: Arithmetic = EXACT,
) -> Normalised:
    """RMSNorm of an x with group scales. The result has group scales too. If `rstd` is None, it is computed from x."""
    values = dequantise(x, s_x, QB)
    if rstd is None:
        rstd = row_rstd(x, s_x, QB, eps)
    with np.errstate(all="ignore"):
        y = (values * rstd[:, None]) * np.asarray(w).astype(np.float32)
    qy, s_y = quantise_groups(y.reshape(x.shape), x.dtype, QB, arithmetic)
    return Normalised(qy, s_y, rstd)
