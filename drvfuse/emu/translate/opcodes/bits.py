# SPDX-License-Identifier: Apache-2.0
"""Logic, shifts, bit fields and byte permutations."""

from __future__ import annotations

from typing import Any

from ....ptx.ir import Imm, Instruction
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, integer_type, is_signed, opcode, width


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
    """`shl` and `shr`. A shift by the width or more gives zero, or copies of the sign for an arithmetic right shift."""
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
    integer_type(op, "b32")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        lo, hi, amount = g.word(a, 32), g.word(b, 32), g.word(c, 32)
        amount = g.op(f"and i32 {amount}, 31") if wrap else g.intrinsic("llvm.umin", "i32", amount, "32")
        pair = g.op(f"zext i32 {hi} to i64")
        pair = g.op(f"or i64 {g.op(f'shl i64 {pair}, 32')}, {g.op(f'zext i32 {lo} to i64')}")
        by = g.op(f"zext i32 {amount} to i64")
        pair = g.op(f"lshr i64 {g.op(f'shl i64 {pair}, {by}')}, 32") if left else g.op(f"lshr i64 {pair}, {by}")
        g.set_int(d, g.op(f"trunc i64 {pair} to i32"), 32)

    return Action(emit)


@opcode("lop3")
def lop3(op: Opcode) -> Action:
    boolean = op.pick("or", "and", default="")
    integer_type(op, "b32")

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


@opcode("popc", "clz", "brev", "bfind")
def count(op: Opcode) -> Action:
    base = op.base
    amount = base == "bfind" and op.flag("shiftamt")
    t = integer_type(op, *(("u32", "s32", "u64", "s64") if base == "bfind" else ("b32", "b64")))
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


def _position(g: Emitter, operand: Any, n: int) -> str:
    """Emit the start or the length of a bit field, clamped to the width `n` of the value that has the field. For an
    operand above 255, which PTX does not allow, the result is that of an H200.
    """
    x = g.word(operand, 32)
    if n == 32:
        x = g.op(f"and i32 {x}, 255")
    return g.intrinsic("llvm.umin", "i32", x, str(n))


@opcode("bfe")
def bfe(op: Opcode) -> Action:
    t = integer_type(op, "u32", "s32", "u64", "s64")
    n, sign = width(t), is_signed(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        # The operand is extended to 128 bits, so that a field beyond the end of the operand reads copies of the sign
        # (zeros for an unsigned type).
        wide = "i128"
        x = g.op(f"{'sext' if sign else 'zext'} i{n} {g.word(a, n)} to {wide}")
        start, length = _position(g, b, n), _position(g, c, n)
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
    n = width(integer_type(op, "b32", "b64"))

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c, e = ins.operands
        wide = f"i{2 * n}"
        start, length = (g.op(f"zext i32 {_position(g, o, n)} to {wide}") for o in (c, e))
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
    t = integer_type(op, *(("b32",) if base == "bmsk" else ("u32", "s32")))

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


def _picks(mode: str, i: int) -> int:
    """The byte selector that prmt uses in a mode if the two low bits of its third operand are i."""
    picks = {
        "f4e": [i, i + 1, i + 2, i + 3],
        "b4e": [i, (i - 1) & 7, (i - 2) & 7, (i - 3) & 7],
        "rc8": [i] * 4,
        "ecl": [max(i, k) for k in range(4)],
        "ecr": [min(i, k) for k in range(4)],
        "rc16": [2 * (i & 1), 2 * (i & 1) + 1] * 2,
    }[mode]
    return sum(p << (4 * k) for k, p in enumerate(picks))


@opcode("prmt")
def prmt(op: Opcode) -> Action:
    op.type()
    mode = op.pick("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        lo, hi = g.word(a, 32), g.word(b, 32)
        pair = g.op(f"shl i64 {g.op(f'zext i32 {hi} to i64')}, 32")
        pair = g.op(f"or i64 {pair}, {g.op(f'zext i32 {lo} to i64')}")
        selector = "" if isinstance(c, Imm) else g.word(c, 32)
        if mode and isinstance(c, Imm):
            c = Imm(_picks(mode, c.value & 3), "int")
        elif mode:  # two bits of the third operand choose the selector
            which = g.op(f"and i32 {selector}, 3")
            shift = g.op(f"zext i32 {g.op(f'shl i32 {which}, 4')} to i64")
            table = sum(_picks(mode, i) << 16 * i for i in range(4))
            selector = g.op(f"trunc i64 {g.op(f'lshr i64 {table}, {shift}')} to i32")
        total = ""
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


@opcode("fns")
def fns(op: Opcode) -> Action:
    """`fns`: the position of the n-th set bit, counted from a base position, where n is the operand `offset`. A
    negative offset counts downwards; the emitted code then reverses the bits and counts upwards.
    """
    op.pick("b32")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        bits, base, offset = g.word(a, 32), g.word(b, 32), g.word(c, 32)
        down = g.op(f"icmp slt i32 {offset}, 0")
        count = g.op(f"select i1 {down}, i32 {g.op(f'sub i32 0, {offset}')}, i32 {offset}")
        bits = g.op(f"select i1 {down}, i32 {g.intrinsic('llvm.bitreverse', 'i32', bits)}, i32 {bits}")
        base = g.op(f"and i32 {base}, 31")
        base = g.op(f"select i1 {down}, i32 {g.op(f'sub i32 31, {base}')}, i32 {base}")
        left = g.op(f"and i32 {bits}, {g.op(f'shl i32 -1, {base}')}")
        here = g.op(f"and i32 {bits}, {g.op(f'shl i32 1, {base}')}")
        for passed in range(1, 32):
            fewer = g.op(f"and i32 {left}, {g.op(f'sub i32 {left}, 1')}")
            left = g.op(f"select i1 {g.op(f'icmp ugt i32 {count}, {passed}')}, i32 {fewer}, i32 {left}")
        left = g.op(f"select i1 {g.op(f'icmp eq i32 {count}, 0')}, i32 {here}, i32 {left}")
        name = g.helpers.declare("llvm.cttz.i32", "i32", "i32", "i1")
        found = g.op(f"call i32 {name}(i32 {left}, i1 false)")
        found = g.op(f"select i1 {down}, i32 {g.op(f'sub i32 31, {found}')}, i32 {found}")
        none = g.op(f"or i1 {g.op(f'icmp eq i32 {left}, 0')}, {g.op(f'icmp ugt i32 {count}, 32')}")
        g.set_int(d, g.op(f"select i1 {none}, i32 -1, i32 {found}"), 32)

    return Action(emit)
