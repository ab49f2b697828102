# SPDX-License-Identifier: Apache-2.0
"""Sums, products and roundings with the bits of the kernels' results."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DTypeLike
from ..errors import ArgumentError

NDArray = npt.NDArray[Any]
"""A numpy array of any dtype, those of ml_dtypes included."""
Floats = npt.NDArray[np.float32]
"""A numpy array of float32."""

_CANONICAL_NAN = {
    "float32": 0x7FFFFFFF,
    "float16": 0x7FFF,
    "bfloat16": 0x7FFF,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7F,
}


def bits(values: NDArray) -> NDArray:
    """`values` viewed as unsigned integers of their size, for comparing bit for bit."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def require_shape(argument: str, values: Any, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless `values`, the caller's `argument`, have the shape `shape`."""
    if np.shape(values) != shape:
        raise ArgumentError(argument, f"of shape {np.shape(values)}", f"of shape {shape}")


def round_to(values: NDArray, dtype: DTypeLike) -> NDArray:
    """float32 `values` rounded once to `dtype`, to nearest even, with canonical NaNs; FP8 saturates."""
    target = dtypes.get(dtype)
    values = np.asarray(values, np.float32, order="C")
    nan = np.isnan(values)
    with np.errstate(all="ignore"):
        if target.fp8_max is not None:
            result = np.where(nan, np.float32(0), np.clip(values, -target.fp8_max, target.fp8_max)).astype(target.numpy)
        elif target.name == "float32":
            result = values.copy()
        else:
            result = values.astype(target.numpy)
    if nan.any():
        bits(result)[nan] = _CANONICAL_NAN[target.name]
    return result


def butterfly(values: Floats) -> Floats:
    """The sum of the 32 values of the last axis, in the order of a warp's butterfly by xor 16, 8, 4, 2, 1."""
    width = values.shape[-1]
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width : 2 * width]
    return values[..., 0]


def in_order(values: Floats, axis: int = -1) -> Floats:
    """The sum over an axis, which begins at +0 and adds the elements in order."""
    total = np.zeros(np.delete(values.shape, axis), np.float32)
    for each in np.moveaxis(values, axis, 0):
        total += each
    return total


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c with one rounding, of float32 values.

    The float64 product is exact. The float64 sum is rounded to odd, so its rounding to float32 is the right one.
    """
    with np.errstate(all="ignore"):
        product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + addend
        high = total - addend
        error = (product - high) + (addend - (total - high))
        even = (total.view(np.int64) & 1) == 0
        away = np.where((error > 0) == (total > 0), 1, -1)
        odd = (total.view(np.int64) + np.where(even & (error != 0) & np.isfinite(total), away, 0)).view(np.float64)
        return odd.astype(np.float32)
