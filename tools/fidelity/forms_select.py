# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of comparisons, selections, moves, reads of special registers, and branches and calls."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form, product

ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
SHOWN = "selp.b32 r, 1, 0, p;"
BOTH = "selp.b32 t, 1, 0, p; selp.b32 u, 2, 0, q; or.b32 r, t, u;"


def forms() -> Iterator[Form]:
    yield from _setp()
    yield from _set()
    yield from _selections()
    yield from _moves()
    yield from _specials()
    yield from _control()


def _comparisons() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """For each type: its name, the kind of its operands, and its comparisons."""
    for n in ("16", "32", "64"):
        yield f"b{n}", f"i{n}", ("eq", "ne")
        yield f"s{n}", f"i{n}", ORDERED
        yield f"u{n}", f"i{n}", (*ORDERED, "lo", "ls", "hi", "hs")
    for t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        yield t, t, (*ORDERED, *UNORDERED)


def _setp() -> Iterator[Form]:
    for t, kind, verbs in _comparisons():
        flushes = ("", ".ftz") if t in ("f32", "f16", "f16x2") else ("",)
        two = t.endswith("x2")
        for modifiers in product(tuple(f".{v}" for v in verbs), flushes):
            body = f"setp{modifiers}.{t} {'p|q' if two else 'p'}, x, y; {BOTH if two else SHOWN}"
            yield form(f"setp{modifiers}.{t}", f"{kind} {kind}", "i32", body)
        for boolean, verb in (("and", "lt"), ("or", "ne"), ("xor", "eq")):
            if verb not in verbs:
                continue
            one = t in ("f16", "bf16")
            body = f"setp.ne.b32 q, z, 0; setp.{verb}.{boolean}.{t} {'p' if one else 'p|q'}, x, y, q; {BOTH}"
            yield form(f"setp.{verb}.{boolean}.{t}", f"{kind} {kind} bit", "i32", body)


def _set() -> Iterator[Form]:
    for t, kind, verbs in _comparisons():
        if t in ("b16", "b32", "b64") or t.startswith(("f16", "bf16")):
            continue
        for target in ("u32", "s32", "f32"):
            result = "f32" if target == "f32" else "i32"
            for verb in verbs:
                yield form(f"set.{verb}.{target}.{t}", f"{kind} {kind}", result)
    for verb in ("lt", "geu"):
        for target in ("u32", "f32"):
            yield form(f"set.{verb}.ftz.{target}.f32", "f32 f32", "f32" if target == "f32" else "i32")
    for boolean in ("and", "or", "xor"):
        body = f"setp.ne.b32 p, z, 0; set.le.{boolean}.u32.s32 r, x, y, p;"
        yield form(f"set.le.{boolean}.u32.s32", "i32 i32 bit", "i32", body)
    for t in ("f16", "bf16", "f16x2", "bf16x2"):
        verbs = (*ORDERED, *UNORDERED)
        for verb in verbs:
            yield form(f"set.{verb}.{t}.{t}", f"{t} {t}", t)
            wide = "u32" if t.endswith("x2") else "u16"
            yield form(f"set.{verb}.{wide}.{t}", f"{t} {t}", f"i{wide[1:]}")


def _selections() -> Iterator[Form]:
    for t in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"):
        kind = t if t[0] == "f" else f"i{t[1:]}"
        yield form(f"selp.{t}", f"{kind} {kind} bit", kind, f"setp.ne.b32 p, z, 0; selp.{t} r, x, y, p;")
        yield form(f"slct.{t}.s32", f"{kind} {kind} i32", kind)
        for ftz in ("", ".ftz"):
            yield form(f"slct{ftz}.{t}.f32", f"{kind} {kind} f32", kind)


def _moves() -> Iterator[Form]:
    for t in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"):
        kind = t if t[0] == "f" else f"i{t[1:]}"
        yield form(f"mov.{t}", kind, kind)
    yield form("mov.pred", "bit", "i32", f"setp.ne.b32 q, x, 0; mov.pred p, q; {SHOWN}")
    yield form("mov.b32", "i16 i16", "i32", "mov.b32 r, {x, y};", note="of two halves")
    yield form("mov.b32", "i32", "i32", "mov.b32 {h, i}, x; mov.b32 r, {i, h};", note="to two halves")
    yield form("mov.b64", "i32 i32", "i64", "mov.b64 r, {x, y};", note="of two words")
    yield form("mov.b64", "i64", "i64", "mov.b64 {t, u}, x; mov.b64 r, {u, t};", note="to two words")
    yield form("mov.b64", "i16 i16 i16 i16", "i64", "mov.b64 r, {x, y, z, w};", note="of four halves")
    yield form("mov.b64", "i64", "i64", "mov.b64 {h, i, j, k}, x; mov.b64 r, {k, i, h, j};", note="to four halves")
    yield form("mov.f32", "f32", "f32", "mov.f32 f, 0f7FC12345; mov.f32 r, f;", note="of a NaN literal")


def _specials() -> Iterator[Form]:
    names = [f"{n}.{axis}" for n in ("%tid", "%ntid", "%ctaid", "%nctaid") for axis in "xyz"]
    names += ["%laneid", *(f"%lanemask_{k}" for k in ("eq", "lt", "le", "gt", "ge")), "%dynamic_smem_size"]
    names += ["%cluster_ctarank", "%cluster_nctarank", "%clusterid.x", "%nclusterid.x", "%cluster_nctaid.y"]
    for name in names:
        yield form("mov.u32", "", "i32", f"mov.u32 r, {name};", note=f"of {name}")


def _control() -> Iterator[Form]:
    guard = "setp.lt.s32 p, x, y;"
    yield form("bra", "i32 i32", "i32", f"{guard} mov.b32 r, x; @p bra L0; mov.b32 r, y; L0:")
    yield form("bra.uni", "i32", "i32", "mov.b32 r, x; bra.uni L0; mov.b32 r, 0; L0:")
    loop = "mov.b32 r, 0; and.b32 t, x, 15; L0: add.u32 r, r, t; sub.u32 t, t, 1; setp.gt.s32 p, t, -1; @p bra L0;"
    yield form("bra", "i32", "i32", loop, note="backwards")
    picks = " ".join(f"L{k}: mov.b32 r, {10 * k + 7}; bra L9;" for k in range(3))
    yield form(
        "brx.idx", "i32", "i32",
        f"rem.u32 t, x, 3; TARGETS: .branchtargets L0, L1, L2; brx.idx t, TARGETS; {picks} L9:",
    )  # fmt: skip
    yield form("add.s32", "i32 i32", "i32", f"{guard} mov.b32 r, 7; @p add.s32 r, x, y;", note="with a guard")
    yield form("sub.s32", "i32 i32", "i32", f"{guard} mov.b32 r, 7; @!p sub.s32 r, x, y;", note="with a negated guard")
    for name in ("call", "call.uni"):
        body = (
            "{ .param .b32 a; .param .b32 b; .param .b32 c; st.param.b32 [a], x; st.param.b32 [b], y;"
            f" {name} (c), callee, (a, b); ld.param.b32 r, [c]; }}"
        )
        yield form(name, "i32 i32", "i32", body)
    yield form("ret", "i32", "i32", "mov.b32 r, x;", note="ends every kernel here")
    yield form("exit", "i32", "i32", "mov.b32 r, x;", note="ends every thread here")
