# SPDX-License-Identifier: Apache-2.0
"""Rules by which results count as equal: bit for bit where PTX defines the bits, and otherwise within a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .operands import FORMATS, PAIRS, Words

Compare = Callable[[np.ndarray, np.ndarray, tuple[Words, ...], str], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """How results of the emulated driver are compared with a GPU's. `wrong(emulated, gpu, operands, result kind)` marks
    the rows that are outside the bound; if it is None, all bits must be equal."""

    bound: str
    reason: str
    wrong: Compare | None = None


def _real(bits: np.ndarray, kind: str) -> np.ndarray:
    """The values of one lane as float64."""
    if kind == "bf16":
        bits, kind = bits.astype(np.uint32) << np.uint32(16), "f32"
    unsigned = {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}[kind]
    floating = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
    with np.errstate(invalid="ignore"):  # numpy warns of the conversion of a signalling NaN
        return bits.astype(unsigned).view(floating).astype(np.float64)


def _lanes(bits: np.ndarray, kind: str) -> list[tuple[np.ndarray, str]]:
    if kind not in PAIRS:
        return [(bits, kind)]
    half = np.uint32(16)
    return [(bits & np.uint32(0xFFFF), PAIRS[kind]), (bits >> half, PAIRS[kind])]


def _bounded(allowed: Callable[[np.ndarray, np.ndarray, str], np.ndarray]) -> Compare:
    """A comparison that marks the rows whose results differ by more than `allowed(emulated, first operand, format)`.

    Where one driver gives NaN or an infinity, the other must too.
    """

    def wrong(emulated: np.ndarray, gpu: np.ndarray, sources: tuple[Words, ...], kind: str) -> np.ndarray:
        total = np.zeros(len(gpu), bool)
        for (a, k), (b, _), (x, _) in zip(
            _lanes(emulated, kind), _lanes(gpu, kind), _lanes(sources[0].astype(emulated.dtype), kind), strict=True
        ):
            e, g, s = _real(a, k), _real(b, k), _real(x, k)
            with np.errstate(invalid="ignore", over="ignore"):
                far = ~(np.abs(e - g) <= allowed(e, s, k))
            nan = np.isnan(e) | np.isnan(g)
            far = np.where(nan, np.isnan(e) != np.isnan(g), far)
            far |= np.isinf(e) & (e != g)
            total |= far & (a != b)
        return total

    return wrong


def _unit(value: np.ndarray, kind: str) -> np.ndarray:
    """One unit in the last place of each value."""
    f = FORMATS[kind]
    magnitude = np.maximum(np.abs(value), 2.0 ** (1 - f.bias))
    magnitude = np.where(np.isfinite(magnitude), magnitude, 1.0)
    return np.exp2(np.floor(np.log2(magnitude)) - f.mantissa)


def ulps(count: float) -> Compare:
    return _bounded(lambda e, x, k: count * _unit(e, k))


def relative(bound: float) -> Compare:
    return _bounded(lambda e, x, k: bound * np.abs(e) + 0.5 * _unit(e, k))


def absolute(bound: float, limit: float = np.inf) -> Compare:
    """A comparison with an absolute bound, for operands up to `limit`; no bound is stated for greater ones."""
    return _bounded(lambda e, x, k: np.where(np.abs(x) <= limit, bound + 0.5 * _unit(e, k), np.inf))


def _any_nan(emulated: np.ndarray, gpu: np.ndarray, sources: tuple[Words, ...], kind: str) -> np.ndarray:
    return (emulated != gpu) & ~(is_nan64(emulated) & is_nan64(gpu))


def is_nan64(bits: np.ndarray) -> np.ndarray:
    return bits & np.uint64((1 << 63) - 1) > np.uint64(0x7FF << 52)


_LOG2 = _bounded(lambda e, x, k: 2**-22 * np.maximum(np.abs(e), 1.0))
# `_unit` is added because a GPU does not round subnormal results to nearest.
_EXP2 = _bounded(lambda e, x, k: 2**-22 * np.abs(e) + _unit(e, k))

# For approximate functions, the emulated driver rounds the exact value. "measured" is the largest error of an H200.
RULES = {
    "exact": Rule("bit-equal", "PTX or the device defines every bit"),
    "nan": Rule("bit-equal, any NaN", "which payload and sign an fp64 NaN has depends on the operation", _any_nan),
    "div.approx": Rule("2 ulp", "a product with an approximate reciprocal; measured 2", ulps(2)),
    "div.full": Rule("2 ulp", "a product with an approximate reciprocal; measured 2", ulps(2)),
    "rcp.approx": Rule("1 ulp", "an approximation; measured 1", ulps(1)),
    "sqrt.approx": Rule("1 ulp", "an approximation; measured 1", ulps(1)),
    "rsqrt.approx": Rule("1 ulp", "an approximation; measured 1", ulps(1)),
    "ex2.approx": Rule("2^-22 relative and 1 ulp", "an approximation; measured 2 ulp", _EXP2),
    "lg2.approx": Rule("2^-22, relative above 1", "an approximation; near 1 its relative error is great", _LOG2),
    "sin.approx": Rule("2^-20.5 up to 2 pi", "an approximation; measured 2^-20.7", absolute(2**-20.5, 2 * np.pi)),
    "cos.approx": Rule("2^-20.5 up to 2 pi", "an approximation; measured 2^-21", absolute(2**-20.5, 2 * np.pi)),
    "tanh.approx": Rule("2^-11 relative", "an approximation; measured 2^-16.6", relative(2**-11)),
    "ex2.half": Rule("2 ulp", "an approximation; measured 1", ulps(2)),
    "tanh.half": Rule("2 ulp", "an approximation; measured 1", ulps(2)),
    "rstd": Rule("2 ulp", "the reciprocal of a root, both approximations", ulps(2)),
    "gross": Rule("2^-20 relative", "20 bits of the result are right", relative(2**-20)),
    "rsqrt.approx.f64": Rule("1 ulp", "an approximation; measured 1", ulps(1)),
}
