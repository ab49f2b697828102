# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from global to shared memory and back, and waits for them. The runtime makes the copies
(`native/copy.cuh`, `native/store.cuh`)."""

from __future__ import annotations

from ....ptx.ir import Imm, Instruction, Reg
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode
from .access import drop_hints
from .mbarrier import bulk_load
from .reductions import reduction


@opcode("cp")
def cp(op: Opcode) -> Action:
    op.pick("async")
    if "bulk" in op.rest[:2]:
        return _bulk(op)
    if op.flag("mbarrier"):
        return _arrive(op)
    if op.flag("commit_group"):
        return Action(lambda g, ins: g.copying("rt_copy_commit"), pure=False)
    if op.flag("wait_group"):
        return Action(lambda g, ins: _wait(g, ins, _newest(ins)), pure=False)
    if op.flag("wait_all"):
        return Action(_wait_all, pure=False)
    sizes = {"ca": (4, 8, 16), "cg": (16,)}[op.pick("ca", "cg")]
    op.pick("shared", "shared::cta")
    op.pick("global")
    has_policy = "L2::cache_hint" in op.rest
    drop_hints(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        target, source, size, *rest = ins.operands[:-1] if has_policy else ins.operands
        if not isinstance(size, Imm) or size.value not in sizes or len(rest) > 1:
            raise RefusedError(f"the size must be {' or '.join(map(str, sizes))}, followed by at most one operand")
        count = str(size.value)
        if rest and isinstance(rest[0], Reg) and rest[0].type == "pred":  # the operand ignore-src
            count = g.op(f"select i1 {g.pred(rest[0])}, i32 0, i32 {count}")
        elif rest:
            count = g.word(rest[0], 32)
        where = g.address(target, "shared"), g.address(source, "global")
        g.copying("rt_copy", *where, str(size.value), count, str(g.site(ins)))

    return Action(emit, pure=False)


def _bulk(op: Opcode) -> Action:
    op.pick("bulk")
    if "prefetch" in op.rest:
        return _prefetch(op)
    if op.flag("commit_group"):
        return Action(lambda g, ins: g.copying("rt_bulk_commit"), pure=False)
    if op.flag("wait_group"):
        read = str(int(op.flag("read")))
        return Action(lambda g, ins: g.copying("rt_bulk_wait", str(_newest(ins)), read, str(g.site(ins))), pure=False)
    return _bulk_store(op) if "bulk_group" in op.rest else bulk_load(op)


def _arrive(op: Opcode) -> Action:
    op.pick("arrive")
    immediate = str(int(op.flag("noinc")))
    space = op.pick("shared", "shared::cta", default="")
    op.pick("b64")

    def emit(g: Emitter, ins: Instruction) -> None:
        (barrier,) = ins.operands
        g.copying("rt_copy_arrive", g.address(barrier, "shared" if space else ""), immediate, str(g.site(ins)))

    return Action(emit, pure=False)


def _bulk_store(op: Opcode) -> Action:
    reduces = op.flag("reduce")
    if op.rest[0] != "global":
        raise RefusedError("a copy with .bulk_group must be from .shared::cta to .global")
    op.pick("global")
    op.pick("shared", "shared::cta")
    op.pick("bulk_group")
    has_policy = "L2::cache_hint" in op.rest
    drop_hints(op)
    how = str(reduction(op, "global") if reduces else 0)

    def emit(g: Emitter, ins: Instruction) -> None:
        target, source, size = ins.operands[:-1] if has_policy else ins.operands
        where = g.address(target, "global"), g.address(source, "shared"), g.word(size, 32)
        g.copying("rt_bulk_store", *where, how, str(g.site(ins)))

    return Action(emit, pure=False)


def _prefetch(op: Opcode) -> Action:
    for part in ("prefetch", "L2", "global"):
        op.pick(part)
    operands = 2 + ("L2::cache_hint" in op.rest)
    drop_hints(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        if len(ins.operands) != operands:
            raise RefusedError(f"{operands} operands are expected")

    return Action(emit)


def _wait(g: Emitter, ins: Instruction, newest: int) -> None:
    g.copying("rt_copy_wait", str(newest), str(g.site(ins)))


def _newest(ins: Instruction) -> int:
    (newest,) = ins.operands
    if not isinstance(newest, Imm) or newest.value < 0:
        raise RefusedError("a constant number of groups is expected")
    return newest.value


def _wait_all(g: Emitter, ins: Instruction) -> None:
    g.copying("rt_copy_commit")
    _wait(g, ins, 0)
