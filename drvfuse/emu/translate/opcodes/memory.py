# SPDX-License-Identifier: Apache-2.0
"""Loads and stores, and hints to caches, which have no effect."""

from __future__ import annotations

from ....ptx.ir import Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, is_signed, opcode, width
from .access import ORDERS, announce, drop_hints, elements, elements_flag, place, scope_flags, seen, state_space


def _access(op: Opcode, *orders: str) -> tuple[str, int, bool]:
    """(space, rt_access flags, strong) of a load or store."""
    if op.flag("volatile"):
        flags = abi.Access.STRONG | abi.Access.VOLATILE | int(abi.Scope.SYS) << abi.SCOPE_SHIFT
    elif op.flag("mmio"):
        op.pick("relaxed")
        op.pick("sys")
        flags = abi.Access.STRONG | int(abi.Scope.SYS) << abi.SCOPE_SHIFT
    else:
        order = op.pick(*orders, "weak", default="weak")
        flags = 0
        if order != "weak":
            flags = abi.Access.STRONG | int(ORDERS[order]) << abi.ORDER_SHIFT | scope_flags(op)
    if op.flag("nc"):
        flags |= abi.Access.NC
    drop_hints(op)
    space, bits = state_space(op)
    if space == "param" and flags & abi.Access.STRONG:
        raise RefusedError("an access to .param is neither volatile nor ordered")
    return space, flags | bits, bool(flags & abi.Access.STRONG)


def _element_type(op: Opcode) -> tuple[str, int]:
    """(type, number of elements) of a load or store."""
    count = int(op.pick("v2", "v4", "v8", default="v1")[1:])
    t = op.type()
    if t == "pred" or t in ("f16x2", "bf16x2", "e4m3", "e5m2", "e4m3x2", "e5m2x2", "tf32"):
        raise RefusedError(f"unsupported type .{t}")
    if width(t) * count > 256:
        raise RefusedError(f"the vector is too wide: {width(t) * count} bits, at most 256 are allowed")
    return t, count


@opcode("ld", "ldu")
def ld(op: Opcode) -> Action:
    space, flags, strong = _access(op, "relaxed", "acquire")
    t, count = _element_type(op)
    n = width(t)
    flags |= elements_flag(count, strong)

    def after(g: Emitter, ins: Instruction) -> None:
        items = elements(ins.operands[0], count)
        unread = 0 if strong or count == 1 else g.unread(items)
        how = flags | (unread << abi.UNREAD_SHIFT | elements_flag(count, True) if unread else 0)
        at = place(g, ins.operands[1], space, n // 8 * count, how, ins)
        ll = {"f32": "float", "f64": "double"}.get(t, f"i{n}")
        loaded = [g.op(f"load {ll}, ptr {at(i * n // 8)}, align {min(n // 8, 16)}") for i in range(count)]
        if strong:
            first = loaded[0] if ll[0] == "i" else g.op(f"bitcast {ll} {loaded[0]} to i{n}")
            seen(g, first, n)
        for item, value in zip(items, loaded, strict=True):
            if ll[0] == "i":
                g.set_int(item, value, n, is_signed(t))
            else:
                g.set_real(item, value, t, arithmetic=False)

    if strong:
        return Action(after, before=announce(space, n // 8 * count), rereads=True, pure=False)
    return Action(after, pure=False)


@opcode("st")
def st(op: Opcode) -> Action:
    space, flags, strong = _access(op, "relaxed", "release")
    t, count = _element_type(op)
    n = width(t)
    flags |= elements_flag(count, strong)

    def after(g: Emitter, ins: Instruction) -> None:
        items = elements(ins.operands[1], count)
        values = [g.word(item, n) for item in items]
        at = place(g, ins.operands[0], space, n // 8 * count, flags | abi.Access.WRITE, ins)
        for i, value in enumerate(values):
            g.do(f"store i{n} {value}, ptr {at(i * n // 8)}, align {min(n // 8, 16)}")

    return Action(after, pure=False)


@opcode("prefetch", "prefetchu", "applypriority", "discard")
def hint(op: Opcode) -> Action:
    op.flag("global", "local", "L1", "L2", "tensormap")
    drop_hints(op)
    return Action(lambda g, ins: None)


@opcode("createpolicy")
def createpolicy(op: Opcode) -> Action:
    op.flag("fractional", "range", "global")
    drop_hints(op)
    op.pick("b64")
    return Action(lambda g, ins: g.set_int(ins.operands[0], "0", 64))
