# SPDX-License-Identifier: Apache-2.0
"""Quantisation in numpy, bit for bit: the rules of `drvfuse.Quantisation`, and the layouts of its scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import FP4, DType, DTypeLike
from ..errors import ArgumentError, shown
from ..plans.quantisation import E8M0, Quantisation
from .arithmetic import Floats, NDArray, bits, round_to

_E8M0_NAN = 0xFF
_E2M1_MAX = np.float32(6)
_MANTISSA_OF_MAX = 0x600000  # the mantissa of 448 and 57344, which are 1.75 times a power of two


class Quantised(NamedTuple):
    """Codes and scales as an op writes them; `scales` is None if the op writes none."""

    output: NDArray
    scales: NDArray | None


def quantisation(
    maxima: Floats, upper_bound: float, dtype: DTypeLike, scales_dtype: DTypeLike
) -> tuple[NDArray, Floats]:
    """(scales in `scales_dtype`, multipliers in float32) for rows whose largest magnitudes are `maxima`.

    The scale is min(maximum, upper_bound) / fp8_max in `scales_dtype`, where fp8_max is the largest finite number of
    `dtype`. The multiplier is its inverse, or 0 if the inverse is infinite or NaN. A NaN maximum gives a NaN scale.
    """
    fp8 = dtypes.get(dtype)
    largest = round_to(maxima, scales_dtype).astype(np.float32)
    bound = round_to(np.asarray(upper_bound, np.float32), scales_dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        limit = np.where(bound < largest, bound, largest)
        scales = round_to(limit / np.float32(fp8.fp8_max or 0), scales_dtype)
    return scales, _inverse(scales.astype(np.float32))


_of_rows = quantisation  # for functions in which `quantisation` is a parameter, and so hides the function of that name


def quantise(
    y: NDArray, quantisation: Quantisation, in_dtype: DTypeLike = "float32", maxima: Floats | None = None
) -> Quantised:
    """Quantise `y` [..., columns], which is read as float32. Without quantisation y is rounded to `in_dtype`.

    `maxima` are the largest magnitudes of rows [...], if the caller knows them, for example from `norm.normalise`; if
    `maxima` is None, they are computed from y. The largest magnitudes of groups are always those of y.
    """
    y = np.asarray(y, np.float32)
    source = dtypes.get(in_dtype)
    columns = y.shape[-1]
    quantisation.check(columns, source)
    if quantisation.dtype is None:
        return Quantised(round_to(y, source), None)
    if quantisation.kind == "static":
        with np.errstate(all="ignore"):
            return Quantised(round_to(y * _inverse(np.array(quantisation.scale, np.float32)), quantisation.dtype), None)
    groups = quantisation.groups(columns)
    pieces = y.reshape(*y.shape[:-1], groups, columns // groups)
    largest = np.abs(pieces).max(axis=-1) if maxima is None else maxima.reshape(pieces.shape[:-1])
    scales, inverse = _of_groups(largest, quantisation)
    with np.errstate(all="ignore"):
        scaled = (pieces * inverse[..., None]).reshape(y.shape)
    output = pack_fp4(scaled) if quantisation.dtype == FP4 else round_to(scaled, quantisation.dtype)
    if quantisation.kind == "row":
        return Quantised(output, scales[..., 0])
    return Quantised(output, arrange(scales, quantisation))


def dequantise(output: NDArray, scales: NDArray | None, quantisation: Quantisation) -> Floats:
    """The float32 values of codes times their scales, each product rounded once."""
    codes = unpack_fp4(output) if quantisation.dtype == FP4 else np.asarray(output).astype(np.float32)
    if quantisation.kind in ("none", "static"):
        return codes * np.float32(quantisation.scale)
    if scales is None:
        raise ArgumentError("scales", "None", f"the scales of {quantisation}")
    values = scales_by_row(scales, quantisation, codes.shape[:-1], codes.shape[-1]).astype(np.float32)
    with np.errstate(all="ignore"):
        factors = values * np.float32(quantisation.scale)
        return codes * np.repeat(factors, codes.shape[-1] // factors.shape[-1], axis=-1)


def _of_groups(maxima: Floats, quantisation: Quantisation) -> tuple[NDArray, Floats]:
    """(The scales of groups whose largest magnitudes are `maxima`, the numbers by which the values of each group are
    multiplied before they are rounded to codes)."""
    target, kind = quantisation.dtype, quantisation.scales
    assert target is not None and kind is not None
    if target == FP4:
        tensor_scale = np.float32(quantisation.scale)
        with np.errstate(all="ignore"):
            scales = round_to(maxima / _E2M1_MAX / tensor_scale, kind)
            return scales, _inverse(scales.astype(np.float32) * tensor_scale)
    if kind == E8M0:
        bound = np.float32(quantisation.upper_bound)
        scales = _e8m0(np.where(bound < maxima, bound, maxima), target)
        with np.errstate(all="ignore"):
            return scales, np.float32(1) / scales.astype(np.float32)
    return _of_rows(maxima, quantisation.upper_bound, target, kind)


def _e8m0(limit: Floats, target: DType) -> NDArray:
    """The least power of two, from 2^-127 on, that is at least limit / fp8_max. Its exponent is the difference of the
    exponents, plus one if the mantissa of `limit` exceeds that of fp8_max.
    """
    exponent_of_max = math.frexp(target.fp8_max or 0)[1] - 1
    stored = bits(np.asarray(limit, np.float32)).astype(np.int64)
    rounded_up = (stored + (0x7FFFFF - _MANTISSA_OF_MAX)) >> 23
    codes = np.where(np.isnan(limit), _E8M0_NAN, np.maximum(rounded_up - exponent_of_max, 0))
    return codes.astype(np.uint8).view(dtypes.get(E8M0).numpy)


def _inverse(scales: Floats) -> Floats:
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0)).astype(np.float32)


def pack_fp4(values: Floats) -> NDArray:
    """float32 `values` [..., columns] as e2m1 codes, two in each byte: rounded to nearest even and saturated; NaN is
    +6."""
    import ml_dtypes

    within = np.where(np.isnan(values), _E2M1_MAX, np.clip(values, -_E2M1_MAX, _E2M1_MAX))
    codes = within.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_fp4(packed: NDArray) -> Floats:
    """The float32 values of the e2m1 codes in bytes [..., columns / 2]."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    packed = np.asarray(packed).view(np.uint8)
    pairs = np.stack([table[packed & 0xF], table[packed >> 4]], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def arrange(scales: NDArray, quantisation: Quantisation) -> NDArray:
    """Scales [..., groups] in the layout of the quantisation, with padding of 0."""
    if quantisation.layout == "row":
        return scales
    rows, groups = math.prod(scales.shape[:-1]), scales.shape[-1]
    shape = quantisation.scales_shape(scales.shape[:-1], groups * quantisation.group)
    assert shape is not None
    stored = np.zeros(math.prod(shape), scales.dtype)  # the padding bytes are 0, also for E8M0
    stored[_places(quantisation, rows, groups)] = scales.reshape(rows, groups)
    return stored.reshape(shape)


def scales_by_row(scales: NDArray, quantisation: Quantisation, rows_shape: Sequence[int], columns: int) -> NDArray:
    """Scales [*rows_shape, groups] from `scales`, which an op has written in the layout of the quantisation.

    The rows have the shape `rows_shape`, a tuple such as (rows,), and `columns` elements each: (*rows_shape, columns)
    is the shape of the op's inputs. Raises ArgumentError if `scales` does not have the shape that follows from them.
    """
    if not isinstance(rows_shape, Sequence):
        raise ArgumentError("rows_shape", shown(rows_shape), "a tuple: the shape of the inputs without the columns")
    rows, groups = math.prod(rows_shape), quantisation.groups(columns)
    if scales.shape != (shape := quantisation.scales_shape(rows_shape, columns)):
        raise ArgumentError("scales", f"of shape {scales.shape}", f"of shape {shape}")
    if quantisation.layout == "row":
        return scales.reshape(*rows_shape, groups)
    return scales.reshape(-1)[_places(quantisation, rows, groups)].reshape(*rows_shape, groups)


def _places(quantisation: Quantisation, rows: int, groups: int) -> NDArray:
    """For each row and group, the index of its scale in the flattened array of a "column" or "tiles" layout."""
    row, group = np.arange(rows)[:, None], np.arange(groups)[None, :]
    if quantisation.layout == "column":
        return group * (-(-rows // 4) * 4) + row
    tile = row // 128 * (-(-groups // 4)) + group // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
