# SPDX-License-Identifier: Apache-2.0
"""Barrier objects in shared memory, and bulk copies that complete on them (`native/mbarrier.cuh`)."""

from __future__ import annotations

from typing import Any

from ....ptx.ir import Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode
from .memory import ORDERS, SCOPES, announce, drop_hints


def _call(
    g: Emitter,
    ins: Instruction,
    op: abi.Mbarrier,
    address: Any,
    flags: int = 0,
    *,
    count: Any = 0,
    bytes_: Any = 0,
    state: Any = 0,
) -> None:
    where = g.address(address, "shared")
    arguments = (int(op), count, bytes_, state, flags, g.site(ins))
    g.leave_if(g.runtime("rt_mbarrier", "%t", where, *map(str, arguments)))


@opcode("mbarrier")
def mbarrier(op: Opcode) -> Action:
    verbs = {"init": _init, "inval": _init, "arrive": _arrive, "test_wait": _wait, "try_wait": _wait}
    verb = op.pick(*verbs, default="")
    if op.flag("noComplete", "shared::cluster", "cluster"):
        raise RefusedError("thread block clusters and .noComplete are not supported yet")
    if not verb and "expect_tx" not in op.rest:
        raise RefusedError(f"mbarrier.{op.rest[0] if op.rest else ''} is not supported yet")
    return verbs[verb](op, verb) if verb else _expect(op)


def _place(op: Opcode) -> None:
    op.pick("shared", "shared::cta")
    op.pick("b64")


def _order(op: Opcode, *orders: str) -> int:
    order = op.pick(*orders, default=orders[0])
    op.pick("cta", default="cta")
    return int(ORDERS[order]) << abi.ORDER_SHIFT | int(SCOPES["cta"]) << abi.SCOPE_SHIFT


def _init(op: Opcode, verb: str) -> Action:
    _place(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        address, *count = ins.operands
        if len(count) != (verb == "init"):
            raise RefusedError("a count is expected of init, and of nothing else")
        which = abi.Mbarrier.INIT if count else abi.Mbarrier.INVAL
        _call(g, ins, which, address, count=g.word(count[0], 32) if count else 0)

    return Action(emit, pure=False)


def _arrive(op: Opcode, verb: str) -> Action:
    expects = op.flag("expect_tx")
    flags = _order(op, "release", "relaxed")
    _place(op)

    def after(g: Emitter, ins: Instruction) -> None:
        target, address, *rest = ins.operands
        if len(rest) > 1 or (expects and not rest):
            raise RefusedError("one count is expected at most, and by expect_tx")
        amount = g.word(rest[0], 32) if rest else "1"
        count, nbytes = (1, amount) if expects else (amount, 0)
        _call(g, ins, abi.Mbarrier.ARRIVE, address, flags, count=count, bytes_=nbytes)
        g.set_int(target, g.get("op_value", "i64"), 64)

    return Action(after, before=announce("shared", 8), rereads=True, pure=False)


def _expect(op: Opcode) -> Action:
    op.pick("expect_tx")
    flags = _order(op, "relaxed")
    _place(op)

    def after(g: Emitter, ins: Instruction) -> None:
        address, amount = ins.operands
        _call(g, ins, abi.Mbarrier.EXPECT, address, flags, bytes_=g.word(amount, 32))

    return Action(after, before=announce("shared", 8), rereads=True, pure=False)


def _wait(op: Opcode, verb: str) -> Action:
    parity = op.flag("parity")
    flags = _order(op, "acquire", "relaxed")
    _place(op)

    def after(g: Emitter, ins: Instruction) -> None:
        done, address, state, *hint = ins.operands
        if len(hint) > (verb == "try_wait"):
            raise RefusedError("too many operands")
        word = g.word(state, 32 if parity else 64)
        if parity:
            word = g.op(f"shl i64 {g.op(f'zext i32 {word} to i64')}, {abi.MBARRIER_PARITY_BIT}")
        _call(g, ins, abi.Mbarrier.TEST, address, flags, state=word)
        g.set_pred(done, g.op(f"icmp ne i32 {g.get('op_pred', 'i32')}, 0"))

    return Action(after, before=announce("shared", 8), rereads=True, pure=False)


def bulk_load(op: Opcode) -> Action:
    """cp.async.bulk from global to shared memory."""
    op.pick("shared::cluster", "shared::cta")
    op.pick("global")
    op.pick("mbarrier::complete_tx::bytes")
    has_policy = "L2::cache_hint" in op.rest
    drop_hints(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        target, source, size, barrier = ins.operands[:-1] if has_policy else ins.operands
        where = g.address(target, "shared"), g.address(source, "global"), g.word(size, 32)
        g.copying("rt_bulk", *where, g.address(barrier, "shared"), str(g.site(ins)))

    return Action(emit, pure=False)
