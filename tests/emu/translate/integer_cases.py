# SPDX-License-Identifier: Apache-2.0
"""Cases of integer opcodes."""

from __future__ import annotations

from collections.abc import Callable

from exact_numbers import ADD, MUL, SUB, signed

Add = Callable[[str, str, str, Callable[..., int]], None]
"""Adds a case: its body, the kinds of its sources and of its result, and the reference."""


def integer_cases(add: Add) -> None:
    """Add the cases of integer opcodes, moves and predicates."""
    for n in (16, 32, 64):
        m = (1 << n) - 1
        for op, f in (("add", ADD), ("sub", SUB), ("mul.lo", MUL)):
            add(f"{op}.s{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, f=f, m=m: f(a, b) & m)
        add(f"mad.lo.u{n} r, x, y, z;", f"u{n} u{n} u{n}", f"u{n}", lambda a, b, c, m=m: a * b + c & m)
        for s in "us":
            v = (lambda x, n=n: signed(x, n)) if s == "s" else (lambda x: x)
            add(f"mul.hi.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, v=v, n=n, m=m: v(a) * v(b) >> n & m)
            add(f"min.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, v=v, m=m: min(v(a), v(b)) & m)
            add(f"max.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", lambda a, b, v=v, m=m: max(v(a), v(b)) & m)
            add(
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

            add(f"div.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", quotient)
            add(f"rem.{s}{n} r, x, y;", f"u{n} u{n}", f"u{n}", remainder)
            add(
                f"shr.{s}{n} r, x, y;",
                f"u{n} u32",
                f"u{n}",
                lambda a, b, v=v, n=n, m=m: v(a) >> min(b, n) & m,
            )
            if n < 64:
                add(
                    f"mul.wide.{s}{n} r, x, y;",
                    f"u{n} u{n}",
                    f"u{2 * n}",
                    lambda a, b, v=v, n=n: v(a) * v(b) & (1 << 2 * n) - 1,
                )
                add(
                    f"mad.wide.{s}{n} r, x, y, z;",
                    f"u{n} u{n} u{2 * n}",
                    f"u{2 * n}",
                    lambda a, b, c, v=v, n=n: v(a) * v(b) + c & (1 << 2 * n) - 1,
                )
            for verb, f in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
                compare = eval(f"lambda a, b: a {f} b")
                add(
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

                add(f"bfe.{s}{n} r, x, y, z;", f"u{n} u32 u32", f"u{n}", bfe)
                add(f"bfind.{s}{n} r, x;", f"u{n}", "u32", bfind)
                add(
                    f"bfind.shiftamt.{s}{n} r, x;",
                    f"u{n}",
                    "u32",
                    lambda a, n=n, f=bfind: f(a) if f(a) >> 31 else n - 1 - f(a),
                )
        add(f"shl.b{n} r, x, y;", f"u{n} u32", f"u{n}", lambda a, b, n=n, m=m: a << min(b, n) & m)
        add(f"shl.b{n} r, x, {n + 3};", f"u{n}", f"u{n}", lambda a: 0)
        add(f"abs.s{n} r, x;", f"u{n}", f"u{n}", lambda a, n=n, m=m: abs(signed(a, n)) & m)
        add(f"neg.s{n} r, x;", f"u{n}", f"u{n}", lambda a, m=m: -a & m)
        for op, f in (("and", "&"), ("or", "|"), ("xor", "^")):
            add(f"{op}.b{n} r, x, y;", f"u{n} u{n}", f"u{n}", eval(f"lambda a, b: a {f} b"))
        add(f"not.b{n} r, x;", f"u{n}", f"u{n}", lambda a, m=m: a ^ m)
        add(f"cnot.b{n} r, x;", f"u{n}", f"u{n}", lambda a: int(a == 0))
        add(f"slct.u{n}.s32 r, x, y, z;", f"u{n} u{n} u32", f"u{n}", lambda a, b, c: a if signed(c, 32) >= 0 else b)
        if n > 16:
            add(f"popc.b{n} r, x;", f"u{n}", "u32", lambda a: a.bit_count())
            add(f"clz.b{n} r, x;", f"u{n}", "u32", lambda a, n=n: n - a.bit_length())
            add(f"brev.b{n} r, x;", f"u{n}", f"u{n}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))

            def bfi(a: int, b: int, c: int, n: int = n) -> int:
                pos, length = c & 255 if n == 32 else min(c, n), 9
                for i in range(length):
                    if pos + i < n:
                        b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
                return b

            add(f"bfi.b{n} r, x, y, z, 9;", f"u{n} u{n} u32", f"u{n}", bfi)
            add(
                f"add.cc.u{n} r, x, y; addc.u{n} r, z, 5;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, n=n, m=m: c + 5 + (a + b >> n) & m,
            )
            add(
                f"sub.cc.u{n} r, x, y; subc.u{n} r, z, 5;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, m=m: c - 5 - (a < b) & m,
            )
            add(
                f"mad.lo.cc.u{n} r, x, y, z; madc.hi.u{n} r, x, y, 3;",
                f"u{n} u{n} u{n}",
                f"u{n}",
                lambda a, b, c, n=n, m=m: (a * b >> n) + 3 + ((a * b & m) + c >> n) & m,
            )
    M = 0xFFFFFFFF
    add(
        "add.sat.s32 r, x, y;",
        "u32 u32",
        "u32",
        lambda a, b: max(-1 << 31, min((1 << 31) - 1, signed(a, 32) + signed(b, 32))) & M,
    )
    add("mul24.lo.u32 r, x, y;", "u32 u32", "u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M)
    add("mul24.hi.s32 r, x, y;", "u32 u32", "u32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16 & M)
    add("shf.l.wrap.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32 & M)
    add("shf.r.wrap.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: (b << 32 | a) >> (c & 31) & M)
    add("shf.l.clamp.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32 & M)
    add("shf.r.clamp.b32 r, x, y, z;", "u32 u32 u32", "u32", lambda a, b, c: (b << 32 | a) >> min(c, 32) & M)
    add("lop3.b32 r, x, y, z, 0xCA;", "u32 u32 u32", "u32", lambda a, b, c: (a & b) | (~a & c & M))
    add("lop3.b32 r, x, y, z, 0x96;", "u32 u32 u32", "u32", lambda a, b, c: a ^ b ^ c)

    def permute(a: int, b: int, c: int) -> int:
        data = (b << 32 | a).to_bytes(8, "little")
        out = 0
        for i in range(4):
            pick = c >> 4 * i & 15
            byte = data[pick & 7]
            out |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * i
        return out

    add("prmt.b32 r, x, y, z;", "u32 u32 u32", "u32", permute)
    add("prmt.b32 r, x, y, 0x9C53;", "u32 u32", "u32", lambda a, b: permute(a, b, 0x9C53))
    add("prmt.b32.rc16 r, x, y, 1;", "u32 u32", "u32", lambda a, b: permute(a, b, 0x3232))
    add(
        "dp4a.s32.u32 r, x, y, z;",
        "u32 u32 u32",
        "u32",
        lambda a, b, c: c + sum(signed(a >> 8 * i, 8) * (b >> 8 * i & 255) for i in range(4)) & M,
    )
    add("bmsk.clamp.b32 r, x, y;", "u32 u32", "u32", lambda a, b: ((1 << min(b, 32)) - 1 << min(a, 32)) & M)
    add("szext.wrap.s32 r, x, y;", "u32 u32", "u32", lambda a, b: signed(a, b & 31) & M if b & 31 else 0)
    add(
        "setp.lt.and.s32 p|q, x, y, q0; selp.u32 r, 1, 0, p; @q add.u32 r, r, 2;".replace("q0", "1"),
        "u32 u32",
        "u32",
        lambda a, b: 1 if signed(a, 32) < signed(b, 32) else 2,
    )
    add(
        "setp.hi.u32 p, x, y; setp.ne.xor.b32 p, x, z, p; selp.u32 r, 1, 0, p;",
        "u32 u32 u32",
        "u32",
        lambda a, b, c: (a > b) ^ (a != c),
    )
    add("set.le.u32.s32 r, x, y;", "u32 u32", "u32", lambda a, b: M if signed(a, 32) <= signed(b, 32) else 0)
    add("mov.b32 {%h0, %h1}, x; mov.b32 r, {%h1, %h0};", "u32", "u32", lambda a: a >> 16 | (a & 0xFFFF) << 16)
    add("mov.b64 {%t1, %t2}, x; mov.b64 r, {%t2, %t1};", "u64", "u64", lambda a: a >> 32 | (a & M) << 32)
    add(
        "setp.gt.u32 p, x, y; mov.u32 r, 7; @p mov.u32 r, x; @!p add.u32 r, r, y;",
        "u32 u32",
        "u32",
        lambda a, b: a if a > b else 7 + b & M,
    )
    add(
        "vote0;".replace("vote0", "setp.gt.u32 p, x, 9; not.pred q, p; xor.pred p, p, q; selp.b32 r, x, 1, p"),
        "u32",
        "u32",
        lambda a: a,
    )
