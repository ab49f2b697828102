# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of warp-wide operations and block barriers. A lane has one row of operands; 32 consecutive rows are
a warp."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form

ALL = "-1"
SOME = 0x0F3C5A81  # lanes of a partial warp


def _partly(instruction: str) -> str:
    """A form whose instruction only the lanes of SOME execute; the results of the other lanes are 0."""
    return f"mov.b32 t, {SOME}; shr.u32 t, t, %lane; and.b32 t, t, 1; setp.ne.b32 q, t, 0; mov.b32 r, 0; {instruction}"


def forms() -> Iterator[Form]:
    for mode in ("up", "down", "bfly", "idx"):
        opcode = f"shfl.sync.{mode}.b32"
        body = f"{opcode} t|p, x, y, z, {ALL}; selp.b32 u, 1, 0, p; mov.b64 r, {{t, u}};"
        yield form(opcode, "i32 amount clamp", "i64", body)
    for verb in ("all", "any", "uni"):
        for kind in ("bit", "uniform"):
            body = f"setp.ne.b32 p, x, 0; vote.sync.{verb}.pred p, p, {ALL}; selp.b32 r, 1, 0, p;"
            yield form(f"vote.sync.{verb}.pred", kind, "i32", body, note=kind)
    yield form("vote.sync.ballot.b32", "bit", "i32", f"setp.ne.b32 p, x, 0; vote.sync.ballot.b32 r, p, {ALL};")
    some = _partly(f"setp.ne.b32 p, x, 0; @q vote.sync.ballot.b32 r, p, {SOME};")
    yield form("vote.sync.ballot.b32", "bit", "i32", some, note="some lanes")
    for n, kind in ((32, "few"), (64, "few64")):
        yield form(f"match.any.sync.b{n}", kind, "i32", f"match.any.sync.b{n} r, x, {ALL};")
        partial = _partly(f"@q match.any.sync.b{n} r, x, {SOME};")
        yield form(f"match.any.sync.b{n}", kind, "i32", partial, note="some lanes")
    for n, kind in ((32, "uniform"), (64, "uniform64")):
        body = f"match.all.sync.b{n} t|p, x, {ALL}; selp.b32 u, 1, 0, p; mov.b64 r, {{t, u}};"
        yield form(f"match.all.sync.b{n}", kind, "i64", body)
    for verb, types in (("add", "us"), ("min", "us"), ("max", "us"), ("and", "b"), ("or", "b"), ("xor", "b")):
        for t in types:
            opcode = f"redux.sync.{verb}.{t}32"
            yield form(opcode, "i32", "i32", f"{opcode} r, x, {ALL};")
            yield form(opcode, "i32", "i32", _partly(f"@q {opcode} r, x, {SOME};"), note="some lanes")
    exchange = "st.shared.b32 [%near], x; {}; xor.b32 t, %near, 16; ld.shared.b32 r, [t]; {};"
    for barrier in ("bar.warp.sync -1", "bar.sync 0", "barrier.sync 1", "bar.cta.sync 2", "barrier.sync.aligned 3"):
        yield form(barrier.split()[0], "i32", "i32", exchange.format(barrier, barrier))
    for verb, t in (("popc", "u32"), ("and", "pred"), ("or", "pred")):
        opcode = f"bar.red.{verb}.{t}"
        for kind in ("bit", "uniform"):
            target = "r" if t == "u32" else "q"
            body = f"setp.ne.b32 p, x, 0; {opcode} {target}, 0, p; {'' if t == 'u32' else 'selp.b32 r, 1, 0, q;'}"
            yield form(opcode, kind, "i32", body, note=kind)
    for verb in ("wait", "launch_dependents"):
        yield form(f"griddepcontrol.{verb}", "i32", "i32", f"griddepcontrol.{verb}; mov.b32 r, x;")
