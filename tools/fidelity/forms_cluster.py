# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of instructions of thread block clusters, run in clusters of one block.

The result of a form is its operand, or 0, or 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form

_GENERIC = "cvt.u64.u32 l, %near; cvta.shared.u64 l, l;"
_READ = "ld.shared.b32 r, [%near];"


def forms() -> Iterator[Form]:
    yield from _addresses()
    yield from _accesses()
    yield from _barriers()
    yield from _asynchronous()


def _addresses() -> Iterator[Form]:
    put = "st.shared.b32 [%near], x;"
    mapped = "mapa.shared::cluster.u32 t, %near, 0;"
    yield form("mapa.shared::cluster.u32", "i32", "i32", f"{put} {mapped} ld.shared::cluster.b32 r, [t];")
    yield form("mapa.u64", "i32", "i32", f"{_GENERIC} mapa.u64 m, l, 0; st.b32 [m], x; {_READ}")
    yield form("getctarank.shared::cluster.u32", "", "i32", f"{mapped} getctarank.shared::cluster.u32 r, t;")
    yield form("getctarank.u64", "", "i32", f"{_GENERIC} getctarank.u64 r, l;")
    shown = "selp.u32 r, 1, 0, p;"
    yield form(
        "isspacep.shared::cluster", "", "i32", f"{_GENERIC} isspacep.shared::cluster p, l; {shown}", note="of shared"
    )
    yield form("isspacep.shared::cluster", "", "i32", f"isspacep.shared::cluster p, %cell; {shown}", note="of global")
    to = "cvt.u64.u32 l, %near; cvta.shared::cluster.u64 l, l;"
    yield form("cvta.shared::cluster.u64", "i32", "i32", f"{to} st.b32 [l], x; {_READ}")
    back = f"{_GENERIC} cvta.to.shared::cluster.u64 l, l; cvt.u32.u64 t, l;"
    yield form("cvta.to.shared::cluster.u64", "i32", "i32", f"{back} st.shared::cluster.b32 [t], x; {_READ}")
    yield form("mov.pred", "", "i32", f"mov.pred p, %is_explicit_cluster; {shown}", note="of %is_explicit_cluster")


def _accesses() -> Iterator[Form]:
    for t in ("b32", "u64", "f32", "f64"):
        kind = t if t[0] == "f" else f"i{t[1:]}"
        store, load = f"st.shared::cluster.{t}", f"ld.shared::cluster.{t}"
        yield form(store, kind, kind, f"{store} [%near], x; {load} r, [%near];")
    for space, place in (("global", "%cell"), ("shared::cta", "%near"), ("shared::cluster", "%near")):
        for store, load in (("release", "acquire"), ("relaxed", "relaxed")):
            name = f"st.{store}.cluster.{space}.u32"
            yield form(name, "i32", "i32", f"{name} [{place}], x; ld.{load}.cluster.{space}.u32 r, [{place}];")
        name = f"atom.acq_rel.cluster.{space}.exch.b32"
        yield form(name, "i32", "i32", f"{name} t, [{place}], x; {name} r, [{place}], 0;")
        name = f"red.release.cluster.{space}.add.u32"
        yield form(
            name, "i32", "i32", f"st.{space}.u32 [{place}], 0; {name} [{place}], x; ld.{space}.u32 r, [{place}];"
        )


def _barriers() -> Iterator[Form]:
    for aligned in ("", ".aligned"):
        for how in ("", ".release", ".relaxed"):
            name, wait = f"barrier.cluster.arrive{how}{aligned}", f"barrier.cluster.wait.acquire{aligned}"
            yield form(name, "i32", "i32", f"st.shared.b32 [%near], x; {name}; {wait}; {_READ}")
    for fence in ("fence.acq_rel.cluster", "fence.sc.cluster", "fence.mbarrier_init.release.cluster"):
        yield form(fence, "i32", "i32", f"st.shared.b32 [%near], x; {fence}; {_READ}")


def _asynchronous() -> Iterator[Form]:
    make = "mbarrier.init.shared.b64 [%near+8], 1; fence.mbarrier_init.release.cluster;"
    wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%near+8], 0;"
    for t, value in (("b32", "x"), ("u32", "x"), ("s32", "x"), ("b64", "x"), ("u64", "x"), ("s64", "x"),
                     ("f32", "x"), ("f64", "x"), ("v2.b32", "{t, u}"), ("v2.f32", "{f, g}")):  # fmt: skip
        kind = t if t[0] == "f" else "i64" if t[0] == "v" else f"i{t[1:]}"
        result = "b64" if t[0] == "v" else t
        split = f"mov.b64 {value}, x;" if t[0] == "v" else ""
        nbytes = int(kind[1:]) // 8
        name = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{t}"
        body = f"{make} {split} mbarrier.arrive.expect_tx.shared.b64 _, [%near+8], {nbytes};"
        body += f" {name} [%near], {value}, [%near+8]; L0: {wait} @!p bra L0; ld.shared.{result} r, [%near];"
        yield form(name, kind, kind, f"{body} mbarrier.inval.shared.b64 [%near+8];")
    for arrive in ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%near+8];",
                   "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%near+8], 0;"):  # fmt: skip
        body = f"st.shared.b32 [%near], x; {make} {arrive} L0: {wait} @!p bra L0; {_READ}"
        yield form(arrive.split()[0], "i32", "i32", f"{body} mbarrier.inval.shared.b64 [%near+8];")
