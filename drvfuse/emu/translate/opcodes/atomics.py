# SPDX-License-Identifier: Apache-2.0
"""Atomic operations and reductions in memory, on words and on vectors of words."""

from __future__ import annotations

from collections.abc import Callable

from ....ptx.ir import SINK, Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, is_signed, opcode, width
from . import real
from .access import ORDERS, announce, drop_hints, elements, elements_flag, place, scope_flags, seen, state_space
from .addresses import in_cluster
from .halves import half_operation

_TYPES_OF_ATOMICS = {
    "cas": ("b16", "b32", "b64", "b128", "u32", "u64", "s32", "s64"),
    "exch": ("b32", "b64", "b128", "u32", "u64", "s32", "s64"),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("add", "min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


def _compared(g: Emitter, value: str, n: int) -> None:
    """Emit stores of a compare-and-swap's comparison value to the frame, where the runtime reads it."""
    if g.mode == "raw":
        return
    if n == 128:
        high = g.op(f"lshr i128 {value}, 64")
        g.put("op_seen", f"i64 {g.op(f'trunc i128 {high} to i64')}")
    low = value if n == 64 else g.op(f"{'trunc' if n > 64 else 'zext'} i{n} {value} to i64")
    g.put("op_value", f"i64 {low}")


def _add_f32(g: Emitter, old: str, value: str, flushing: str) -> str:
    """Emit the sum of two fp32 numbers, and return the sum as bits. The numbers are given as bits too. `flushing` is an
    i1: if it is true, as in global memory, subnormal operands and results are flushed to zero.
    """

    def maybe_flushed(x: str) -> str:
        return g.op(f"select i1 {flushing}, float {real.flush(g, x)}, float {x}")

    x, y = (maybe_flushed(g.op(f"bitcast i32 {bits} to float")) for bits in (old, value))
    total = maybe_flushed(g.op(f"fadd float {x}, {y}"))
    return g.op(
        f"select i1 {g.op(f'fcmp uno float {total}, 0.0')}, i32 2147483647, i32 {g.op(f'bitcast float {total} to i32')}"
    )


def _update(op: Opcode, verb: str, t: str) -> Callable[[Emitter, str, list[str]], str]:
    """A function that emits the new bits of a word from its old bits and the operands of an atomic."""
    n = width(t)
    ll = f"i{n}"
    noftz = op.flag("noftz")
    if t in real.KINDS:
        if verb not in ("add", "min", "max") or (verb != "add" and t in ("f32", "f64")):
            raise RefusedError(f"unsupported atomic .{verb}.{t}")
        if (t in real.HALVES) != noftz:
            raise RefusedError(
                "the modifier .noftz is expected for half types" if not noftz else "unsupported modifier .noftz"
            )

        def real_update(g: Emitter, old: str, v: list[str]) -> str:
            if t == "f32":
                return _add_f32(g, old, *v)
            if t == "f64":
                x, y = (g.op(f"bitcast i64 {bits} to double") for bits in (old, v[0]))
                return g.op(f"bitcast double {g.op(f'fadd double {x}, {y}')} to i64")
            compute = half_operation(t, verb)
            if n == 16:
                return compute(g, [old, v[0]])
            parts = []
            for shift in (0, 16):
                pair = [g.op(f"trunc i32 {g.op(f'lshr i32 {x}, {shift}')} to i16") for x in (old, v[0])]
                parts.append(g.op(f"zext i16 {compute(g, pair)} to i32"))
            return g.op(f"or i32 {g.op(f'shl i32 {parts[1]}, 16')}, {parts[0]}")

        return real_update
    s = "s" if is_signed(t) else "u"
    if t not in _TYPES_OF_ATOMICS[verb] or noftz:
        raise RefusedError(f"unsupported atomic .{verb}.{t}")

    def update(g: Emitter, old: str, v: list[str]) -> str:
        if verb == "cas":
            return g.op(f"select i1 {g.op(f'icmp eq {ll} {old}, {v[0]}')}, {ll} {v[1]}, {ll} {old}")
        if verb == "exch":
            return v[0]
        if verb in ("and", "or", "xor", "add"):
            return g.op(f"{verb} {ll} {old}, {v[0]}")
        if verb in ("min", "max"):
            return g.intrinsic(f"llvm.{s}{verb}", ll, old, v[0])
        if verb == "inc":
            return g.op(f"select i1 {g.op(f'icmp uge i32 {old}, {v[0]}')}, i32 0, i32 {g.op(f'add i32 {old}, 1')}")
        zero = g.op(f"icmp eq i32 {old}, 0")
        wrap = g.op(f"or i1 {zero}, {g.op(f'icmp ugt i32 {old}, {v[0]}')}")
        return g.op(f"select i1 {wrap}, i32 {v[0]}, i32 {g.op(f'sub i32 {old}, 1')}")

    return update


@opcode("atom", "red")
def atom(op: Opcode) -> Action:
    returns = op.base == "atom"
    order = op.pick(*(ORDERS if returns else ("relaxed", "release")), default="relaxed")
    flags = abi.Access.WRITE | abi.Access.ATOMIC | abi.Access.STRONG | int(ORDERS[order]) << abi.ORDER_SHIFT
    flags |= 0 if returns else abi.Access.REDUCTION
    flags |= scope_flags(op, "gpu")
    drop_hints(op)
    space, bits = state_space(op)
    flags |= bits
    verb = op.pick("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
    count = int(op.pick("v2", "v4", "v8", default="v1")[1:])
    t = op.type()
    n = width(t)
    flags |= elements_flag(count, True) | (abi.Access.SWAP if verb == "cas" else 0)
    update = _update(op, verb, t)
    if space not in ("", "global", "shared") or not returns and verb in ("cas", "exch"):
        raise RefusedError("unsupported atomic")

    def after(g: Emitter, ins: Instruction) -> None:
        dst = elements(ins.operands[0], count) if returns else (SINK,) * count
        address, *sources = ins.operands[1 if returns else 0 :]
        columns = [[g.word(x, n) for x in elements(s, count)] for s in sources[: 2 if verb == "cas" else 1]]
        if verb == "cas":
            _compared(g, columns[0][0], n)
        at = place(g, address, space, n // 8 * count, flags, ins)
        olds = []
        extra = []
        if t == "f32" and verb == "add":
            if space:
                extra = ["true" if space == "global" else "false"]
            else:
                extra = [g.op(f"xor i1 {in_cluster(g, g.op(f'ptrtoint ptr {at(0)} to i64'))}, true")]
        for i in range(count):
            pointer = at(i * n // 8)
            old = g.op(f"load i{n}, ptr {pointer}, align {min(n // 8, 16)}")
            new = update(g, old, [*(c[i] for c in columns), *extra])
            g.do(f"store i{n} {new}, ptr {pointer}, align {min(n // 8, 16)}")
            olds.append(old)
        seen(g, olds[0], n)
        for item, old in zip(dst, olds, strict=True):
            g.set_int(item, old, n)

    return Action(after, before=announce(space, n // 8 * count), rereads=True, pure=False)
