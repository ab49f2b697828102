# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of loads, stores, atomics, fences and conversions of addresses."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form

_PLACES = {"global": "%cell", "shared": "%near"}
_BITS = {"b16": "i16", "b32": "i32", "b64": "i64"}


def forms() -> Iterator[Form]:
    yield from _loads_and_stores()
    yield from _atomics()
    yield from _addresses()
    for fence in ("fence.acq_rel.gpu", "fence.sc.sys", "fence.acq_rel.cta", "membar.gl", "membar.cta", "membar.sys"):
        body = f"st.global.b32 [%cell], x; {fence}; ld.global.b32 r, [%cell];"
        yield form(fence, "i32", "i32", body)


def _loads_and_stores() -> Iterator[Form]:
    whole = "st.global.b64 [%cell], x;"
    for t in ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32"):
        for at in (0, 4):
            yield form(f"ld.global.{t}", "i64", "i32", f"{whole} ld.global.{t} r, [%cell+{at}];", note=f"at {at}")
    for t in ("s8", "s16", "s32", "u8", "u32"):
        yield form(f"ld.global.{t}", "i64", "i64", f"{whole} ld.global.{t} r, [%cell];", note="to 64 bits")
    for t in ("b64", "u64", "s64"):
        yield form(f"ld.global.{t}", "i64", "i64", f"{whole} ld.global.{t} r, [%cell];")
    for t in ("f32", "f64"):
        body = f"st.global.{t} [%cell], x; ld.global.{t} r, [%cell];"
        yield form(f"ld.global.{t}", t, t, body, note=f"after st.global.{t}")
    for t in ("b8", "u8", "s16", "b16"):
        body = f"st.global.b32 [%cell], x; st.global.{t} [%cell+1], y; ld.global.b32 r, [%cell];"
        if t[1:] == "16":
            body = body.replace("+1", "+2")
        yield form(f"st.global.{t}", "i32 i32", "i32", body)
    for space, place in (*_PLACES.items(), ("local", "%own"), ("", "%cell")):
        dot = f".{space}" if space else ""
        swap = f"st{dot}.v2.b32 [{place}], {{x, y}}; ld{dot}.b32 t, [{place}+4]; ld{dot}.b32 u, [{place}];"
        yield form(f"st{dot}.v2.b32", "i32 i32", "i64", f"{swap} mov.b64 r, {{t, u}};", note="then ld")
        back = f"st{dot}.b64 [{place}], x; ld{dot}.v4.u16 {{h, i, j, k}}, [{place}]; mov.b64 r, {{k, j, i, h}};"
        yield form(f"ld{dot}.v4.u16", "i64", "i64", back)
        wide = f"st{dot}.v4.b32 [{place}], {{x, y, z, w}}; ld{dot}.v2.b64 {{s, r}}, [{place}];"
        yield form(f"ld{dot}.v2.b64", "i32 i32 i32 i32", "b128", wide, note="after st.v4.b32")
        signed = f"st{dot}.b32 [{place}], x; ld{dot}.v2.s8 {{h, i}}, [{place}+2]; mov.b32 r, {{h, i}};"
        yield form(f"ld{dot}.v2.s8", "i32", "i32", signed)
    for load in ("ld.global.nc.b64", "ld.global.nc.L1::no_allocate.b64", "ld.global.nc.L2::128B.u64"):
        body = f"ld.param.u64 l, [in0]; mad.wide.u32 l, %row, 8, l; {load} r, [l];"
        yield form(load, "i64", "i64", body)
    for t in ("u32", "u64", "b64"):
        result = f"i{t[1:]}"
        for load in (f"ld.acquire.sys.global.{t}", f"ld.relaxed.sys.global.{t}"):
            yield form(load, result, result, f"st.global.{t} [%cell], x; {load} r, [%cell];", note="after st.global")
        for store in (f"st.release.sys.global.{t}", f"st.relaxed.sys.global.{t}"):
            yield form(store, result, result, f"{store} [%cell], x; ld.global.{t} r, [%cell];", note="then ld.global")
    words = "st.global.v4.u32 [%cell], {x, y, z, w}; ld.global.v4.u32 {t, u, v, %block}, [%cell];"
    yield form("ld.global.v4.u32", "i32 i32 i32 i32", "b128", f"{words} mov.b64 r, {{u, t}}; mov.b64 s, {{%block, v}};")
    pair = "st.global.v2.u32 [%cell], {x, y}; ld.global.v2.u32 {u, t}, [%cell]; mov.b64 r, {t, u};"
    yield form("ld.global.v2.u32", "i32 i32", "i64", pair)
    for t in ("u16", "u32"):
        body = (
            f"st.shared.u32 [%near], x; st.shared.{t} [%near], y; ld.shared.{t} t, [%near]; ld.shared.u32 u, [%near];"
        )
        if t == "u16":
            body = body.replace("st.shared.u16 [%near], y", "cvt.u16.u32 h, y; st.shared.u16 [%near], h")
        yield form(f"st.shared.{t}", "i32 i32", "i64", f"{body} mov.b64 r, {{t, u}};")
    for load in (
        "ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.sys.global", "ld.relaxed.cta.global",
        "ldu.global", "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.cv", "ld.weak.global",
    ):  # fmt: skip
        yield form(f"{load}.b64", "i64", "i64", f"st.global.b64 [%cell], x; {load}.b64 r, [%cell];")
    for store in (
        "st.volatile.global", "st.relaxed.gpu.global", "st.release.sys.global", "st.release.cta.global",
        "st.global.wb", "st.global.cg", "st.global.cs", "st.global.wt", "st.weak.global",
    ):  # fmt: skip
        yield form(f"{store}.b64", "i64", "i64", f"{store}.b64 [%cell], x; ld.global.b64 r, [%cell];")
    constant = "and.b32 t, x, 7; mul.wide.u32 l, t, 4; mov.u64 m, constants; add.u64 l, l, m;"
    yield form("ld.const.b32", "i32", "i32", f"{constant} ld.const.b32 r, [l];")
    yield form("ld.const.v2.s16", "i32", "i32", f"{constant} ld.const.v2.s16 {{h, i}}, [l]; mov.b32 r, {{h, i}};")
    yield form("ld.param.b32", "", "i32", "ld.param.b32 r, [rows];")
    yield form("ld.param.u16", "", "i32", "ld.param.u16 r, [rows];")
    yield form("ld.param.v2.u32", "", "i64", "ld.param.v2.u32 {t, u}, [pair]; mov.b64 r, {u, t};")
    yield form("ld.param.v2.f32", "", "f32", "ld.param.v2.f32 {f, g}, [pair]; add.rn.f32 r, f, g;")
    yield form("ld.param.f32", "", "f32", "ld.param.f32 r, [pair+4];")
    yield form("ld.param.u64", "", "i64", "ld.param.u64 r, [pair];")


