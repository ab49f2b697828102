# SPDX-License-Identifier: Apache-2.0
"""Integer, logic, shift, bit-field and move instructions. Floating-point forms of shared names go to `codegen_float`."""

from __future__ import annotations

from typing import Any

from drvfuse.emu import codegen_float as real
from drvfuse.emu.codegen_emitter import Emitter
from drvfuse.emu.codegen_opcode import Action, Opcode, RefusedError, is_signed, opcode, width
from drvfuse.emu.codegen_special import special
from drvfuse.emu.ptx import SINK, Imm, Instruction, Reg, Special, Vec


def _is_float(op: Opcode) -> bool:
    return any(p in real.KINDS for p in op.rest)


def _integer_type(op: Opcode, *allowed: str) -> str:
    t = op.type()
    if t not in (allowed or ("u16", "u32", "u64", "s16", "s32", "s64")):
        raise RefusedError(f"unsupported type .{t}")
    return t


# Sums and products ----------------------------------------------------------------------------------------------------
@opcode("add", "sub", "addc", "subc")
def add(op: Opcode) -> Action:
    if _is_float(op):
        return real.arithmetic(op)
    base, verb = op.base, op.base[:3]
    set_carry = op.flag("cc")
    saturate = op.flag("sat")
    if op.flag("u16x2", "s16x2"):
        if base != verb or set_carry or saturate:
            raise RefusedError("unsupported modifier")
        return Action(lambda g, ins: _halves(g, ins, verb))
    t = _integer_type(op, *(("u32", "s32", "u64", "s64") if set_carry or base[3:] else ()))
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
    """A packed operation on two 16-bit halves."""
    d, *sources = ins.operands
    v = [g.op(f"bitcast i32 {g.word(s, 32)} to <2 x i16>") for s in sources]
    g.set_int(d, g.op(f"bitcast <2 x i16> {g.op(f'{verb} <2 x i16> {v[0]}, {v[1]}')} to i32"), 32)


@opcode("mul", "mad", "madc", "mul24", "mad24")
def mul(op: Opcode) -> Action:
    if _is_float(op):
        return real.arithmetic(op)
    base = op.base
    short = base.endswith("24")
    part = op.pick("lo", "hi") if short else op.pick("lo", "hi", "wide")
    set_carry, saturate = op.flag("cc"), op.flag("sat")
    t = _integer_type(op, *(("u32", "s32") if short else ()))
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
    """A division by zero, which PTX leaves open, gives all ones and the remainder gives the dividend, as devices do."""
    if _is_float(op):
        return real.division(op)
    rem = op.base == "rem"
    t = _integer_type(op)
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
        g.set_int(d, g.op(f"select i1 {zero}, i{n} {x if rem else -1}, i{n} {q}"), n)

    return Action(emit)


@opcode("abs", "neg", "min", "max")
def unary_or_extremum(op: Opcode) -> Action:
    if _is_float(op):
        return real.arithmetic(op)
    base, relu = op.base, op.flag("relu")
    halves = op.pick("u16x2", "s16x2", default="")
    t = halves[:3] or _integer_type(op)
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
    t = _integer_type(op)
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


