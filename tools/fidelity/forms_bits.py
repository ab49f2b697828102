# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of the instructions for logic, shifts, bit fields and byte permutations."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form, product

TABLES = (0x00, 0x01, 0x0F, 0x17, 0x33, 0x3C, 0x55, 0x6A, 0x80, 0x96, 0xB8, 0xCA, 0xE4, 0xE8, 0xFE, 0xFF)


def forms() -> Iterator[Form]:
    for t in ("b16", "b32", "b64"):
        i = "i" + t[1:]
        for op in ("and", "or", "xor"):
            yield form(f"{op}.{t}", f"{i} {i}", i)
        for op in ("not", "cnot"):
            yield form(f"{op}.{t}", i, i)
        yield form(f"shl.{t}", f"{i} amount", i)
        for kind in "bus":
            yield form(f"shr.{kind}{t[1:]}", f"{i} amount", i)
    for t in ("b16", "b32", "b64"):
        i, n = "i" + t[1:], int(t[1:])
        for amount in (0, 1, n - 1, n, n + 1, 255):
            for op in (f"shl.{t}", f"shr.u{n}", f"shr.s{n}"):
                yield form(op, i, i, f"{op} r, x, {amount};", note=f"by {amount}")
    for op in ("and", "or", "xor"):
        yield form(f"{op}.pred", "bit bit", "i32", f"{_predicates('x', 'y')} {op}.pred p, p, q; selp.b32 r, 1, 0, p;")
    yield form("not.pred", "bit", "i32", "setp.ne.b32 p, x, 0; not.pred p, p; selp.b32 r, 1, 0, p;")
    for opcode in product(("shf.l", "shf.r"), (".wrap.b32", ".clamp.b32")):
        yield form(opcode, "i32 i32 amount", "i32")
    for value in TABLES:
        yield form("lop3.b32", "i32 i32 i32", "i32", f"lop3.b32 r, x, y, z, {value};", note=f"{value:#04x}")
    for boolean in ("or", "and"):
        body = (
            f"setp.ne.b32 q, w, 0; lop3.{boolean}.b32 t|p, x, y, z, 0x80, q; selp.b32 u, 1, 0, p; mov.b64 r, {{t, u}};"
        )
        yield form(f"lop3.{boolean}.b32", "i32 i32 i32 bit", "i64", body)
    for n in (32, 64):
        i = f"i{n}"
        for op in ("popc", "clz"):
            yield form(f"{op}.b{n}", i, "i32")
        yield form(f"brev.b{n}", i, i)
        for s in "us":
            yield form(f"bfind.{s}{n}", i, "i32")
            yield form(f"bfind.shiftamt.{s}{n}", i, "i32")
            yield form(f"bfe.{s}{n}", f"{i} amount amount", i)
        yield form(f"bfi.b{n}", f"{i} {i} amount amount", i)
    base = "and.b32 t, y, 31; and.b32 u, z, 63; sub.s32 u, u, 32;"
    yield form("fns.b32", "i32 i32 i32", "i32", f"{base} fns.b32 r, x, t, u;")
    yield form("fns.b32", "i32 i32", "i32", "and.b32 t, y, 31; fns.b32 r, x, t, 0;", note="by 0")
    for mode in ("clamp", "wrap"):
        yield form(f"bmsk.{mode}.b32", "amount amount", "i32")
        for t in ("u32", "s32"):
            yield form(f"szext.{mode}.{t}", "i32 amount", "i32")
    yield form("prmt.b32", "i32 i32 i32", "i32")
    for selector in (0x3210, 0x7654, 0x0123, 0x4501, 0xFEDC, 0xBA98, 0x3276, 0x8080):
        yield form("prmt.b32", "i32 i32", "i32", f"prmt.b32 r, x, y, {selector:#x};", note=f"{selector:#06x}")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        for selector in range(4):
            opcode = f"prmt.b32.{mode}"
            yield form(opcode, "i32 i32", "i32", f"{opcode} r, x, y, {selector};", note=f"{selector}")


def _predicates(first: str, second: str) -> str:
    return f"setp.ne.b32 p, {first}, 0; setp.ne.b32 q, {second}, 0;"