def _atomic(opcode: str, place: str, kind: str, operands: int, note: str = "") -> Form:
    """A form of atom or red on memory that holds x. The result has the old value (0 for red) and the new one."""
    n = int(kind[1:]) if kind[0] == "i" else {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}.get(kind, 32)
    space = "global" if place == "%cell" else "shared"
    old, new = {16: ("h", "i"), 32: ("t", "u"), 64: ("r", "s")}[n]
    if kind in ("f32", "f64"):
        old, new = ("f", "g") if kind == "f32" else ("d", "e")
    values = ", ".join("yz"[: operands - 1])
    t = kind if kind in ("f32", "f64") else f"b{n}"
    clear = {"f": "mov.f32 f, 0f00000000;", "d": "mov.f64 d, 0d0000000000000000;"}.get(old, f"mov.b{n} {old}, 0;")
    what = (
        f"{opcode} {old}, [{place}], {values};"
        if opcode.startswith("atom")
        else f"{clear} {opcode} [{place}], {values};"
    )
    body = f"st.{space}.{t} [{place}], x; {what} ld.{space}.{t} {new}, [{place}];"
    if n == 64:
        done = "" if kind == "i64" else " mov.b64 r, d; mov.b64 s, e;"
        return form(opcode, " ".join([kind] * operands), "b128", body + done, note=note)
    packed = {16: f"mov.b32 r, {{{old}, {new}}};", 32: f"mov.b64 r, {{{old}, {new}}};"}[n]
    return form(opcode, " ".join([kind] * operands), "i32" if n == 16 else "i64", f"{body} {packed}", note=note)


