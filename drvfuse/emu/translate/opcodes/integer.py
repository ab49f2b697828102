# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic. Opcodes with floating-point types are passed on to `floating`."""

from __future__ import annotations

from ....ptx.ir import Imm, Instruction
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, integer_type, is_signed, opcode, width
from . import floating
from .real import KINDS


def _is_float(op: Opcode) -> bool:
    return any(p in KINDS for p in op.rest)


@opcode("add", "sub", "addc", "subc")
def add(op: Opcode) -> Action:
    if _is_float(op):
        return floating.arithmetic(op)
    base, verb = op.base, op.base[:3]
    set_carry = op.flag("cc")
    saturate = op.flag("sat")
    if op.flag("u16x2", "s16x2"):
        if base != verb or set_carry or saturate:
            raise RefusedError("unsupported modifier")
        return Action(lambda g, ins: _halves(g, ins, verb))
    t = integer_type(op, *(("u32", "s32", "u64", "s64") if set_carry or base[3:] else ()))
    if saturate and t != "s32":
        raise RefusedError("unsupported modifier .sat")
    n = width(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands
        x, y = g.word(a, n), g.word(b, n)
        if saturate:
            g.set_int(d, g.intrinsic(f"llvm.s{verb}.sat", f"i{n}", x, y), n)
            return
        if not set_carry and base == verb:
            g.set_int(d, g.op(f"{verb} i{n} {x}, {y}"), n)
            return
        wide = f"i{n + 1}"
        total = g.op(f"{verb} {wide} {g.op(f'zext i{n} {x} to {wide}')}, {g.op(f'zext i{n} {y} to {wide}')}")
        if base != verb:
            total = g.op(f"{verb} {wide} {total}, {g.op(f'zext i1 {g.carry_in()} to {wide}')}")
        if set_carry:
            g.carry = g.op(f"trunc {wide} {g.op(f'lshr {wide} {total}, {n}')} to i1")
        g.set_int(d, g.op(f"trunc {wide} {total} to i{n}"), n)

    return Action(emit, pure=not set_carry)


def _halves(g: Emitter, ins: Instruction, verb: str) -> None:
    """Emit an operation on two packed 16-bit halves."""
    d, *sources = ins.operands
    v = [g.op(f"bitcast i32 {g.word(s, 32)} to <2 x i16>") for s in sources]
    g.set_int(d, g.op(f"bitcast <2 x i16> {g.op(f'{verb} <2 x i16> {v[0]}, {v[1]}')} to i32"), 32)


@opcode("mul", "mad", "madc", "mul24", "mad24")
def mul(op: Opcode) -> Action:
    if _is_float(op):
        return floating.arithmetic(op)
    base = op.base
    short = base.endswith("24")
    part = op.pick("lo", "hi") if short else op.pick("lo", "hi", "wide")
    set_carry, saturate = op.flag("cc"), op.flag("sat")
    t = integer_type(op, *(("u32", "s32") if short else ()))
    n, sign = width(t), is_signed(t)
    if saturate and (t != "s32" or part != "hi") or part == "wide" and n == 64:
        raise RefusedError("unsupported modifier")
    ext = "sext" if sign else "zext"

    def product(g: Emitter, x: str, y: str) -> tuple[str, int]:
        if short:
            x, y = (g.op(f"{'ashr' if sign else 'lshr'} i32 {g.op(f'shl i32 {v}, 8')}, 8") for v in (x, y))
        if part == "lo":
            return g.op(f"mul i{n} {x}, {y}"), n
        wide = f"i{2 * n}"
        p = g.op(f"mul {wide} {g.op(f'{ext} i{n} {x} to {wide}')}, {g.op(f'{ext} i{n} {y} to {wide}')}")
        if part == "wide":
            return p, 2 * n
        p = g.op(f"lshr {wide} {p}, {16 if short else n}")
        return g.op(f"trunc {wide} {p} to i{n}"), n

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands[:3]
        p, w = product(g, g.word(a, n), g.word(b, n))
        if base.startswith("mad"):
            c = g.word(ins.operands[3], w)
            if saturate:
                p = g.intrinsic("llvm.sadd.sat", f"i{w}", p, c)
            elif set_carry or base == "madc":
                wide = f"i{w + 1}"
                p = g.op(f"add {wide} {g.op(f'zext i{w} {p} to {wide}')}, {g.op(f'zext i{w} {c} to {wide}')}")
                if base == "madc":
                    p = g.op(f"add {wide} {p}, {g.op(f'zext i1 {g.carry_in()} to {wide}')}")
                if set_carry:
                    g.carry = g.op(f"trunc {wide} {g.op(f'lshr {wide} {p}, {w}')} to i1")
                p = g.op(f"trunc {wide} {p} to i{w}")
            else:
                p = g.op(f"add i{w} {p}, {c}")
        elif len(ins.operands) != 3:
            raise RefusedError("three operands are expected")
        g.set_int(d, p, w)

    return Action(emit, pure=not set_carry)


@opcode("div", "rem")
def div(op: Opcode) -> Action:
    """`div` and `rem`. The result of an integer division by zero, which PTX does not define, has all bits set, as on an
    H200.
    """
    if _is_float(op):
        return floating.division(op)
    rem = op.base == "rem"
    t = integer_type(op)
    n, sign = width(t), is_signed(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands
        x, y = g.word(a, n), g.word(b, n)
        constant = isinstance(b, Imm) and b.value not in (0, -1)
        verb = f"{'s' if sign else 'u'}{'rem' if rem else 'div'} i{n}"
        if constant:
            g.set_int(d, g.op(f"{verb} {x}, {y}"), n)
            return
        zero = g.op(f"icmp eq i{n} {y}, 0")
        unsafe = zero
        if sign:
            minus = g.op(f"icmp eq i{n} {y}, -1")
            unsafe = g.op(f"or i1 {zero}, {minus}")
        safe = g.op(f"select i1 {unsafe}, i{n} 1, i{n} {y}")
        q = g.op(f"{verb} {x}, {safe}")
        if sign and not rem:
            q = g.op(f"select i1 {minus}, i{n} {g.op(f'sub i{n} 0, {x}')}, i{n} {q}")
        g.set_int(d, g.op(f"select i1 {zero}, i{n} -1, i{n} {q}"), n)

    return Action(emit)


@opcode("abs", "neg", "min", "max")
def unary_or_extremum(op: Opcode) -> Action:
    if _is_float(op):
        return floating.arithmetic(op)
    base, relu = op.base, op.flag("relu")
    halves = op.pick("u16x2", "s16x2", default="")
    t = halves[:3] or integer_type(op)
    n, s = width(t), "s" if is_signed(t) else "u"

    def emit(g: Emitter, ins: Instruction) -> None:
        ll = "<2 x i16>" if halves else f"i{n}"
        full = 32 if halves else n
        v = [g.word(o, full) for o in ins.operands[1:]]
        if halves:
            v = [g.op(f"bitcast i32 {x} to <2 x i16>") for x in v]
        if base == "neg":
            r = g.op(f"sub {ll} {'zeroinitializer' if halves else 0}, {v[0]}")
        elif base == "abs":
            r = g.op(f"call {ll} {g.helpers.declare('llvm.abs.' + ll, ll, ll, 'i1')}({ll} {v[0]}, i1 false)")
        elif halves:
            c = g.op(f"icmp {s}{'lt' if base == 'min' else 'gt'} {ll} {v[0]}, {v[1]}")
            r = g.op(f"select <2 x i1> {c}, {ll} {v[0]}, {ll} {v[1]}")
        else:
            r = g.intrinsic(f"llvm.{s}{base}", ll, v[0], v[1])
        if relu:
            c = g.op(f"icmp sgt {ll} {r}, zeroinitializer")
            r = g.op(f"select {'<2 x i1>' if halves else 'i1'} {c}, {ll} {r}, {ll} zeroinitializer")
        g.set_int(ins.operands[0], g.op(f"bitcast {ll} {r} to i{full}") if halves else r, full)

    return Action(emit)


@opcode("sad")
def sad(op: Opcode) -> Action:
    t = integer_type(op)
    n, s = width(t), "s" if is_signed(t) else "u"

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        x, y = g.word(a, n), g.word(b, n)
        hi, lo = g.intrinsic(f"llvm.{s}max", f"i{n}", x, y), g.intrinsic(f"llvm.{s}min", f"i{n}", x, y)
        g.set_int(d, g.op(f"add i{n} {g.op(f'sub i{n} {hi}, {lo}')}, {g.word(c, n)}"), n)

    return Action(emit)


@opcode("dp4a", "dp2a")
def dot(op: Opcode) -> Action:
    four = op.base == "dp4a"
    high = not four and op.pick("lo", "hi") == "hi"
    ta, tb = op.types(2)
    if width(ta) != 32 or width(tb) != 32:
        raise RefusedError("unsupported types")

    def part(g: Emitter, v: str, index: int, bits: int, sign: bool) -> str:
        up = g.op(f"shl i32 {v}, {32 - bits * (index + 1)}")
        return g.op(f"{'ashr' if sign else 'lshr'} i32 {up}, {32 - bits}")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        x, y, total = g.word(a, 32), g.word(b, 32), g.word(c, 32)
        for i in range(4 if four else 2):
            p = part(g, x, i, 8 if four else 16, is_signed(ta))
            q = part(g, y, i + (2 if high else 0), 8, is_signed(tb))
            total = g.op(f"add i32 {total}, {g.op(f'mul i32 {p}, {q}')}")
        g.set_int(d, total, 32)

    return Action(emit)
