# SPDX-License-Identifier: Apache-2.0
"""Comparisons, selections and moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import SINK, Instruction, Reg, Special, Vec
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, is_signed, opcode, width
from ..special import special
from .halves import join, lanes
from .real import HALVES, KINDS, flush, unpack


@opcode("selp")
def selp(op: Opcode) -> Action:
    t = op.type()
    n = width(t)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b, c = ins.operands
        p = g.pred(c)
        if t in ("f32", "f64"):
            ll = "float" if t == "f32" else "double"
            if not (g.raw_nan(a) or g.raw_nan(b)):
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
    verb = op.pick(*_COMPARE, *_UNSIGNED, *UNORDERED, "num", "nan")
    boolean = op.pick("and", "or", "xor", default="")
    ftz = op.flag("ftz")
    kinds = op.types(1 if sets_predicate else 2)
    t = kinds[-1]
    if t in KINDS:
        test = comparison(verb, t, ftz)
    else:
        n = width(t)
        if t == "pred" or verb not in _COMPARE and (verb not in _UNSIGNED or is_signed(t)) or ftz:
            raise RefusedError("unsupported comparison")
        if t[0] == "b" and verb not in ("eq", "ne"):
            raise RefusedError("values of a .b type can be compared by .eq and .ne only")
        code = _UNSIGNED.get(verb) or _COMPARE[verb].format("s" if is_signed(t) else "u")

        def test(g: Emitter, a: Any, b: Any) -> list[str]:
            return [g.op(f"icmp {code} i{n} {g.word(a, n)}, {g.word(b, n)}")]

    if (
        not sets_predicate
        and kinds[0] not in ("u32", "s32", "f32")
        and (t not in HALVES or kinds[0] not in HALVES + ("u16", "s16"))
    ):
        raise RefusedError(f"unsupported type .{kinds[0]}")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands[:3]
        results = test(g, a, b)
        if sets_predicate:
            second = getattr(d, "second", None)
            first = d.first if second is not None else d
            if len(results) == 2:  # a packed type has one predicate per half
                outs = [(first, results[0]), (second if second is not None else SINK, results[1])]
            else:
                outs = [(first, results[0])]
                if second is not None:
                    outs.append((second, g.op(f"xor i1 {results[0]}, true")))
            if boolean:
                c = g.pred(ins.operands[3])
                outs = [(o, g.op(f"{boolean} i1 {r}, {c}")) for o, r in outs]
            # Both values are computed before a destination changes, since the destination may be a source of the other
            # value.
            for o, r in outs:
                g.set_pred(o, r)
            return
        if boolean:
            c = g.pred(ins.operands[3])
            results = [g.op(f"{boolean} i1 {r}, {c}") for r in results]
        set_mask(g, d, results, kinds[0])

    return Action(emit)


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
            g.set_int(d, v if w == n else g.op(f"{'trunc' if w > n else 'zext'} i{w} {v} to i{n}"), n)
        elif isinstance(a, Reg) and isinstance(d, Reg) and width(a.type) == n:
            g.copy(d, a, n)
        else:
            g.set_int(d, g.word(a, n), n)

    return Action(emit)


UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")


def comparison(verb: str, kind: str, ftz: bool) -> Callable[[Emitter, Any, Any], list[str]]:
    """A function that emits the comparison of `setp` or `set`: one i1, or two for a packed type."""
    if verb in ("num", "nan"):
        code = "ord" if verb == "num" else "uno"
    elif verb in ("eq", "ne", "lt", "le", "gt", "ge"):
        code = "o" + verb
    elif verb in UNORDERED:
        code = "u" + verb[:2]
    else:
        raise RefusedError(f"unsupported comparison .{verb}")

    def test(g: Emitter, a: Any, b: Any) -> list[str]:
        if kind in HALVES:
            t = kind.removesuffix("x2")
            out = []
            for x, y in zip(lanes(g, a, kind), lanes(g, b, kind), strict=True):
                if ftz:
                    x, y = (g.call(g.helpers.flush(t), "i16", f"i16 {v}") for v in (x, y))
                out.append(g.op(f"fcmp {code} float {unpack(g, t, x)}, {unpack(g, t, y)}"))
            return out
        x, y = g.real(a, kind), g.real(b, kind)
        if ftz:
            x, y = flush(g, x), flush(g, y)
        return [g.op(f"fcmp {code} {'float' if kind == 'f32' else 'double'} {x}, {y}")]

    return test


def set_mask(g: Emitter, dst: Any, results: list[str], kind: str) -> None:
    """Write the result of `set`: for true, all ones (integers) or 1.0 (floats)."""
    if kind in ("u32", "s32") and len(results) == 2:
        high = g.op(f"and i32 {g.op(f'sext i1 {results[1]} to i32')}, -65536")
        low = g.op(f"and i32 {g.op(f'sext i1 {results[0]} to i32')}, 65535")
        g.set_int(dst, g.op(f"or i32 {high}, {low}"), 32)
    elif kind in ("u32", "s32", "u16", "s16"):
        n = width(kind)
        g.set_int(dst, g.op(f"sext i1 {results[0]} to i{n}"), n)
    elif kind == "f32":
        g.set_real(dst, g.op(f"select i1 {results[0]}, float 1.0, float 0.0"), "f32", arithmetic=False)
    else:
        one = 0x3C00 if kind.startswith("f16") else 0x3F80
        join(g, dst, [g.op(f"select i1 {r}, i16 {one}, i16 0") for r in results])
