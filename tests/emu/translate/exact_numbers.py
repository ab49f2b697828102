# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic on the bits of floating-point formats, in fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

# By format: the widths in bits of a number, of its exponent and of its mantissa.
FORMATS = {
    "f64": (64, 11, 52),
    "f32": (32, 8, 23),
    "f16": (16, 5, 10),
    "bf16": (16, 8, 7),
    "e4m3": (8, 4, 3),
    "e5m2": (8, 5, 2),
}
CANONICAL = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}


def decode(bits: int, fmt: str) -> Fraction | float:
    """The value: a Fraction, or a float for inf, nan and -0."""
    width, eb, mb = FORMATS[fmt]
    sign, e, m = bits >> (width - 1), bits >> mb & ((1 << eb) - 1), bits & ((1 << mb) - 1)
    top = (1 << eb) - 1
    if fmt == "e4m3":
        if e == top and m == 7:
            return math.nan
    elif e == top:
        return math.nan if m else (-math.inf if sign else math.inf)
    if e == 0 and m == 0:
        return -0.0 if sign else Fraction(0)
    bias = (1 << (eb - 1)) - 1
    value = Fraction(m | (1 << mb if e else 0)) * Fraction(2) ** (max(e, 1) - bias - mb)
    return -value if sign else value


def encode(value: Fraction | float, fmt: str, mode: str = "rn", saturate: bool = False) -> int:
    width, eb, mb = FORMATS[fmt]
    bias, top = (1 << (eb - 1)) - 1, ((1 << eb) - 1) << mb
    largest = 0x7E if fmt == "e4m3" else top - 1
    infinity = largest if saturate else top
    if isinstance(value, float):
        if math.isnan(value):
            return CANONICAL.get(fmt, 0x7FF8 << 48)
        sign = math.copysign(1, value) < 0
        return (sign << (width - 1)) | (infinity if value else 0)
    sign, v = value < 0, abs(value)
    if v == 0:
        return 0
    e = max(
        math.floor(math.log2(float(v)))
        if 1e-300 < v < 1e300
        else v.numerator.bit_length() - v.denominator.bit_length(),
        1 - bias,
    )
    while Fraction(2) ** (e + 1) <= v:
        e += 1
    while Fraction(2) ** e > v and e > 1 - bias:
        e -= 1
    unit = Fraction(2) ** (e - mb)
    q, r = divmod(v, unit)
    q = int(q)
    up = {
        "rn": r * 2 > unit or (r * 2 == unit and q & 1),
        "rz": False,
        "rm": sign and r > 0,
        "rp": not sign and r > 0,
    }[mode]
    result = ((e - (1 - bias)) << mb) + q + bool(up)
    if result > largest:
        result = largest if mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign) else infinity
    return (sign << (width - 1)) | result


def exact(operation: Callable[..., Fraction], *values: Fraction | float, mode: str = "rn") -> Fraction | float:
    """The exact result of `operation` on finite values. Special values and the signs of zeros are those of
    Python's doubles, which follow the same rules."""
    if any(isinstance(v, float) and v != 0 for v in values):
        with np.errstate(all="ignore"):
            return float(
                operation(
                    *(
                        np.float64(float(v) if isinstance(v, float) else math.copysign(2.0, v) if v else 0.0)
                        for v in values
                    )
                )
            )
    try:
        result = operation(*(Fraction(0) if isinstance(v, float) else v for v in values))
    except ZeroDivisionError:
        with np.errstate(all="ignore"):
            return float(operation(*(np.float64(v) for v in values)))
    if result == 0:
        with np.errstate(all="ignore"):
            zero = operation(
                *(np.float64(v if isinstance(v, float) else math.copysign(1, v) * bool(v)) for v in values)
            )
        if zero == 0:
            sums = operation in (ADD, SUB, FMA)
            if mode == "rm" and sums and not math.copysign(1, zero) < 0:
                zero = _down_zero(operation, values)
            return -0.0 if math.copysign(1, zero) < 0 else Fraction(0)
        return -0.0 if mode == "rm" else Fraction(0)  # exact cancellation
    return result


def _down_zero(operation: Callable[..., Fraction], values: tuple[Fraction | float, ...]) -> float:
    """A zero sum in round-down is -0 unless both terms are +0."""
    s = [math.copysign(1, float(v)) for v in values]
    first = s[0] * s[1] if operation is FMA else s[0]
    last = -s[-1] if operation is SUB else s[-1]
    return 0.0 if first > 0 and last > 0 else -0.0


ADD: Callable = lambda a, b: a + b  # noqa: E731
SUB: Callable = lambda a, b: a - b  # noqa: E731
MUL: Callable = lambda a, b: a * b  # noqa: E731
DIV: Callable = lambda a, b: a / b  # noqa: E731
FMA: Callable = lambda a, b, c: a * b + c  # noqa: E731


def signed(x: int, n: int) -> int:
    """The bits x of n bits as a two's complement number."""
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def is_nan(a: int, fmt: str) -> bool:
    v = decode(a, fmt)
    return isinstance(v, float) and math.isnan(v)


def rounded(f: Callable, fmt: str, mode: str = "rn") -> Callable[..., int]:
    """A function from the bits of operands to the bits of the exact result of `f`, rounded once to the format."""
    return lambda *v: encode(exact(f, *(decode(x, fmt) for x in v), mode=mode), fmt, mode)