def _atomics() -> Iterator[Form]:
    integers = {
        "add": ("u32", "s32", "u64"), "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"),
        "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"), "inc": ("u32",), "dec": ("u32",),
    }  # fmt: skip
    for space, place in _PLACES.items():
        for verb, types in integers.items():
            for t in types:
                yield _atomic(f"atom.{space}.{verb}.{t}", place, f"i{t[1:]}", 2)
                yield _atomic(f"red.{space}.{verb}.{t}", place, f"i{t[1:]}", 2)
        for t in ("b32", "b64"):
            yield _atomic(f"atom.{space}.exch.{t}", place, f"i{t[1:]}", 2)
        for t in ("b16", "b32", "b64"):
            yield _atomic(f"atom.{space}.cas.{t}", place, f"i{t[1:]}", 3)
        for t in ("f32", "f64"):
            for op in ("atom", "red"):
                made = _atomic(f"{op}.{space}.add.{t}", place, t, 2)
                yield made if t == "f32" else Form(made.name, made.body, made.sources, made.result, "nan")
        for t in ("f16", "f16x2", "bf16", "bf16x2"):
            for op in ("atom", "red"):
                yield _atomic(f"{op}.{space}.add.noftz.{t}", place, t, 2)
    for order in ("relaxed.cta", "acquire.gpu", "release.sys", "acq_rel.sys", "acq_rel.gpu"):
        yield _atomic(f"atom.{order}.global.add.u32", "%cell", "i32", 2)
    for order in ("relaxed.gpu", "release.sys"):
        yield _atomic(f"red.{order}.global.max.s32", "%cell", "i32", 2)
    vectors = [("f32", "add", "f32", "f, g", 64)]
    vectors += [(t, f"{verb}.noftz", "b16", "h, i", 32) for t in ("f16", "bf16") for verb in ("add", "min", "max")]
    vectors += [(t, "add.noftz", "b32", "t, u", 64) for t in ("f16x2", "bf16x2")]
    for t, verb, stored, olds, n in vectors:
        for op, result in (("atom", f"{{{olds}}}, "), ("red", "")):
            opcode = f"{op}.global.v2.{t}.{verb}"
            body = f"st.global.v2.{stored} [%cell], {{x, y}}; {opcode} {result}[%cell], {{z, w}};"
            yield form(opcode, " ".join([t] * 4), f"i{n}", f"{body} ld.global.b{n} r, [%cell];")


def _addresses() -> Iterator[Form]:
    generic = "mov.u64 l, sharedbytes; cvt.u64.u32 m, %near; cvta.shared.u64 m, m;"
    yield form("cvta.shared.u64", "i32", "i32", f"{generic} st.shared.b32 [%near], x; ld.b32 r, [m];", note="then ld")
    back = f"{generic} cvta.to.shared.u64 n, m; st.b32 [m], x; ld.shared.b32 r, [n];"
    yield form("cvta.to.shared.u64", "i32", "i32", back)
    yield form(
        "cvta.to.global.u64", "i32", "i32", "cvta.to.global.u64 l, %cell; st.global.b32 [l], x; ld.b32 r, [%cell];"
    )
    local = "cvta.local.u64 l, %own; st.b32 [l], x; ld.local.b32 r, [%own];"
    yield form("cvta.local.u64", "i32", "i32", local)
    for space in ("global", "shared", "local", "const"):
        places = [
            f"isspacep.{space} p, {register}; selp.b32 t, {1 << k}, 0, p; or.b32 r, r, t;"
            for k, register in enumerate(("%cell", "m", "l"))
        ]
        body = f"{generic} cvta.local.u64 l, %own; mov.b32 r, 0; {' '.join(places)}"
        yield form(f"isspacep.{space}", "", "i32", body)