# Logic and shifts -----------------------------------------------------------------------------------------------------
@opcode("and", "or", "xor", "not", "cnot")
def logic(op: Opcode) -> Action:
    base, t = op.base, op.type()
    if t not in ("pred", "b16", "b32", "b64"):
        raise RefusedError(f"unsupported type .{t}")
    n = width(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, sources = ins.operands[0], ins.operands[1:]
        v = [g.pred(s) if t == "pred" else g.word(s, n) for s in sources]
        if base == "not":
            r = g.op(f"xor i{n} {v[0]}, {'true' if t == 'pred' else -1}")
        elif base == "cnot":
            r = g.op(f"zext i1 {g.op(f'icmp eq i{n} {v[0]}, 0')} to i{n}")
        else:
            r = g.op(f"{base} i{n} {v[0]}, {v[1]}")
        if t == "pred":
            g.set_pred(d, r)
        else:
            g.set_int(d, r, n)

    return Action(emit)


@opcode("shl", "shr")
def shift(op: Opcode) -> Action:
    """Amounts above the width clamp: zero, or the sign for an arithmetic shift."""
    left, t = op.base == "shl", op.type()
    n = width(t)
    if n not in (16, 32, 64) or t[0] not in "bus":
        raise RefusedError(f"unsupported type .{t}")
    sign = is_signed(t) and not left

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands
        x = g.word(a, n)
        verb = "shl" if left else "ashr" if sign else "lshr"
        if isinstance(b, Imm):
            amount = b.value & 0xFFFFFFFF
            if amount >= n and not sign:
                g.set_int(d, "0", n)
            else:
                g.set_int(d, g.op(f"{verb} i{n} {x}, {min(amount, n - 1)}"), n)
            return
        y = g.word(b, 32)
        big = g.op(f"icmp ugt i32 {y}, {n - 1}")
        safe = g.op(f"select i1 {big}, i32 {n - 1}, i32 {y}")
        if n != 32:
            safe = g.op(f"{'zext' if n == 64 else 'trunc'} i32 {safe} to i{n}")
        r = g.op(f"{verb} i{n} {x}, {safe}")
        g.set_int(d, r if sign else g.op(f"select i1 {big}, i{n} 0, i{n} {r}"), n)

    return Action(emit)


@opcode("shf")
def funnel(op: Opcode) -> Action:
    left, wrap = op.pick("l", "r") == "l", op.pick("wrap", "clamp") == "wrap"
    _integer_type(op, "b32")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        lo, hi, amount = g.word(a, 32), g.word(b, 32), g.word(c, 32)
        if wrap:
            amount = g.op(f"and i32 {amount}, 31")
        else:
            amount = g.intrinsic("llvm.umin", "i32", amount, "32")
        pair = g.op(f"zext i32 {hi} to i64")
        pair = g.op(f"or i64 {g.op(f'shl i64 {pair}, 32')}, {g.op(f'zext i32 {lo} to i64')}")
        by = g.op(f"zext i32 {amount} to i64")
        if left:
            pair = g.op(f"lshr i64 {g.op(f'shl i64 {pair}, {by}')}, 32")
        else:
            pair = g.op(f"lshr i64 {pair}, {by}")
        g.set_int(d, g.op(f"trunc i64 {pair} to i32"), 32)

    return Action(emit)


@opcode("lop3")
def lop3(op: Opcode) -> Action:
    boolean = op.pick("or", "and", default="")
    _integer_type(op, "b32")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c, table = ins.operands[:5]
        v = [g.word(o, 32) for o in (a, b, c)]
        inverse = [g.op(f"xor i32 {x}, -1") for x in v]
        total = "0"
        for row in range(8):
            if not table.value >> row & 1:
                continue
            terms = [v[i] if row >> (2 - i) & 1 else inverse[i] for i in range(3)]
            term = g.op(f"and i32 {g.op(f'and i32 {terms[0]}, {terms[1]}')}, {terms[2]}")
            total = term if total == "0" else g.op(f"or i32 {total}, {term}")
        if boolean:
            g.set_pred(d.second, g.op(f"{boolean} i1 {g.op(f'icmp ne i32 {total}, 0')}, {g.pred(ins.operands[5])}"))
            d = d.first
        g.set_int(d, total, 32)

    return Action(emit)


# Bits -----------------------------------------------------------------------------------------------------------------
@opcode("popc", "clz", "brev", "bfind")
def count(op: Opcode) -> Action:
    base = op.base
    amount = base == "bfind" and op.flag("shiftamt")
    t = _integer_type(op, *(("u32", "s32", "u64", "s64") if base == "bfind" else ("b32", "b64")))
    n = width(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        x, ll = g.word(a, n), f"i{n}"
        if base == "brev":
            g.set_int(d, g.intrinsic("llvm.bitreverse", ll, x), n)
            return
        if base == "popc":
            r = g.intrinsic("llvm.ctpop", ll, x)
        else:
            if is_signed(t):
                x = g.op(f"xor {ll} {x}, {g.op(f'ashr {ll} {x}, {n - 1}')}")
            name = g.helpers.declare(f"llvm.ctlz.{ll}", ll, ll, "i1")
            r = g.op(f"call {ll} {name}({ll} {x}, i1 false)")
            if base == "bfind":
                none = g.op(f"icmp eq {ll} {x}, 0")
                r = r if amount else g.op(f"sub {ll} {n - 1}, {r}")
                r = g.op(f"select i1 {none}, {ll} -1, {ll} {r}")
        g.set_int(d, r if n == 32 else g.op(f"trunc i64 {r} to i32"), 32)

    return Action(emit)


def _byte(g: Emitter, operand: Any) -> str:
    return g.op(f"and i32 {g.word(operand, 32)}, 255")


@opcode("bfe")
def bfe(op: Opcode) -> Action:
    t = _integer_type(op, "u32", "s32", "u64", "s64")
    n, sign = width(t), is_signed(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        # In 128 bits, the sign fills what is above the operand; a field past its end reads that.
        wide = "i128"
        x = g.op(f"{'sext' if sign else 'zext'} i{n} {g.word(a, n)} to {wide}")
        start = g.intrinsic("llvm.umin", "i32", _byte(g, b), str(n))
        length = g.intrinsic("llvm.umin", "i32", _byte(g, c), str(n))
        x = g.op(f"{'ashr' if sign else 'lshr'} {wide} {x}, {g.op(f'zext i32 {start} to {wide}')}")
        up = g.op(f"zext i32 {g.op(f'sub i32 127, {length}')} to {wide}")
        x = g.op(f"shl {wide} {g.op(f'shl {wide} {x}, 1')}, {up}")
        back = "ashr" if sign else "lshr"
        x = g.op(f"{back} {wide} {g.op(f'{back} {wide} {x}, 1')}, {up}")
        r = g.op(f"trunc {wide} {x} to i{n}")
        empty = g.op(f"icmp eq i32 {length}, 0")
        g.set_int(d, g.op(f"select i1 {empty}, i{n} 0, i{n} {r}"), n)

    return Action(emit)


@opcode("bfi")
def bfi(op: Opcode) -> Action:
    n = width(_integer_type(op, "b32", "b64"))

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c, e = ins.operands
        wide = f"i{2 * n}"
        start = g.op(f"zext i32 {g.intrinsic('llvm.umin', 'i32', _byte(g, c), str(n))} to {wide}")
        length = g.op(f"zext i32 {g.intrinsic('llvm.umin', 'i32', _byte(g, e), str(n))} to {wide}")
        ones = g.op(f"sub {wide} {g.op(f'shl {wide} 1, {length}')}, 1")
        mask = g.op(f"trunc {wide} {g.op(f'shl {wide} {ones}, {start}')} to i{n}")
        field = g.op(f"shl {wide} {g.op(f'zext i{n} {g.word(a, n)} to {wide}')}, {start}")
        field = g.op(f"and i{n} {g.op(f'trunc {wide} {field} to i{n}')}, {mask}")
        kept = g.op(f"and i{n} {g.word(b, n)}, {g.op(f'xor i{n} {mask}, -1')}")
        g.set_int(d, g.op(f"or i{n} {kept}, {field}"), n)

    return Action(emit)


@opcode("bmsk", "szext")
def mask(op: Opcode) -> Action:
    base = op.base
    wrap = op.pick("wrap", "clamp") == "wrap"
    t = _integer_type(op, *(("b32",) if base == "bmsk" else ("u32", "s32")))

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands
        x, y = g.word(a, 32), g.word(b, 32)
        x64 = g.op(f"zext i32 {x} to i64")

        def amount(v: str) -> str:
            v = g.op(f"and i32 {v}, 31") if wrap else g.intrinsic("llvm.umin", "i32", v, "32")
            return g.op(f"zext i32 {v} to i64")

        if base == "bmsk":
            ones = g.op(f"sub i64 {g.op(f'shl i64 1, {amount(y)}')}, 1")
            r = g.op(f"trunc i64 {g.op(f'shl i64 {ones}, {amount(x)}')} to i32")
        else:
            by = g.op(f"sub i64 64, {amount(y)}")
            low = g.op(f"and i64 {by}, 63")
            s = g.op(f"{'ashr' if is_signed(t) else 'lshr'} i64 {g.op(f'shl i64 {x64}, {low}')}, {low}")
            none = g.op(f"icmp eq i64 {by}, 64")
            r = g.op(f"trunc i64 {g.op(f'select i1 {none}, i64 0, i64 {s}')} to i32")
        g.set_int(d, r, 32)

    return Action(emit)


@opcode("prmt")
def prmt(op: Opcode) -> Action:
    op.type()
    mode = op.pick("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        lo, hi = g.word(a, 32), g.word(b, 32)
        pair = g.op(f"shl i64 {g.op(f'zext i32 {hi} to i64')}, 32")
        pair = g.op(f"or i64 {pair}, {g.op(f'zext i32 {lo} to i64')}")
        if mode:
            if not isinstance(c, Imm):
                raise RefusedError("a mode of prmt with a selector that is not constant")
            i = c.value & 3
            picks = {
                "f4e": [i, i + 1, i + 2, i + 3],
                "b4e": [i, (i - 1) & 7, (i - 2) & 7, (i - 3) & 7],
                "rc8": [i] * 4,
                "ecl": [max(i, k) for k in range(4)],
                "ecr": [min(i, k) for k in range(4)],
                "rc16": [2 * (i & 1), 2 * (i & 1) + 1] * 2,
            }[mode]
            c = Imm(sum(p << (4 * k) for k, p in enumerate(picks)), "int")
        total = ""
        selector = "" if isinstance(c, Imm) else g.word(c, 32)
        for k in range(4):
            if isinstance(c, Imm):
                pick = c.value >> (4 * k) & 15
                byte = g.op(f"and i64 {g.op(f'lshr i64 {pair}, {8 * (pick & 7)}')}, 255")
                if pick & 8:
                    byte = g.op(f"mul i64 {g.op(f'lshr i64 {byte}, 7')}, 255")
            else:
                nibble = g.op(f"lshr i32 {selector}, {4 * k}")
                by = g.op(f"shl i32 {g.op(f'and i32 {nibble}, 7')}, 3")
                byte = g.op(f"and i64 {g.op(f'lshr i64 {pair}, ' + g.op(f'zext i32 {by} to i64'))}, 255")
                spread = g.op(f"mul i64 {g.op(f'lshr i64 {byte}, 7')}, 255")
                replicate = g.op(f"icmp ne i32 {g.op(f'and i32 {nibble}, 8')}, 0")
                byte = g.op(f"select i1 {replicate}, i64 {spread}, i64 {byte}")
            byte = byte if k == 0 else g.op(f"shl i64 {byte}, {8 * k}")
            total = byte if k == 0 else g.op(f"or i64 {total}, {byte}")
        g.set_int(d, g.op(f"trunc i64 {total} to i32"), 32)

    return Action(emit)


# Selection and comparison -----------------------------------------------------------------------------------------------
@opcode("selp")
def selp(op: Opcode) -> Action:
    t = op.type()
    n = width(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        p = g.pred(c)
        if t in ("f32", "f64"):
            ll = "float" if t == "f32" else "double"
            raw = g.raw_nan(a) or g.raw_nan(b)
            if not raw:
                g.set_real(d, g.op(f"select i1 {p}, {ll} {g.real(a, t)}, {ll} {g.real(b, t)}"), t, arithmetic=False)
                return
        g.set_int(d, g.op(f"select i1 {p}, i{n} {g.word(a, n)}, i{n} {g.word(b, n)}"), n)

    return Action(emit)


@opcode("slct")
def slct(op: Opcode) -> Action:
    ftz = op.flag("ftz")
    t, tc = op.types(2)
    n = width(t)
    if tc not in ("s32", "f32"):
        raise RefusedError(f"unsupported type .{tc}")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        if tc == "s32":
            p = g.op(f"icmp sge i32 {g.word(c, 32)}, 0")
        else:
            x = g.real(c, "f32")
            if ftz:
                x = g.call(g.helpers.flush("f32"), "float", f"float {x}")
            p = g.op(f"fcmp oge float {x}, 0.0")
        g.set_int(d, g.op(f"select i1 {p}, i{n} {g.word(a, n)}, i{n} {g.word(b, n)}"), n)

    return Action(emit)


_COMPARE = {"eq": "eq", "ne": "ne", "lt": "{}lt", "le": "{}le", "gt": "{}gt", "ge": "{}ge"}
_UNSIGNED = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}


@opcode("setp", "set")
def compare(op: Opcode) -> Action:
    sets_predicate = op.base == "setp"
    verb = op.pick(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "lo",
        "ls",
        "hi",
        "hs",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    )
    boolean = op.pick("and", "or", "xor", default="")
    ftz = op.flag("ftz")
    kinds = op.types(1 if sets_predicate else 2)
    t = kinds[-1]
    if t in real.KINDS:
        test = real.comparison(verb, t, ftz)
    else:
        n = width(t)
        if t == "pred" or verb not in _COMPARE and (verb not in _UNSIGNED or is_signed(t)) or ftz:
            raise RefusedError("unsupported comparison")
        if t[0] == "b" and verb not in ("eq", "ne"):
            raise RefusedError("bits compare only by .eq and .ne")
        code = _UNSIGNED.get(verb) or _COMPARE[verb].format("s" if is_signed(t) else "u")

        def test(g: Emitter, a: Any, b: Any) -> list[str]:
            return [g.op(f"icmp {code} i{n} {g.word(a, n)}, {g.word(b, n)}")]

    if (
        not sets_predicate
        and kinds[0] not in ("u32", "s32", "f32")
        and (t not in real.HALVES or kinds[0] not in real.HALVES + ("u16", "s16"))
    ):
        raise RefusedError(f"unsupported type .{kinds[0]}")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands[:3]
        results = test(g, a, b)
        if sets_predicate:
            second = getattr(d, "second", None)
            first = d.first if second is not None else d
            if len(results) == 2:  # packed: one predicate a half
                outs = [(first, results[0]), (second if second is not None else SINK, results[1])]
            else:
                outs = [(first, results[0])]
                if second is not None:
                    outs.append((second, g.op(f"xor i1 {results[0]}, true")))
            if boolean:
                c = g.pred(ins.operands[3])
                outs = [(o, g.op(f"{boolean} i1 {r}, {c}")) for o, r in outs]
            # Both values are computed before either destination changes.
            for o, r in outs:
                g.set_pred(o, r)
            return
        if boolean:
            c = g.pred(ins.operands[3])
            results = [g.op(f"{boolean} i1 {r}, {c}") for r in results]
        real.set_mask(g, d, results, kinds[0])

    return Action(emit)


# Moves ------------------------------------------------------------------------------------------------------------------
@opcode("mov")
def mov(op: Opcode) -> Action:
    t = op.type()
    n = width(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        if t == "pred":
            g.set_pred(d, g.pred(a))
        elif isinstance(d, Vec):
            part = n // len(d.items)
            x = g.word(a, n)
            values = []
            for i in range(len(d.items)):
                v = x if i == 0 else g.op(f"lshr i{n} {x}, {i * part}")
                values.append(g.op(f"trunc i{n} {v} to i{part}"))
            for item, v in zip(d.items, values, strict=True):
                g.set_int(item, v, part)
        elif isinstance(a, Vec):
            part = n // len(a.items)
            total = ""
            for i, item in enumerate(a.items):
                v = g.op(f"zext i{part} {g.word(item, part)} to i{n}")
                v = v if i == 0 else g.op(f"shl i{n} {v}, {i * part}")
                total = v if i == 0 else g.op(f"or i{n} {total}, {v}")
            g.set_int(d, total, n)
        elif isinstance(a, Special):
            v, w = special(g, a.name)
            if w > n:
                v = g.op(f"trunc i{w} {v} to i{n}")
            elif w < n:
                v = g.op(f"zext i{w} {v} to i{n}")
            g.set_int(d, v, n)
        elif isinstance(a, Reg) and isinstance(d, Reg) and width(a.type) == n:
            g.copy(d, a, n)
        else:
            g.set_int(d, g.word(a, n), n)

    return Action(emit)
