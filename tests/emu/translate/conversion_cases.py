# SPDX-License-Identifier: Apache-2.0
"""Cases of conversions to integers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

from exact_numbers import decode, encode, signed
from integer_cases import Add


def conversion_cases(add: Add) -> None:
    """Add the conversions between integers, and from floating-point numbers to integers."""
    kinds = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
    for target in kinds:
        n, low, high = _range(target)
        for source in kinds:
            m = int(source[1:])
            v = (lambda a, m=m: signed(a, m)) if source[0] == "s" else (lambda a: a)
            add(f"cvt.{target}.{source} r, x;", f"u{m}", f"u{n}", lambda a, v=v, n=n: v(a) & (1 << n) - 1)
            if target != source:
                add(
                    f"cvt.sat.{target}.{source} r, x;",
                    f"u{m}",
                    f"u{n}",
                    lambda a, v=v, n=n, low=low, high=high: max(low, min(high, v(a))) & (1 << n) - 1,
                )
        for source in ("f32", "f64", "f16"):
            for mode, f in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
                if source == "f16" and mode != "rzi":
                    continue
                add(
                    f"cvt.{mode}.{target}.{source} r, x;",
                    source,
                    f"u{n}",
                    functools.partial(_to_integer, target=target, source=source, f=f),
                )
    for mode, f in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        add(f"cvt.{mode}.f32.f32 r, x;", "f32", "f32", functools.partial(_integral, f=f))


def _range(kind: str) -> tuple[int, int, int]:
    n = int(kind[1:])
    return (n, -(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (n, 0, (1 << n) - 1)


def _to_integer(a: int, target: str, source: str, f: Callable) -> int:
    n, low, high = _range(target)
    value = decode(a, source)
    if isinstance(value, float) and math.isnan(value):
        return 1 << (n - 1) if n == 64 or source == "f64" else 0
    if isinstance(value, float):
        value = 0 if value == 0 else high if value > 0 else low
    return max(low, min(high, f(value))) & (1 << n) - 1


def _integral(a: int, f: Callable) -> int:
    value = decode(a, "f32")
    if isinstance(value, float):
        return encode(value, "f32")
    r = Fraction(f(value))
    return encode(r, "f32") if r else (a & 0x80000000)
