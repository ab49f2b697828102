# SPDX-License-Identifier: Apache-2.0
"""Barrier objects in shared memory, and bulk copies that complete on them (`native/mbarrier.cuh`, `bulk.cuh`)."""

from __future__ import annotations

from typing import Any

from ....ptx.ir import SINK, Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode
from .access import ORDERS, SCOPES, announce, drop_hints
from .reductions import reduction


def _call(
    g: Emitter,
    ins: Instruction,
    op: abi.Mbarrier,
    address: Any,
    flags: int,
    *,
    count: Any = 0,
    bytes_: Any = 0,
    state: Any = 0,
) -> None:
    where = g.address(address, _space(flags))
    arguments = (int(op), count, bytes_, state, flags, g.site(ins))
    g.leave_if(g.runtime("rt_mbarrier", "%t", where, *map(str, arguments)))


@opcode("mbarrier")
def mbarrier(op: Opcode) -> Action:
    verbs = {
        **dict.fromkeys(("init", "inval"), _init),
        **dict.fromkeys(("arrive", "arrive_drop"), _arrive),
        **dict.fromkeys(("test_wait", "try_wait"), _wait),
        "pending_count": _pending,
    }
    verb = op.pick(*verbs, default="")
    return verbs[verb](op, verb) if verb else _expect(op)


def _place(op: Opcode, *more: str) -> int:
    """Consume the state space and the type of an mbarrier, and return the flag bits of the space. The space may be the
    block's own shared memory, one of the spaces `more`, or generic.
    """
    space = op.pick("shared", "shared::cta", *more, default="")
    op.pick("b64")
    spaces = {"": abi.Space.GENERIC, "shared::cluster": abi.Space.CLUSTER}
    return int(spaces.get(space, abi.Space.SHARED)) << abi.SPACE_SHIFT


def _space(flags: int) -> str:
    """The name of the state space of an address with these flags: "shared", or "" for generic."""
    return "shared" if flags >> abi.SPACE_SHIFT & 0xF else ""


def _order(op: Opcode, *orders: str) -> int:
    order, scope = op.pick(*orders, default=orders[0]), op.pick("cta", "cluster", default="cta")
    return int(ORDERS[order]) << abi.ORDER_SHIFT | int(SCOPES[scope]) << abi.SCOPE_SHIFT


def _init(op: Opcode, verb: str) -> Action:
    flags = _place(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        address, *count = ins.operands
        if len(count) != (verb == "init"):
            raise RefusedError("only init takes a count, and it needs one")
        which = abi.Mbarrier.INIT if count else abi.Mbarrier.INVAL
        _call(g, ins, which, address, flags, count=g.word(count[0], 32) if count else 0)

    return Action(emit, pure=False)


def _arrive(op: Opcode, verb: str) -> Action:
    expects, never_last = op.flag("expect_tx"), op.flag("noComplete")
    remote = "shared::cluster" in op.rest
    flags = _order(op, "release", "relaxed") | _place(op, "shared::cluster")
    if verb == "arrive_drop" and never_last or expects and never_last:
        raise RefusedError("unsupported modifier .noComplete")
    which = abi.Mbarrier.DROP if verb == "arrive_drop" else abi.Mbarrier.ARRIVE
    which = abi.Mbarrier.NO_COMPLETE if never_last else which

    def after(g: Emitter, ins: Instruction) -> None:
        target, address, *rest = ins.operands
        if remote and target is not SINK:
            raise RefusedError("an arrival in .shared::cluster has no result: _ is expected")
        if len(rest) > 1 or ((expects or never_last) and not rest):
            raise RefusedError("at most one count is expected, and expect_tx and .noComplete need one")
        amount = g.word(rest[0], 32) if rest else "1"
        count, nbytes = (1, amount) if expects else (amount, 0)
        _call(g, ins, which, address, flags, count=count, bytes_=nbytes)
        g.set_int(target, g.get("op_value", "i64"), 64)

    return Action(after, before=announce(_space(flags), 8), rereads=True, pure=False)


def _pending(op: Opcode, verb: str) -> Action:
    """`mbarrier.pending_count`: the number of pending arrivals in a state that an arrival has returned. The instruction
    reads no memory.
    """
    op.pick("b64")

    def emit(g: Emitter, ins: Instruction) -> None:
        count, state = ins.operands
        word = g.op(f"and i64 {g.word(state, 64)}, {abi.MBARRIER_COUNT_MASK}")
        g.set_int(count, g.op(f"trunc i64 {word} to i32"), 32)

    return Action(emit)


def _expect(op: Opcode) -> Action:
    expects = op.pick("expect_tx", "complete_tx") == "expect_tx"
    flags = _order(op, "relaxed") | _place(op, "shared::cluster")

    def after(g: Emitter, ins: Instruction) -> None:
        address, amount = ins.operands
        nbytes = g.word(amount, 32)
        nbytes = nbytes if expects else g.op(f"sub i32 0, {nbytes}")
        _call(g, ins, abi.Mbarrier.EXPECT, address, flags, bytes_=nbytes)

    return Action(after, before=announce(_space(flags), 8), rereads=True, pure=False)


def _wait(op: Opcode, verb: str) -> Action:
    parity = op.flag("parity")
    flags = _order(op, "acquire", "relaxed") | _place(op)

    def after(g: Emitter, ins: Instruction) -> None:
        done, address, state, *hint = ins.operands
        if len(hint) > (verb == "try_wait"):
            raise RefusedError("too many operands")
        word = g.word(state, 32 if parity else 64)
        if parity:
            word = g.op(f"shl i64 {g.op(f'zext i32 {word} to i64')}, {abi.MBARRIER_PARITY_BIT}")
        _call(g, ins, abi.Mbarrier.TEST, address, flags, state=word)
        g.set_pred(done, g.op(f"icmp ne i32 {g.get('op_pred', 'i32')}, 0"))

    return Action(after, before=announce(_space(flags), 8), rereads=True, pure=False)


def bulk_load(op: Opcode) -> Action:
    """The bulk copies that complete on an mbarrier:

    cp.async.bulk         from global memory to shared memory
    cp.async.bulk         from the block's own shared memory to the shared memory of a block of its cluster
    cp.reduce.async.bulk  from the block's own shared memory to that of a block of its cluster, with a reduction
    """
    to_cluster = op.pick("shared::cluster", "shared::cta") == "shared::cluster"
    reduces = op.base == "cp" and op.flag("reduce")
    source_space = op.pick(*(() if reduces else ("global",)), *(("shared::cta",) if to_cluster else ()))
    op.pick("mbarrier::complete_tx::bytes")
    how = str(reduction(op, "shared") if reduces else 0)
    spreads = to_cluster and source_space == "global" and op.flag("multicast::cluster")
    has_policy = source_space == "global" and "L2::cache_hint" in op.rest
    if has_policy:
        drop_hints(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        target, source, size, barrier, *mask = ins.operands[:-1] if has_policy else ins.operands
        if len(mask) != spreads:
            raise RefusedError("a mask of blocks must be given with .multicast::cluster, and not without it")
        ranks = g.op(f"or i32 {g.op(f'zext i16 {g.word(mask[0], 16)} to i32')}, 65536") if mask else "0"
        where = g.address(target, "shared"), g.address(source, source_space), g.word(size, 32)
        g.copying("rt_bulk", *where, g.address(barrier, "shared"), ranks, how, str(g.site(ins)))

    return Action(emit, pure=False)
