# SPDX-License-Identifier: Apache-2.0
"""Every arithmetic opcode against an exact reference in Python, on edge values and random ones.

All cases of one table are kernels of one module, so LLVM runs once.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("llvmlite")
from ptx_harness import Program, pointers  # noqa: E402

FORMATS = {
    "f64": (64, 11, 52),
    "f32": (32, 8, 23),
    "f16": (16, 5, 10),
    "bf16": (16, 8, 7),
    "e4m3": (8, 4, 3),
    "e5m2": (8, 5, 2),
}
CANONICAL = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}
COUNT = 48


# Exact reference ----------------------------------------------------------------------------------------------------
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


def samples(kind: str, seed: int, count: int = COUNT) -> np.ndarray:
    """Operands as bits: edge values, random patterns and ordinary numbers; the seed decides where edge values begin."""
    rng = np.random.default_rng(seed)
    if kind in FORMATS:
        width, eb, mb = FORMATS[kind]
        top, bias = ((1 << eb) - 1) << mb, (1 << (eb - 1)) - 1
        one = bias << mb
        edges = [
            0,
            1,
            (1 << mb) - 1,
            1 << mb,
            one,
            one + 1,
            one - 1,
            one + (1 << mb) // 2,
            top - 1,
            top,
            top | 1 << (mb - 1),
        ]
        edges = [e & ((1 << (width - 1)) - 1) for e in edges]
        near = [
            int(x)
            for x in rng.integers(one - (6 << mb if eb > 4 else 1 << mb), one + (6 << mb if eb > 4 else 1 << mb), count)
        ]
        pool = edges + [e | 1 << (width - 1) for e in edges] + near + [n | 1 << (width - 1) for n in near[: count // 2]]
    else:
        width = int(kind[1:])
        m = (1 << width) - 1
        pool = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, m, m - 1, m >> 1, (m >> 1) + 1, 0x5A & m]
        pool += [int(x) & m for x in rng.integers(0, 40, count)]
    pool += [int.from_bytes(rng.bytes(width // 8), "little") for _ in range(count)]
    rng.shuffle(pool)
    return np.array(pool[:count], f"u{width // 8}")


def corners(kind: str) -> list[int]:
    """Values of which every pair is tried: zeros, the least and largest ones, NaN; of both signs."""
    if kind not in FORMATS:
        n = int(kind[1:])
        return [0, 1, n - 1, (1 << n - 1) - 1, 1 << n - 1, (1 << n) - 1]
    n, eb, mb = FORMATS[kind]
    positive = [0, 1, ((1 << (eb - 1)) - 1) << mb, ((1 << eb) - 1) << mb, (1 << n - 1) - 1]
    return positive + [x | 1 << n - 1 for x in positive]


def signed(x: int, n: int) -> int:
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


class Case:
    """One instruction: a body that computes register r from x, y and z, the kinds of these registers, and a reference
    that computes the bits of r from theirs."""

    def __init__(self, body: str, sources: str, result: str, reference: Callable[..., int]):
        self.body, self.sources, self.result, self.reference = body, sources.split(), result, reference
        self.name = body.split(";")[0].split()[0]

    def ptx(self, name: str) -> str:
        out = [f".visible .entry {name}(" + ", ".join(f".param .u64 {name}_{i}" for i in range(4)) + ") {"]
        out += [".reg .b64 %p<4>; .reg .b64 %i<4>; .reg .pred p, q; .reg .b32 %t<4>; .reg .b64 %l<4>; .reg .b16 %h<4>;"]
        out += ["mov.u32 %t0, %tid.x; cvt.u64.u32 %i0, %t0;"]
        for register, kind, i in zip("xyz", self.sources, (1, 2, 3), strict=False):
            out.append(
                f".reg .{_register(kind)} {register}; {_address(name, i, kind)} "
                f"ld.global.{_memory(kind)} {register}, [%i1];"
            )
        out.append(f".reg .{_register(self.result)} r; {self.body}")
        out.append(f"{_address(name, 0, self.result)} st.global.{_memory(self.result)} [%i1], r; ret; }}")
        return "\n".join(out)


def _bytes(kind: str) -> int:
    return FORMATS[kind][0] // 8 if kind in FORMATS else int(kind[1:]) // 8


def _register(kind: str) -> str:
    return kind if kind in ("f32", "f64") else f"b{max(16, 8 * _bytes(kind))}"


def _memory(kind: str) -> str:
    return kind if kind in ("f32", "f64") else f"u{8 * _bytes(kind)}"


def _address(name: str, index: int, kind: str) -> str:
    return f"ld.param.u64 %p1, [{name}_{index}]; mul.lo.s64 %i1, %i0, {_bytes(kind)}; add.s64 %i1, %i1, %p1;"


CASES: list[Case] = []


def case(body: str, sources: str, result: str, reference: Callable[..., int]) -> None:
    CASES.append(Case(body, sources, result, reference))


def _integers() -> None:
    for n in (16, 32, 64):
        m = (1 << n) - 1
        for op, f in (("add", ADD), ("sub", SUB), ("mul.lo", MUL)):
            case(f"{op}.s{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, f=f, m=m: f(a, b) & m)
        case(f"mad.lo.u{n} r, x, y, z;", f"u{n} u{n} u{n}", f"u{n}", lambda a, b, c, m=m: a * b + c & m)
        for s in "us":
            v = (lambda x, n=n: signed(x, n)) if s == "s" else (lambda x: x)
            case(f"mul.hi.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, v=v, n=n, m=m: v(a) * v(b) >> n & m)
            case(f"min.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, v=v, m=m: min(v(a), v(b)) & m)
            case(f"max.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, v=v, m=m: max(v(a), v(b)) & m)
            case(
                f"sad.{s}{n} r, x, y, z;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, v=v, m=m: abs(v(a) - v(b)) + c & m,
            )

            def quotient(a: int, b: int, v: Callable = v, m: int = m) -> int:
                if not b:
                    return m
                a, b = v(a), v(b)
                return (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) & m

            def remainder(a: int, b: int, v: Callable = v, m: int = m) -> int:
                if not b:
                    return m
                a, b = v(a), v(b)
                return (abs(a) % abs(b) * (-1 if a < 0 else 1)) & m

            case(f"div.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", quotient)
            case(f"rem.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", remainder)
            case(
                f"shr.{s}{n} r, x, y;",
                f"u{n} u32",
                f"u{n}",
                lambda a, b, v=v, n=n, m=m: v(a) >> min(b, n) & m,
            )
            if n < 64:
                case(
                    f"mul.wide.{s}{n} r, x, y;",
                    f"u{n} u{n}",
                    f"u{2 * n}",
                    lambda a, b, v=v, n=n: v(a) * v(b) & (1 << 2 * n) - 1,
                )
                case(
                    f"mad.wide.{s}{n} r, x, y, z;",
                    f"u{n} u{n} u{2 * n}",
                    f"u{2 * n}",
                    lambda a, b, c, v=v, n=n: v(a) * v(b) + c & (1 << 2 * n) - 1,
                )
            for verb, f in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
                compare = eval(f"lambda a, b: a {f} b")
                case(
                    f"setp.{verb}.{s}{n} p, x, y; selp.u32 r, 1, 2, p;",
                    f"u{n} u{n}",
                    "u32",
                    lambda a, b, v=v, c=compare: 1 if c(v(a), v(b)) else 2,
                )
            if n > 16:

                def bfe(a: int, b: int, c: int, n: int = n, s: str = s) -> int:
                    # Counts above 255, which PTX does not allow, behave as on a GPU.
                    pos, length = (b & 255, c & 255) if n == 32 else (min(b, n), min(c, n))
                    if length == 0:
                        return 0
                    sign = a >> min(pos + length - 1, n - 1) & 1 if s == "s" else 0
                    return sum((a >> pos + i & 1 if i < length and pos + i < n else sign) << i for i in range(n))

                def bfind(a: int, n: int = n, s: str = s) -> int:
                    if s == "s" and a >> (n - 1):
                        a ^= (1 << n) - 1
                    return a.bit_length() - 1 & 0xFFFFFFFF

                case(f"bfe.{s}{n} r, x, y, z;", f"u{n} u32 u32", f"u{n}", bfe)
                case(f"bfind.{s}{n} r, x;", f"u{n}", "u32", bfind)
                case(
                    f"bfind.shiftamt.{s}{n} r, x;",
                    f"u{n}",
                    "u32",
                    lambda a, n=n, f=bfind: f(a) if f(a) >> 31 else n - 1 - f(a),
                )
        case(f"shl.b{n} r, x, y;", f"u{n} u32", f"u{n}", lambda a, b, n=n, m=m: a << min(b, n) & m)
        case(f"shl.b{n} r, x, {n + 3};", f"u{n}", f"u{n}", lambda a: 0)
        case(f"abs.s{n} r, x;", f"u{n}", f"u{n}", lambda a, n=n, m=m: abs(signed(a, n)) & m)
        case(f"neg.s{n} r, x;", f"u{n}", f"u{n}", lambda a, m=m: -a & m)
        for op, f in (("and", "&"), ("or", "|"), ("xor", "^")):
            case(f"{op}.b{n} r, x, y;", f"u{n} u{n}", f"u{n}", eval(f"lambda a, b: a {f} b"))
        case(f"not.b{n} r, x;", f"u{n}", f"u{n}", lambda a, m=m: a ^ m)
        case(f"cnot.b{n} r, x;", f"u{n}", f"u{n}", lambda a: int(a == 0))
        case(f"slct.u{n}.s32 r, x, y, z;", f"u{n} u{n} u32", f"u{n}", lambda a, b, c: a if signed(c, 32) >= 0 else b)
        if n > 16:
            case(f"popc.b{n} r, x;", f"u{n}", "u32", lambda a: a.bit_count())
            case(f"clz.b{n} r, x;", f"u{n}", "u32", lambda a, n=n: n - a.bit_length())
            case(f"brev.b{n} r, x;", f"u{n}", f"u{n}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))

            def bfi(a: int, b: int, c: int, n: int = n) -> int:
                pos, length = c & 255 if n == 32 else min(c, n), 9
                for i in range(length):
                    if pos + i < n:
                        b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
                return b

            case(f"bfi.b{n} r, x, y, z, 9;", f"u{n} u{n} u32", f"u{n}", bfi)
            case(
                f"add.cc.u{n} r, x, y; addc.u{n} r, z, 5;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, n=n, m=m: c + 5 + (a + b >> n) & m,
            )
            case(
                f"sub.cc.u{n} r, x, y; subc.u{n} r, z, 5;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, m=m: c - 5 - (a < b) & m,
            )
            case(
                f"mad.lo.cc.u{n} r, x, y, z; madc.hi.u{n} r, x, y, 3;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, n=n, m=m: (a * b >> n) + 3 + ((a * b & m) + c >> n) & m,
            )
    M = 0xFFFFFFFF
    case(
        "add.sat.s32 r, x, y;",
        "u32 u32",
        "u32",
        lambda a, b: max(-1 << 31, min((1 << 31) - 1, signed(a, 32) + signed(b, 32))) & M,
    )
    case("mul24.lo.u32 r, x, y;", "u32 u32", "u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M)
    case("mul24.hi.s32 r, x, y;", "u32 u32", "u32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16 & M)
    case("shf.l.wrap.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32 & M)
    case("shf.r.wrap.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: (b << 32 | a) >> (c & 31) & M)
    case("shf.l.clamp.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32 & M)
    case("shf.r.clamp.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: (b << 32 | a) >> min(c, 32) & M)
    case("lop3.b32 r, x, y, z, 0xCA;", "u32 u32 u32", "u32", lambda a, b, c: (a & b) | (~a & c & M))
    case("lop3.b32 r, x, y, z, 0x96;", "u32 u32 u32", "u32", lambda a, b, c: a ^ b ^ c)

    def permute(a: int, b: int, c: int) -> int:
        data = (b << 32 | a).to_bytes(8, "little")
        out = 0
        for i in range(4):
            pick = c >> 4 * i & 15
            byte = data[pick & 7]
            out |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * i
        return out

    case("prmt.b32 r, x, y, z;", "u32 u32 u32", "u32", permute)
    case("prmt.b32 r, x, y, 0x9C53;", "u32 u32", "u32", lambda a, b: permute(a, b, 0x9C53))
    case("prmt.b32.rc16 r, x, y, 1;", "u32 u32", "u32", lambda a, b: permute(a, b, 0x3232))
    case(
        "dp4a.s32.u32 r, x, y, z;",
        "u32 u32 u32",
        "u32",
        lambda a, b, c: c + sum(signed(a >> 8 * i, 8) * (b >> 8 * i & 255) for i in range(4)) & M,
    )
    case("bmsk.clamp.b32 r, x, y;", "u32 u32", "u32", lambda a, b: ((1 << min(b, 32)) - 1 << min(a, 32)) & M)
    case("szext.wrap.s32 r, x, y;", "u32 u32", "u32", lambda a, b: signed(a, b & 31) & M if b & 31 else 0)
    case(
        "setp.lt.and.s32 p|q, x, y, q0; selp.u32 r, 1, 0, p; @q add.u32 r, r, 2;".replace("q0", "1"),
        "u32 u32",
        "u32",
        lambda a, b: 1 if signed(a, 32) < signed(b, 32) else 2,
    )
    case(
        "setp.hi.u32 p, x, y; setp.ne.xor.b32 p, x, z, p; selp.u32 r, 1, 0, p;",
        "u32 u32 u32",
        "u32",
        lambda a, b, c: (a > b) ^ (a != c),
    )
    case("set.le.u32.s32 r, x, y;", "u32 u32", "u32", lambda a, b: M if signed(a, 32) <= signed(b, 32) else 0)
    case("mov.b32 {%h0, %h1}, x; mov.b32 r, {%h1, %h0};", "u32", "u32", lambda a: a >> 16 | (a & 0xFFFF) << 16)
    case("mov.b64 {%t1, %t2}, x; mov.b64 r, {%t2, %t1};", "u64", "u64", lambda a: a >> 32 | (a & M) << 32)
    case(
        "setp.gt.u32 p, x, y; mov.u32 r, 7; @p mov.u32 r, x; @!p add.u32 r, r, y;",
        "u32 u32",
        "u32",
        lambda a, b: a if a > b else 7 + b & M,
    )
    case(
        "vote0;".replace("vote0", "setp.gt.u32 p, x, 9; not.pred q, p; xor.pred p, p, q; selp.b32 r, x, 1, p"),
        "u32",
        "u32",
        lambda a: a,
    )


def rounded(f: Callable, fmt: str, mode: str = "rn") -> Callable[..., int]:
    return lambda *v: encode(exact(f, *(decode(x, fmt) for x in v), mode=mode), fmt, mode)


def _floats() -> None:
    for mode in ("rn", "rz", "rm", "rp"):
        for op, f in (("add", ADD), ("sub", SUB), ("mul", MUL), ("div", DIV)):
            case(f"{op}.{mode}.f32 r, x, y;", "f32 f32", "f32", rounded(f, "f32", mode))
        for op, f in (("add", ADD), ("sub", SUB)):
            case(f"{op}.{mode}.f64 r, x, y;", "f64 f64", "f64", functools.partial(_loose64, f=rounded(f, "f64", mode)))
        case(f"fma.{mode}.f32 r, x, y, z;", "f32 f32 f32", "f32", rounded(FMA, "f32", mode))
        case(f"rcp.{mode}.f32 r, x;", "f32", "f32", rounded(lambda a: 1 / a, "f32", mode))
        case(f"sqrt.{mode}.f32 r, x;", "f32", "f32", functools.partial(_root, mode=mode))
        for fmt in ("f16", "bf16"):
            case(
                f"cvt.{mode}.{fmt}.f32 r, x;" if mode == "rn" or fmt == "f16" else f"cvt.rz.{fmt}.f32 r, x;",
                "f32",
                fmt,
                lambda a, fmt=fmt, mode=mode if mode == "rn" or fmt == "f16" else "rz": encode(
                    decode(a, "f32"), fmt, mode
                ),
            )
        case(f"cvt.{mode}.f32.f64 r, x;", "f64", "f32", functools.partial(_narrowed, mode=mode))
        for kind in ("u32", "s32", "u64", "s64"):
            n = int(kind[1:])
            v = (lambda a, n=n: Fraction(signed(a, n))) if kind[0] == "s" else Fraction
            case(f"cvt.{mode}.f32.{kind} r, x;", f"u{n}", "f32", lambda a, v=v, mode=mode: encode(v(a), "f32", mode))
            case(
                f"cvt.{mode}.f64.{kind} r, x;",
                f"u{n}",
                "f64",
                lambda a, v=v, mode=mode: encode(v(a), "f64", mode),
            )
            if mode == "rn":
                for fmt in ("f16", "bf16"):
                    case(f"cvt.rn.{fmt}.{kind} r, x;", f"u{n}", fmt, lambda a, v=v, fmt=fmt: encode(v(a), fmt))
    for op in ("div.full", "div.approx", "rcp.approx", "sqrt.approx", "rsqrt.approx"):
        base = op.split(".")[0]
        if base == "rsqrt":
            case("rsqrt.approx.f32 r, x;", "f32", "f32", _rsqrt)
        elif base == "sqrt":
            case("sqrt.approx.f32 r, x;", "f32", "f32", _root)
        else:
            case(
                f"{op}.f32 r, {'x, y' if base == 'div' else 'x'};",
                "f32 f32" if base == "div" else "f32",
                "f32",
                functools.partial(_quotient, huge=op == "div.approx")
                if base == "div"
                else rounded(lambda a: 1 / a, "f32"),
            )
    case("add.ftz.f32 r, x, y;", "f32 f32", "f32", lambda a, b: _ftz(rounded(ADD, "f32")(_ftz(a), _ftz(b))))
    case("mul.sat.f32 r, x, y;", "f32 f32", "f32", lambda a, b: _clamp(rounded(MUL, "f32")(a, b)))
    for fmt, both in (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16")):
        top = 1 << (FORMATS[fmt][0] - 1)
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                case(
                    f"{op}{nan}.{fmt} r, x, y;",
                    f"{both} {both}",
                    fmt,
                    functools.partial(_extremum, op=op, nan=bool(nan), fmt=fmt),
                )
        canon = lambda a, fmt=fmt: CANONICAL[fmt] if _is_nan(a, fmt) else a  # noqa: E731
        case(f"abs.{fmt} r, x;", fmt, fmt, lambda a, top=top, c=canon: c(a & ~top))
        case(f"neg.{fmt} r, x;", fmt, fmt, lambda a, top=top, c=canon: c(a ^ top))
        for verb, truth in {
            "lt": (1, 0, 0, 0),
            "le": (1, 1, 0, 0),
            "eq": (0, 1, 0, 0),
            "ne": (1, 0, 1, 0),
            "gt": (0, 0, 1, 0),
            "ge": (0, 1, 1, 0),
        }.items():
            for u in ("", "u"):
                case(
                    f"setp.{verb}{u}.{fmt} p, x, y; selp.u32 r, 1, 2, p;",
                    f"{fmt} {fmt}",
                    "u32",
                    functools.partial(_compare, truth=truth, unordered=bool(u), fmt=fmt),
                )
        case(
            f"setp.nan.{fmt} p, x, y; selp.u32 r, 1, 2, p;",
            f"{fmt} {fmt}",
            "u32",
            functools.partial(_compare, truth=(0, 0, 0, 0), unordered=True, fmt=fmt),
        )
    for fmt in ("f16", "bf16"):
        for op, f in (("add", ADD), ("sub", SUB), ("mul", MUL)):
            case(f"{op}.rn.{fmt} r, x, y;", f"{fmt} {fmt}", fmt, rounded(f, fmt))
            case(
                f"{op}{'.rn' if fmt == 'bf16' else ''}.{fmt}x2 r, x, y;",
                "u32 u32",
                "u32",
                functools.partial(_packed, f=rounded(f, fmt)),
            )
        case(f"fma.rn.{fmt} r, x, y, z;", f"{fmt} {fmt} {fmt}", fmt, rounded(FMA, fmt))
        case(f"fma.rn.{fmt}x2 r, x, y, z;", "u32 u32 u32", "u32", functools.partial(_packed, f=rounded(FMA, fmt)))
        case(
            f"fma.rn.relu.{fmt} r, x, y, z;",
            f"{fmt} {fmt} {fmt}",
            fmt,
            lambda *v, fmt=fmt: _relu(rounded(FMA, fmt)(*v)),
        )
        case(
            f"max.{fmt}x2 r, x, y;",
            "u32 u32",
            "u32",
            functools.partial(_packed, f=functools.partial(_extremum, op="max", nan=False, fmt=fmt)),
        )
        case(
            f"cvt.f32.{fmt} r, x;",
            fmt,
            "f32",
            lambda a, fmt=fmt: a << 16 if fmt == "bf16" else encode(decode(a, fmt), "f32"),
        )
        case(
            f"cvt.rn.{fmt}x2.f32 r, x, y;",
            "f32 f32",
            "u32",
            lambda a, b, fmt=fmt: encode(decode(a, "f32"), fmt) << 16 | encode(decode(b, "f32"), fmt),
        )
        case(
            f"cvt.rn.relu.{fmt}x2.f32 r, x, y;",
            "f32 f32",
            "u32",
            lambda a, b, fmt=fmt: _relu(encode(decode(a, "f32"), fmt)) << 16 | _relu(encode(decode(b, "f32"), fmt)),
        )
    for fmt in ("e4m3", "e5m2"):
        case(
            f"cvt.rn.satfinite.{fmt}x2.f32 r, x, y;",
            "f32 f32",
            "u16",
            lambda a, b, fmt=fmt: (
                encode(decode(a, "f32"), fmt, "rn", True) << 8 | encode(decode(b, "f32"), fmt, "rn", True)
            ),
        )
        case(
            f"cvt.rn.satfinite.{fmt}x2.f16x2 r, x;",
            "u32",
            "u16",
            lambda a, fmt=fmt: (
                encode(decode(a >> 16, "f16"), fmt, "rn", True) << 8
                | encode(decode(a & 0xFFFF, "f16"), fmt, "rn", True)
            ),
        )
        case(
            f"cvt.rn.f16x2.{fmt}x2 r, x;",
            "u16",
            "u32",
            lambda a, fmt=fmt: encode(decode(a >> 8, fmt), "f16") << 16 | encode(decode(a & 255, fmt), "f16"),
        )
    for op, f in (("add", ADD), ("sub", SUB), ("mul", MUL), ("div", DIV)):
        case(f"{op}.rn.f64 r, x, y;", "f64 f64", "f64", functools.partial(_loose64, f=rounded(f, "f64")))
    case("fma.rn.f64 r, x, y, z;", "f64 f64 f64", "f64", functools.partial(_loose64, f=rounded(FMA, "f64")))
    case("cvt.f64.f32 r, x;", "f32", "f64", functools.partial(_loose64, f=lambda a: encode(decode(a, "f32"), "f64")))
    case("copysign.f32 r, x, y;", "f32 f32", "f32", lambda a, b: (a & 0x80000000) | (b & 0x7FFFFFFF))
    case(
        "testp.subnormal.f32 p, x; testp.normal.f32 q, x; selp.u32 r, 1, 0, p; @q add.u32 r, r, 2;",
        "f32",
        "u32",
        lambda a: 0 if a & 0x7F800000 == 0x7F800000 else 2 if a & 0x7F800000 or not a & 0x7FFFFFFF else 1,
    )
    case("cvt.sat.f32.f32 r, x;", "f32", "f32", _clamp)
    case("mov.f32 r, 0f3FC00000;", "f32", "f32", lambda a: 0x3FC00000)
    case("mov.b32 %t1, x; mov.b32 r, %t1;", "f32", "f32", lambda a: a)
    case(
        "setp.gt.f32 p, x, 0f00000000; selp.f32 r, x, y, p;",
        "f32 f32",
        "f32",
        lambda a, b: a if _compare(a, 0, truth=(0, 0, 1, 0), unordered=False, fmt="f32") == 1 else b,
    )
    case(
        "set.lt.f32.f32 r, x, y;",
        "f32 f32",
        "f32",
        lambda a, b: 0x3F800000 if _compare(a, b, truth=(1, 0, 0, 0), unordered=False, fmt="f32") == 1 else 0,
    )


def _integer_conversions() -> None:
    kinds = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
    for target in kinds:
        n, low, high = _range(target)
        for source in kinds:
            m = int(source[1:])
            v = (lambda a, m=m: signed(a, m)) if source[0] == "s" else (lambda a: a)
            case(f"cvt.{target}.{source} r, x;", f"u{m}", f"u{n}", lambda a, v=v, n=n: v(a) & (1 << n) - 1)
            if target != source:
                case(
                    f"cvt.sat.{target}.{source} r, x;",
                    f"u{m}",
                    f"u{n}",
                    lambda a, v=v, n=n, low=low, high=high: max(low, min(high, v(a))) & (1 << n) - 1,
                )
        for source in ("f32", "f64", "f16"):
            for mode, f in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
                if source == "f16" and mode != "rzi":
                    continue
                case(
                    f"cvt.{mode}.{target}.{source} r, x;",
                    source,
                    f"u{n}",
                    functools.partial(_to_integer, target=target, source=source, f=f),
                )
    for mode, f in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        case(f"cvt.{mode}.f32.f32 r, x;", "f32", "f32", functools.partial(_integral, f=f))


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


def _relu(a: int) -> int:
    return 0 if a >> 15 else a


def _is_nan(a: int, fmt: str) -> bool:
    v = decode(a, fmt)
    return isinstance(v, float) and math.isnan(v)


def _narrowed(a: int, mode: str) -> int:
    """fp64 to fp32: a NaN keeps its sign and the high bits of its payload, and is quiet."""
    if _is_nan(a, "f64"):
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
    if _is_nan(a, fmt) or _is_nan(b, fmt):
        if nan or _is_nan(a, fmt) and _is_nan(b, fmt):
            return CANONICAL[fmt]
        return b if _is_nan(a, fmt) else a
    n = FORMATS[fmt][0]
    key = lambda x: -(x & ~(1 << (n - 1))) - 1 if x >> (n - 1) else x  # noqa: E731
    return (min if op == "min" else max)(a, b, key=key)


def _compare(a: int, b: int, truth: tuple[int, ...], unordered: bool, fmt: str) -> int:
    if _is_nan(a, fmt) or _is_nan(b, fmt):
        return 1 if unordered else 2
    x, y = decode(a, fmt), decode(b, fmt)
    return 1 if truth[0 if x < y else 1 if x == y else 2] else 2


def _packed(*v: int, f: Callable[..., int]) -> int:
    return f(*(x >> 16 for x in v)) << 16 | f(*(x & 0xFFFF for x in v))


def _loose64(*v: int, f: Callable[..., int]) -> int:
    """fp64 keeps NaN payloads; the reference gives any NaN, so all NaNs compare equal."""
    r = f(*v)
    return -1 if _is_nan(r, "f64") else r


_integers()
_integer_conversions()
_floats()


@pytest.fixture(scope="module")
def program() -> Program:
    head = ".version 8.8\n.target sm_90a\n.address_size 64\n"
    return Program(head + "\n".join(c.ptx(f"k{i}") for i, c in enumerate(CASES)))


@pytest.mark.parametrize("base", sorted({c.name.split(".")[0] for c in CASES}))
def test_opcode_matches_the_exact_reference(program: Program, base: str) -> None:
    for index, c in enumerate(CASES):
        if c.name.split(".")[0] != base:
            continue
        inputs = [samples(kind, 1000 * index + i) for i, kind in enumerate(c.sources)]
        if len(inputs) == 2:
            crossed = np.array(list(itertools.product(*(corners(kind) for kind in c.sources))), np.uint64)
            inputs = [np.concatenate([x, crossed[:, i].astype(x.dtype)]) for i, x in enumerate(inputs)]
        count = len(inputs[0])
        out = np.zeros(count, f"u{_bytes(c.result)}")
        program.run(f"k{index}", pointers(out, *inputs).ljust(32, b"\0"), count)
        for i in range(count):
            v = [int(x[i]) for x in inputs]
            expected, got = int(c.reference(*v)), int(out[i])
            if expected == -1 and _is_nan(got, "f64"):
                continue
            assert got == expected, f"{c.body} {[hex(x) for x in v]}: {got:#x}, not {expected:#x}"


@pytest.mark.parametrize(
    ("opcode", "function", "tolerance"),
    [("ex2", np.exp2, 0), ("lg2", np.log2, 0), ("sin", np.sin, 0), ("cos", np.cos, 0), ("tanh", np.tanh, 0)],
)
def test_approximate_function_is_the_rounded_double_result(opcode: str, function: Callable, tolerance: int) -> None:
    program = Program(
        f""".version 8.8\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 o, .param .u64 a) {{ .reg .b64 %d<4>; .reg .b32 %r<2>; .reg .f32 %f<2>;
mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, 4; ld.param.u64 %d1, [a]; add.s64 %d1, %d1, %d0;
ld.global.f32 %f0, [%d1]; {opcode}.approx.f32 %f1, %f0; ld.param.u64 %d2, [o]; add.s64 %d2, %d2, %d0;
st.global.f32 [%d2], %f1; ret; }}"""
    )
    x = np.random.default_rng(7).normal(0, 4, 64).astype(np.float32)
    x = np.abs(x) if opcode == "lg2" else x
    out = np.zeros_like(x)
    program.run("k", pointers(out, x), len(x))
    expected = function(x.astype(np.float64)).astype(np.float32)
    assert np.abs(out.view(np.int32) - expected.view(np.int32)).max() <= 1


def test_float_immediates_have_the_written_bits() -> None:
    program = Program(
        """.version 8.8\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 o) { .reg .b64 %d<2>; .reg .f32 %f<4>; .reg .f64 %g;
ld.param.u64 %d0, [o]; mov.f32 %f0, 0f7FC12345; mov.f32 %f1, 1.5;
mov.f32 %f2, 0fFF800000; mov.f64 %g, 0d400921FB54442D18;
st.global.v2.f32 [%d0], {%f0, %f1}; st.global.f32 [%d0+8], %f2; st.global.f64 [%d0+16], %g; ret; }"""
    )
    out = np.zeros(6, np.uint32)
    program.run("k", pointers(out))
    assert [hex(x) for x in out] == [
        hex(x) for x in (0x7FC12345, 0x3FC00000, 0xFF800000, 0, *struct.unpack("<II", struct.pack("<d", math.pi)))
    ]
