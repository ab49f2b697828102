# SPDX-License-Identifier: Apache-2.0
"""Cases of floating-point opcodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from exact_numbers import ADD, CANONICAL, DIV, FMA, FORMATS, MUL, SUB, decode, encode, is_nan, rounded, signed
from integer_cases import Add


def float_cases(add: Add) -> None:
    """Add the cases of floating-point opcodes."""
    for mode in ("rn", "rz", "rm", "rp"):
        for op, f in (("add", ADD), ("sub", SUB), ("mul", MUL), ("div", DIV)):
            add(f"{op}.{mode}.f32 r, x, y;", "f32 f32", "f32", rounded(f, "f32", mode))
        for op, f in (("add", ADD), ("sub", SUB)):
            add(f"{op}.{mode}.f64 r, x, y;", "f64 f64", "f64", functools.partial(_loose64, f=rounded(f, "f64", mode)))
        add(f"fma.{mode}.f32 r, x, y, z;", "f32 f32 f32", "f32", rounded(FMA, "f32", mode))
        add(f"rcp.{mode}.f32 r, x;", "f32", "f32", rounded(lambda a: 1 / a, "f32", mode))
        add(f"sqrt.{mode}.f32 r, x;", "f32", "f32", functools.partial(_root, mode=mode))
        for fmt in ("f16", "bf16"):
            add(
                f"cvt.{mode}.{fmt}.f32 r, x;" if mode == "rn" or fmt == "f16" else f"cvt.rz.{fmt}.f32 r, x;",
                "f32",
                fmt,
                lambda a, fmt=fmt, mode=mode if mode == "rn" or fmt == "f16" else "rz": encode(
                    decode(a, "f32"), fmt, mode
                ),
            )
        add(f"cvt.{mode}.f32.f64 r, x;", "f64", "f32", functools.partial(_narrowed, mode=mode))
        for kind in ("u32", "s32", "u64", "s64"):
            n = int(kind[1:])
            v = (lambda a, n=n: Fraction(signed(a, n))) if kind[0] == "s" else Fraction
            add(f"cvt.{mode}.f32.{kind} r, x;", f"u{n}", "f32", lambda a, v=v, mode=mode: encode(v(a), "f32", mode))
            add(
                f"cvt.{mode}.f64.{kind} r, x;",
                f"u{n}",
                "f64",
                lambda a, v=v, mode=mode: encode(v(a), "f64", mode),
            )
            if mode == "rn":
                for fmt in ("f16", "bf16"):
                    add(f"cvt.rn.{fmt}.{kind} r, x;", f"u{n}", fmt, lambda a, v=v, fmt=fmt: encode(v(a), fmt))
    for op in ("div.full", "div.approx", "rcp.approx", "sqrt.approx", "rsqrt.approx"):
        base = op.split(".")[0]
        if base == "rsqrt":
            add("rsqrt.approx.f32 r, x;", "f32", "f32", _rsqrt)
        elif base == "sqrt":
            add("sqrt.approx.f32 r, x;", "f32", "f32", _root)
        else:
            add(
                f"{op}.f32 r, {'x, y' if base == 'div' else 'x'};",
                "f32 f32" if base == "div" else "f32",
                "f32",
                functools.partial(_quotient, huge=op == "div.approx")
                if base == "div"
                else rounded(lambda a: 1 / a, "f32"),
            )
    add("add.ftz.f32 r, x, y;", "f32 f32", "f32", lambda a, b: _ftz(rounded(ADD, "f32")(_ftz(a), _ftz(b))))
    add("mul.sat.f32 r, x, y;", "f32 f32", "f32", lambda a, b: _clamp(rounded(MUL, "f32")(a, b)))
    for fmt, both in (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16")):
        top = 1 << (FORMATS[fmt][0] - 1)
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                add(
                    f"{op}{nan}.{fmt} r, x, y;",
                    f"{both} {both}",
                    fmt,
                    functools.partial(_extremum, op=op, nan=bool(nan), fmt=fmt),
                )
        canon = lambda a, fmt=fmt: CANONICAL[fmt] if is_nan(a, fmt) else a  # noqa: E731
        add(f"abs.{fmt} r, x;", fmt, fmt, lambda a, top=top, c=canon: c(a & ~top))
        add(f"neg.{fmt} r, x;", fmt, fmt, lambda a, top=top, c=canon: c(a ^ top))
        for verb, truth in {
            "lt": (1, 0, 0, 0),
            "le": (1, 1, 0, 0),
            "eq": (0, 1, 0, 0),
            "ne": (1, 0, 1, 0),
            "gt": (0, 0, 1, 0),
            "ge": (0, 1, 1, 0),
        }.items():
            for u in ("", "u"):
                add(
                    f"setp.{verb}{u}.{fmt} p, x, y; selp.u32 r, 1, 2, p;",
                    f"{fmt} {fmt}",
                    "u32",
                    functools.partial(_compare, truth=truth, unordered=bool(u), fmt=fmt),
                )
        add(
            f"setp.nan.{fmt} p, x, y; selp.u32 r, 1, 2, p;",
            f"{fmt} {fmt}",
            "u32",
            functools.partial(_compare, truth=(0, 0, 0, 0), unordered=True, fmt=fmt),
        )
    for fmt in ("f16", "bf16"):
        for op, f in (("add", ADD), ("sub", SUB), ("mul", MUL)):
            add(f"{op}.rn.{fmt} r, x, y;", f"{fmt} {fmt}", fmt, rounded(f, fmt))
            add(
                f"{op}{'.rn' if fmt == 'bf16' else ''}.{fmt}x2 r, x, y;",
                "u32 u32",
                "u32",
                functools.partial(_packed, f=rounded(f, fmt)),
            )
        add(f"fma.rn.{fmt} r, x, y, z;", f"{fmt} {fmt} {fmt}", fmt, rounded(FMA, fmt))
        add(f"fma.rn.{fmt}x2 r, x, y, z;", "u32 u32 u32", "u32", functools.partial(_packed, f=rounded(FMA, fmt)))
        add(
            f"fma.rn.relu.{fmt} r, x, y, z;",
            f"{fmt} {fmt} {fmt}",
            fmt,
            lambda *v, fmt=fmt: _relu(rounded(FMA, fmt)(*v)),
        )
        add(
            f"max.{fmt}x2 r, x, y;",
            "u32 u32",
            "u32",
            functools.partial(_packed, f=functools.partial(_extremum, op="max", nan=False, fmt=fmt)),
        )
        add(
            f"cvt.f32.{fmt} r, x;",
            fmt,
            "f32",
            lambda a, fmt=fmt: a << 16 if fmt == "bf16" else encode(decode(a, fmt), "f32"),
        )
        add(
            f"cvt.rn.{fmt}x2.f32 r, x, y;",
            "f32 f32",
            "u32",
            lambda a, b, fmt=fmt: encode(decode(a, "f32"), fmt) << 16 | encode(decode(b, "f32"), fmt),
        )
        add(
            f"cvt.rn.relu.{fmt}x2.f32 r, x, y;",
            "f32 f32",
            "u32",
            lambda a, b, fmt=fmt: _relu(encode(decode(a, "f32"), fmt)) << 16 | _relu(encode(decode(b, "f32"), fmt)),
        )
    for fmt in ("e4m3", "e5m2"):
        add(
            f"cvt.rn.satfinite.{fmt}x2.f32 r, x, y;",
            "f32 f32",
            "u16",
            lambda a, b, fmt=fmt: (
                encode(decode(a, "f32"), fmt, "rn", True) << 8 | encode(decode(b, "f32"), fmt, "rn", True)
            ),
        )
        add(
            f"cvt.rn.satfinite.{fmt}x2.f16x2 r, x;",
            "u32",
            "u16",
            lambda a, fmt=fmt: (
                encode(decode(a >> 16, "f16"), fmt, "rn", True) << 8
                | encode(decode(a & 0xFFFF, "f16"), fmt, "rn", True)
            ),
        )
        add(
            f"cvt.rn.f16x2.{fmt}x2 r, x;",
            "u16",
            "u32",
            lambda a, fmt=fmt: encode(decode(a >> 8, fmt), "f16") << 16 | encode(decode(a & 255, fmt), "f16"),
        )
    for op, f in (("add", ADD), ("sub", SUB), ("mul", MUL), ("div", DIV)):
        add(f"{op}.rn.f64 r, x, y;", "f64 f64", "f64", functools.partial(_loose64, f=rounded(f, "f64")))
    add("fma.rn.f64 r, x, y, z;", "f64 f64 f64", "f64", functools.partial(_loose64, f=rounded(FMA, "f64")))
    add("cvt.f64.f32 r, x;", "f32", "f64", functools.partial(_loose64, f=lambda a: encode(decode(a, "f32"), "f64")))
    add("copysign.f32 r, x, y;", "f32 f32", "f32", lambda a, b: (a & 0x80000000) | (b & 0x7FFFFFFF))
    add(
        "testp.subnormal.f32 p, x; testp.normal.f32 q, x; selp.u32 r, 1, 0, p; @q add.u32 r, r, 2;",
        "f32",
        "u32",
        lambda a: 0 if a & 0x7F800000 == 0x7F800000 else 2 if a & 0x7F800000 or not a & 0x7FFFFFFF else 1,
    )
    add("cvt.sat.f32.f32 r, x;", "f32", "f32", _clamp)
    add("mov.f32 r, 0f3FC00000;", "f32", "f32", lambda a: 0x3FC00000)
    add("mov.b32 %t1, x; mov.b32 r, %t1;", "f32", "f32", lambda a: a)
    add(
        "setp.gt.f32 p, x, 0f00000000; selp.f32 r, x, y, p;",
        "f32 f32",
        "f32",
        lambda a, b: a if _compare(a, 0, truth=(0, 0, 1, 0), unordered=False, fmt="f32") == 1 else b,
    )
    add(
        "set.lt.f32.f32 r, x, y;",
        "f32 f32",
        "f32",
        lambda a, b: 0x3F800000 if _compare(a, b, truth=(1, 0, 0, 0), unordered=False, fmt="f32") == 1 else 0,
    )


def _relu(a: int) -> int:
    return 0 if a >> 15 else a


def _narrowed(a: int, mode: str) -> int:
    """An fp64 number as fp32. A NaN keeps its sign and the high bits of its payload, and becomes quiet."""
    if is_nan(a, "f64"):
        return a >> 32 & 0x80000000 | 0x7FC00000 | a >> 29 & 0x7FFFFF
    return encode(decode(a, "f64"), "f32", mode)


def _quotient(a: int, b: int, huge: bool) -> int:
    """An fp32 quotient. With `huge`, the reciprocal of a divisor above 2^126 counts as zero."""
    if huge and 0x7E800000 < b & 0x7FFFFFFF < 0x7F800000:
        return rounded(MUL, "f32")(a, b & 0x80000000)
    return rounded(DIV, "f32")(a, b)


def _ftz(a: int) -> int:
    return a if a & 0x7F800000 else a & 0x80000000


def _clamp(a: int) -> int:
    v = decode(a, "f32")
    if isinstance(v, float):
        return 0x3F800000 if v == math.inf else 0
    return a if 0 < v < 1 else 0x3F800000 if v >= 1 else 0


def _root(a: int, mode: str = "rn") -> int:
    v = decode(a, "f32")
    if isinstance(v, float) or v < 0:
        return encode(v if isinstance(v, float) and (v == 0 or v == math.inf) else math.nan, "f32")
    if v == 0:
        return 0
    scaled = v * Fraction(4) ** 200
    root = math.isqrt(int(scaled))
    exact_root = Fraction(root, 2**200) if root * root == scaled else Fraction(2 * root + 1, 2**201)
    return encode(exact_root, "f32", mode)


def _rsqrt(a: int) -> int:
    v = decode(a, "f32")
    with np.errstate(all="ignore"):
        x = np.float32(1.0 / np.sqrt(np.float64(v)))
    return 0x7FFFFFFF if np.isnan(x) else int(x.view(np.uint32))


def _extremum(a: int, b: int, op: str, nan: bool, fmt: str) -> int:
    if is_nan(a, fmt) or is_nan(b, fmt):
        if nan or is_nan(a, fmt) and is_nan(b, fmt):
            return CANONICAL[fmt]
        return b if is_nan(a, fmt) else a
    n = FORMATS[fmt][0]
    key = lambda x: -(x & ~(1 << (n - 1))) - 1 if x >> (n - 1) else x  # noqa: E731
    return (min if op == "min" else max)(a, b, key=key)


def _compare(a: int, b: int, truth: tuple[int, ...], unordered: bool, fmt: str) -> int:
    if is_nan(a, fmt) or is_nan(b, fmt):
        return 1 if unordered else 2
    x, y = decode(a, fmt), decode(b, fmt)
    return 1 if truth[0 if x < y else 1 if x == y else 2] else 2


def _packed(*v: int, f: Callable[..., int]) -> int:
    return f(*(x >> 16 for x in v)) << 16 | f(*(x & 0xFFFF for x in v))


def _loose64(*v: int, f: Callable[..., int]) -> int:
    """The bits of an fp64 result of `f`, or -1 for any NaN: fp64 instructions keep the payload bits of a NaN operand,
    which `f` does not model.
    """
    r = f(*v)
    return -1 if is_nan(r, "f64") else r
