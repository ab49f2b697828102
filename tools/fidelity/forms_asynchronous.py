# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of asynchronous reductions, and of mbarrier instructions other than plain arrivals.

At `%room` lie 16 bytes that are the target of a reduction or copy, 16 bytes of operands, and an mbarrier.
"""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form

IN_SHARED = {
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    "add": ("u32", "s32", "u64"),
}
IN_GLOBAL = {
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    "add": ("u32", "s32", "u64", "f32", "f64"),
    "add.noftz": ("f16", "bf16"),
}
_MAKE = "mbarrier.init.shared.b64 [%room+32], {}; fence.mbarrier_init.release.cluster;"
_EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%room+32], {};"
_AWAIT = (  # polls at most 256 times, so that nothing hangs if an instruction does not behave as expected
    "mov.b32 v, 0; L0: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%room+32], 0; add.u32 v, v, 1;"
    " setp.gt.u32 q, v, 255; or.pred p, p, q; @!p bra L0;"
)
_DONE = "mbarrier.inval.shared.b64 [%room+32];"
_READ = "ld.shared.v2.b64 {s, r}, [%room];"


def forms() -> Iterator[Form]:
    for verb, types in IN_SHARED.items():
        for t in (*types, "s64") if verb == "add" else types:
            yield _one(verb, t)
        for t in types:
            yield _bulk_shared(verb, t)
    for verb, types in IN_GLOBAL.items():
        for t in types:
            yield _bulk_global(verb, t)
    yield from _arrivals()


def _one(verb: str, t: str) -> Form:
    """red.async of one word: `x` is stored to memory, and `y` is reduced into it."""
    n = int(t[1:])
    kind = f"i{n}"
    name = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{verb}.{t}"
    body = f"st.shared.b{n} [%room], x; {_MAKE.format(1)} {_EXPECT.format(n // 8)} {name} [%room], y, [%room+32];"
    return form(name, f"{kind} {kind}", kind, f"{body} {_AWAIT} ld.shared.b{n} r, [%room]; {_DONE}")


def _operands(t: str) -> tuple[str, str, str]:
    """Three texts for a bulk reduction of 16 bytes of type `t`: its operand kinds, the modifiers of the `st` that fills
    memory, and the format string for the registers of `st`. The words are x y z w in the source, y x w z in the target.
    """
    if t in ("f16", "bf16"):
        return f"{t}x2 {t}x2 {t}x2 {t}x2", "v4.b32", "{{{0}, {1}, {2}, {3}}}"
    n = int(t[1:])
    kind = t if t[0] == "f" else f"i{n}"
    if n == 32:
        return " ".join([kind] * 4), f"v4.{t if t[0] == 'f' else 'b32'}", "{{{0}, {1}, {2}, {3}}}"
    return f"{kind} {kind}", f"v2.{t if t[0] == 'f' else 'b64'}", "{{{0}, {1}}}"


def _bulk_shared(verb: str, t: str) -> Form:
    sources, vector, words = _operands(t)
    name = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{verb}.{t}"
    body = f"st.shared.{vector} [%room], {words.format('y', 'x', 'w', 'z')};"
    body += f" st.shared.{vector} [%room+16], {words.format('x', 'y', 'z', 'w')}; fence.proxy.async;"
    body += f" {_MAKE.format(1)} {_EXPECT.format(16)} {name} [%room], [%room+16], 16, [%room+32];"
    return form(name, sources, "b128", f"{body} {_AWAIT} {_READ} {_DONE}")


def _bulk_global(verb: str, t: str) -> Form:
    sources, vector, words = _operands(t)
    name = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{verb}.{t}"
    body = f"st.global.{vector} [%cell], {words.format('y', 'x', 'w', 'z')};"
    body += f" st.shared.{vector} [%room+16], {words.format('x', 'y', 'z', 'w')}; fence.proxy.async;"
    body += f" {name} [%cell], [%room+16], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    body += " fence.proxy.async; ld.global.v2.b64 {s, r}, [%cell];"
    return form(name, sources, "b128", body, rule="nan" if t == "f64" else "exact")


def _arrivals() -> Iterator[Form]:
    copied = "st.global.v4.b32 [%cell], {x, y, z, w};"
    for size, how in ((16, "cg"), (8, "ca"), (4, "ca")):
        move = f"cp.async.{how}.shared.global [%room], [%cell], {size};"
        clear = "mov.b64 l, 0; st.shared.v2.b64 [%room], {l, l};"
        name = "cp.async.mbarrier.arrive.noinc.shared.b64"
        body = f"{clear} {copied} {_MAKE.format(1)} {move} {name} [%room+32]; {_AWAIT} {_READ} {_DONE}"
        yield form(name, "i32 i32 i32 i32", "b128", body, note=f"of {size}")
        name = "cp.async.mbarrier.arrive.shared::cta.b64"
        plain = "mbarrier.arrive.shared.b64 l, [%room+32];"
        body = f"{clear} {copied} {_MAKE.format(1)} {move} {name} [%room+32]; {plain} {_AWAIT} {_READ} {_DONE}"
        yield form(name, "i32 i32 i32 i32", "b128", body, note=f"of {size}")

    def done(parity: int, into: str) -> str:
        return f"mbarrier.test_wait.parity.shared.b64 p, [%room+32], {parity}; selp.b32 {into}, 1, 0, p;"

    count = "and.b32 t, x, 3; add.u32 t, t, 1;"  # 1 to 4 of the 6 expected arrivals
    for name, how in (
        ("mbarrier.arrive_drop.shared.b64", "l, [%room+32], t"),
        ("mbarrier.arrive_drop.release.cluster.shared::cluster.b64", "_, [%room+32], t"),
    ):
        rest = "sub.u32 u, 6, t; mbarrier.arrive.shared.b64 m, [%room+32], u; mbarrier.pending_count.b64 v, m;"
        again = "mbarrier.arrive.shared.b64 n, [%room+32], u;"
        body = f"{count} {_MAKE.format(6)} {name} {how}; {rest} {done(0, 't')} {again} {done(1, 'u')}"
        body += " mbarrier.pending_count.b64 %size, n; mov.b64 r, {t, u}; mov.b64 s, {v, %size};"
        yield form(name, "i32", "b128", f"{body} {_DONE}")
    name = "mbarrier.arrive_drop.expect_tx.shared.b64"
    body = f"{_MAKE.format(2)} {name} l, [%room+32], 8; mbarrier.arrive.shared.b64 l, [%room+32]; {done(0, 't')}"
    body += f" mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%room+32], 8; {done(0, 'u')}"
    body += " mbarrier.arrive.shared.b64 m, [%room+32]; mbarrier.pending_count.b64 v, m;"
    yield form(name, "i32", "b128", f"{body} {done(1, '%size')} mov.b64 r, {{t, u}}; mov.b64 s, {{v, %size}}; {_DONE}")
    name = "mbarrier.arrive.noComplete.shared.b64"
    body = f"{count} {_MAKE.format(6)} {name} l, [%room+32], t; mbarrier.arrive.shared.b64 m, [%room+32];"
    body += f" mbarrier.pending_count.b64 t, l; mbarrier.pending_count.b64 u, m; {done(0, 'v')}"
    yield form(name, "i32", "b128", f"{body} mov.b64 r, {{t, u}}; cvt.u64.u32 s, v; {_DONE}")
    generic = "cvt.u64.u32 l, %room; cvta.shared.u64 l, l;"
    body = f"{generic} mbarrier.init.b64 [l+32], 2; mbarrier.arrive.b64 m, [l+32]; mbarrier.arrive.b64 n, [l+32];"
    body += " mbarrier.test_wait.b64 p, [l+32], m; selp.b32 t, 1, 0, p; mbarrier.pending_count.b64 u, n;"
    yield form("mbarrier.arrive.b64", "i32", "i64", f"{body} mov.b64 r, {{t, u}}; mbarrier.inval.b64 [l+32];")
