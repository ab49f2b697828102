# SPDX-License-Identifier: Apache-2.0
"""Video instructions: integer operations on one part of a register (vadd), or on two or four parts at once (vadd2,
vadd4).

Sources are widened to 64 bits, which hold all intermediate results; for vmad and vshl they are widened to 128 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import Instruction, Negated, Part
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, is_signed, opcode

_COMPARE = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_PARTS = {**{f"b{i}": (8, 8 * i) for i in range(4)}, "h0": (16, 0), "h1": (16, 16), "": (32, 0)}
_BYTES = ("b0", "b1", "b10", "b2", "b20", "b21", "b210", "b3", "b30", "b31", "b310", "b32", "b320", "b321", "b3210")
_MASKS = {2: ("h0", "h1", "h10"), 4: _BYTES}


def _split(operand: Any) -> tuple[Any, str]:
    """An operand and its selector. The selector is "" if there is none."""
    return (operand.of, operand.selector) if isinstance(operand, Part) else (operand, "")


def _type(op: Opcode) -> str:
    """Consume and return the next type of an opcode that has several."""
    if not op.rest or op.rest[0] not in ("u32", "s32"):
        raise RefusedError("the type .u32 or .s32 is expected")
    return op.rest.pop(0)


def _field(g: Emitter, word: str, n: int, at: int, signed: bool, bits: int) -> str:
    """`n` bits of an i32 from bit `at` on, widened to `bits`."""
    moved = g.op(f"lshr i32 {word}, {at}") if at else word
    narrow = moved if n == 32 else g.op(f"trunc i32 {moved} to i{n}")
    return g.op(f"{'sext' if signed else 'zext'} i{n} {narrow} to i{bits}")


def _part(g: Emitter, operand: Any, type_: str, bits: int = 64) -> str:
    value, selector = _split(operand)
    if selector not in _PARTS:
        raise RefusedError(f"unsupported selector .{selector}")
    return _field(g, g.word(value, 32), *_PARTS[selector], is_signed(type_), bits)


def _clamp(g: Emitter, x: str, n: int, signed: bool, bits: int = 64) -> str:
    low, high = (-(1 << n - 1), (1 << n - 1) - 1) if signed else (0, (1 << n) - 1)
    return g.intrinsic("llvm.smin", f"i{bits}", g.intrinsic("llvm.smax", f"i{bits}", x, str(low)), str(high))


def _difference(g: Emitter, a: str, b: str) -> str:
    return g.intrinsic("llvm.smax", "i64", g.op(f"sub i64 {a}, {b}"), g.op(f"sub i64 {b}, {a}"))


def _average(g: Emitter, a: str, b: str) -> str:
    """Half of a + b. A result with a fraction of one half is rounded away from zero."""
    total = g.op(f"add i64 {a}, {b}")
    up = g.op(f"zext i1 {g.op(f'icmp sge i64 {total}, 0')} to i64")
    return g.op(f"ashr i64 {g.op(f'add i64 {total}, {up}')}, 1")


_OPERATIONS: dict[str, Callable[[Emitter, str, str], str]] = {
    "vadd": lambda g, a, b: g.op(f"add i64 {a}, {b}"),
    "vsub": lambda g, a, b: g.op(f"sub i64 {a}, {b}"),
    "vabsdiff": _difference,
    "vmin": lambda g, a, b: g.intrinsic("llvm.smin", "i64", a, b),
    "vmax": lambda g, a, b: g.intrinsic("llvm.smax", "i64", a, b),
    "vavrg": _average,
}


def _comparison(op: Opcode) -> Callable[[Emitter, str, str], str]:
    code = _COMPARE[op.pick(*_COMPARE)]
    return lambda g, a, b: g.op(f"zext i1 {g.op(f'icmp {code} i64 {a}, {b}')} to i64")


def _finish(g: Emitter, ins: Instruction, x: str, second: str, saturates: bool, signed: bool, bits: int = 64) -> None:
    """Write `x`, the result of a scalar instruction, to the destination. With `saturates`, it is clamped first. With
    `second`, it is then combined with the fourth operand by that operation. If the destination has a selector, it is
    instead inserted into the selected part of the fourth operand.
    """
    target, selector = _split(ins.operands[0])
    if selector not in _PARTS:
        raise RefusedError(f"unsupported selector .{selector}")
    if selector and second:
        raise RefusedError(f"a second operation (.{second}) is not allowed if the destination has a selector")
    n, at = _PARTS[selector]
    if len(ins.operands) != 3 + bool(selector or second):
        raise RefusedError(
            "a fourth operand is needed if the destination has a selector or a second operation follows, and not "
            "allowed otherwise"
        )
    if saturates:
        x = _clamp(g, x, n, signed, bits)
    x = g.op(f"trunc i{bits} {x} to i32")
    if second == "add":
        x = g.op(f"add i32 {x}, {g.word(ins.operands[3], 32)}")
    elif second:
        x = g.intrinsic(f"llvm.{'s' if signed else 'u'}{second}", "i32", x, g.word(ins.operands[3], 32))
    elif selector:
        mask = (1 << n) - 1 << at
        kept = g.op(f"and i32 {g.word(ins.operands[3], 32)}, {~mask}")
        moved = g.op(f"shl i32 {x}, {at}")
        x = g.op(f"or i32 {kept}, {g.op(f'and i32 {moved}, {mask}')}")
    g.set_int(target, x, 32)


@opcode("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vset")
def scalar(op: Opcode) -> Action:
    compares = op.base == "vset"
    result = "u32" if compares else _type(op)
    types = _type(op), _type(op)
    operation = _comparison(op) if compares else _OPERATIONS[op.base]
    saturates = not compares and op.flag("sat")
    second = op.pick("add", "min", "max", default="")

    def emit(g: Emitter, ins: Instruction) -> None:
        a, b = (_part(g, x, t) for x, t in zip(ins.operands[1:3], types, strict=True))
        _finish(g, ins, operation(g, a, b), second, saturates, is_signed(result))

    return Action(emit)


@opcode("vshl", "vshr")
def shift(op: Opcode) -> Action:
    result, source = _type(op), _type(op)
    op.pick("u32")
    saturates, wraps = op.flag("sat"), op.pick("clamp", "wrap") == "wrap"
    second = op.pick("add", "min", "max", default="")
    code = "shl" if op.base == "vshl" else "ashr"

    def emit(g: Emitter, ins: Instruction) -> None:
        x, amount = _part(g, ins.operands[1], source, 128), _part(g, ins.operands[2], "u32", 128)
        amount = g.op(f"and i128 {amount}, 31") if wraps else g.intrinsic("llvm.umin", "i128", amount, "32")
        _finish(g, ins, g.op(f"{code} i128 {x}, {amount}"), second, saturates, is_signed(result), 128)

    return Action(emit)


@opcode("vmad")
def multiply_add(op: Opcode) -> Action:
    """vmad: the product of a and b plus c, shifted to the right. The product or c may be negated; with .po, neither is
    negated, and 1 is added. The result is signed if a source is signed or negated.
    """
    _type(op)
    types = _type(op), _type(op)
    plus_one, saturates = op.flag("po"), op.flag("sat")
    places = {"shr7": 7, "shr15": 15, "": 0}[op.pick("shr7", "shr15", default="")]

    def emit(g: Emitter, ins: Instruction) -> None:
        d, *sources = ins.operands
        minus = [isinstance(x, Negated) for x in sources]
        a, b, c = (x.of if isinstance(x, Negated) else x for x in sources)
        negates = minus[0] != minus[1]
        if plus_one and (any(minus)) or negates and minus[2]:
            raise RefusedError("vmad negates the product or c, not both, and neither with .po")
        signed = any(map(is_signed, types)) or negates or minus[2]
        x = g.op(f"mul i128 {_part(g, a, types[0], 128)}, {_part(g, b, types[1], 128)}")
        y = g.op(f"{'sext' if signed else 'zext'} i32 {g.word(c, 32)} to i128")
        if negates:
            x = g.op(f"sub i128 0, {x}")
        x = g.op(f"{'sub' if minus[2] else 'add'} i128 {x}, {y}")
        if plus_one:
            x = g.op(f"add i128 {x}, 1")
        x = g.op(f"ashr i128 {x}, {places}")
        if saturates:
            x = _clamp(g, x, 32, signed, 128)
        g.set_int(d, g.op(f"trunc i128 {x} to i32"), 32)

    return Action(emit)


@opcode(*(f"{name}{lanes}" for name in (*_OPERATIONS, "vset") for lanes in (2, 4)))
def packed(op: Opcode) -> Action:
    name, lanes = op.base[:-1], int(op.base[-1])
    n = 32 // lanes
    compares = name == "vset"
    result = "u32" if compares else _type(op)
    types = _type(op), _type(op)
    operation = _comparison(op) if compares else _OPERATIONS[name]
    accumulates, saturates = op.flag("add"), not compares and op.flag("sat")
    if accumulates and saturates:
        raise RefusedError("unsupported modifier .sat")

    def places(selector: str, first: int) -> list[int]:
        """For each lane of the result, lowest first: the index of the part of the sources that the lane uses. The parts
        of the second source are counted after those of the first.
        """
        digits = selector[1:] or "".join(str(first + i) for i in reversed(range(lanes)))
        letter = selector[:1] or "hb"[lanes == 4]
        if letter != "hb"[lanes == 4] or len(digits) != lanes or any(not "0" <= c < str(2 * lanes) for c in digits):
            raise RefusedError(f"unsupported selector .{selector}")
        return [int(c) for c in reversed(digits)]

    def emit(g: Emitter, ins: Instruction) -> None:
        target, mask = _split(ins.operands[0])
        mask = mask or _MASKS[lanes][-1]
        if mask not in _MASKS[lanes] or len(ins.operands) != 4:
            selectors = " .".join(_MASKS[lanes])
            raise RefusedError(f"four operands are expected; a selector of the first must be one of .{selectors}")
        (a, asel), (b, bsel) = map(_split, ins.operands[1:3])
        words = g.word(a, 32), g.word(b, 32)
        last = g.word(ins.operands[3], 32)
        chosen = places(asel, 0), places(bsel, lanes)
        total = last if accumulates else "0"
        for i in range(lanes):
            if str(i) not in mask[1:]:
                if not accumulates:
                    total = g.op(f"or i32 {total}, {g.op(f'and i32 {last}, {(1 << n) - 1 << n * i}')}")
                continue
            x, y = (
                _field(g, words[k[i] // lanes], n, k[i] % lanes * n, is_signed(t), 64)
                for k, t in zip(chosen, types, strict=True)
            )
            value = operation(g, x, y)
            if saturates:
                value = _clamp(g, value, n, is_signed(result))
            value = g.op(f"trunc i64 {value} to i32")
            if accumulates:
                total = g.op(f"add i32 {total}, {value}")
            else:
                value = g.op(f"shl i32 {g.op(f'and i32 {value}, {(1 << n) - 1}')}, {n * i}")
                total = g.op(f"or i32 {total}, {value}")
        g.set_int(target, total, 32)

    return Action(emit)
