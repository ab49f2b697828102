# SPDX-License-Identifier: Apache-2.0
"""`cvt` between all integer and floating-point types, and `cvt.pack`."""

from __future__ import annotations

from typing import Any

from ....ptx.ir import TYPE_BYTES, Instruction
from ..emitter import Emitter
from ..formats import FORMATS
from ..opcode import Action, Opcode, RefusedError, is_signed, opcode, width
from . import real
from .halves import lanes, relu16

_FLOATS = ("f16", "bf16", "f32", "f64", "tf32")
_PAIRS = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")
_TO_INTEGER = {"rni": "llvm.roundeven", "rzi": "llvm.trunc", "rmi": "llvm.floor", "rpi": "llvm.ceil"}
_LL = {"f32": "float", "f64": "double"}


def _source(g: Emitter, operand: Any, kind: str) -> tuple[str, str]:
    """An operand as ("f32" or "f64", value). fp16 and bf16 are widened exactly."""
    if kind in ("f16", "bf16"):
        return "f32", real.unpack(g, kind, g.word(operand, 16))
    return kind, g.real(operand, kind)


def _round(g: Emitter, kind: str, value: str, target: str, mode: str, saturate: bool = False) -> str:
    """A float or double rounded to `target` (fp16, bf16, tf32 or fp32), as bits."""
    return real.pack(g, kind, target, mode, real.bits_of(g, value, kind), saturate)


@opcode("cvt")
def cvt(op: Opcode) -> Action:
    if op.flag("pack"):
        return _pack_integers(op)
    kinds = [p for p in op.rest if p in TYPE_BYTES]
    if any(k in _PAIRS for k in kinds):
        return _pairs(op)
    target, source = op.types(2)
    mode = op.pick("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", default="none")
    ftz, sat, satfinite, relu = op.flag("ftz"), op.flag("sat"), op.flag("satfinite"), op.flag("relu")
    to_real, from_real = target in _FLOATS, source in _FLOATS
    for t in (target, source):
        if t not in _FLOATS and t[0] not in "us":
            raise RefusedError(f"unsupported type .{t}")
    if (satfinite or relu) and not (to_real and from_real):
        raise RefusedError("unsupported modifier")
    if from_real and to_real:
        return _real_to_real(target, source, mode, ftz, sat, satfinite, relu)
    if from_real:
        return _real_to_integer(target, source, mode, ftz)
    if to_real:
        return _integer_to_real(target, source, mode, sat)
    if mode != "none" or ftz:
        raise RefusedError("unsupported modifier")
    return _integer_to_integer(target, source, sat)


def _integer_to_integer(target: str, source: str, sat: bool) -> Action:
    n, m = width(target), width(source)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        x = g.word(a, m)
        if sat:
            # 72 bits can represent all sources and all bounds.
            x = g.op(f"{'sext' if is_signed(source) else 'zext'} i{m} {x} to i72")
            low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if is_signed(target) else (0, (1 << n) - 1)
            x = g.intrinsic("llvm.smax", "i72", x, str(low))
            x = g.op(f"trunc i72 {g.intrinsic('llvm.smin', 'i72', x, str(high))} to i{n}")
        elif n > m:
            x = g.op(f"{'sext' if is_signed(source) else 'zext'} i{m} {x} to i{n}")
        elif n < m:
            x = g.op(f"trunc i{m} {x} to i{n}")
        g.set_int(d, x, n, sign=is_signed(target))

    return Action(emit)


def _real_to_integer(target: str, source: str, mode: str, ftz: bool) -> Action:
    """`cvt` from a floating-point type to an integer type. A value out of range is clamped. A NaN gives 0 or, if one of
    the types has 64 bits, a number with only the top bit set.
    """
    if mode not in _TO_INTEGER or source == "tf32":
        raise RefusedError("one of .rni .rzi .rmi .rpi is expected")
    n, sign = width(target), is_signed(target)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        kind, x = _source(g, a, source)
        ll = _LL[kind]
        if ftz and kind == "f32":
            x = real.flush(g, x)
        i = g.intrinsic(_TO_INTEGER[mode], ll, x)
        suffix = "f32" if ll == "float" else "f64"
        name = g.helpers.declare(f"llvm.fpto{'s' if sign else 'u'}i.sat.i{n}.{suffix}", f"i{n}", ll)
        r = g.call(name, f"i{n}", f"{ll} {i}")  # this function gives 0 for a NaN
        if n == 64 or source == "f64":
            nan = g.op(f"fcmp uno {ll} {x}, 0.0")
            r = g.op(f"select i1 {nan}, i{n} {-(1 << (n - 1))}, i{n} {r}")
        g.set_int(d, r, n, sign)

    return Action(emit)


def _integer_to_real(target: str, source: str, mode: str, sat: bool) -> Action:
    if mode not in ("rn", "rz", "rm", "rp") or target == "tf32":
        raise RefusedError("unsupported rounding of an integer")
    n, s = width(source), "s" if is_signed(source) else "u"

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        x = g.word(a, n)
        if target == "f64" and n == 64 and mode != "rn":
            # Both halves are exact, and their sum is rounded once.
            shifted = g.op(f"{'ashr' if s == 's' else 'lshr'} i64 {x}, 32")
            high = g.op(f"{s}itofp i64 {shifted} to double")
            high = g.op(f"fmul double {high}, 4294967296.0")
            low = g.op(f"uitofp i64 {g.op(f'and i64 {x}, 4294967295')} to double")
            g.set_real(d, real.directed_sum(g, "add", mode, [high, low]), "f64", arithmetic=False)
            return
        if target in _LL and (mode == "rn" or target == "f64"):
            r = g.op(f"{s}itofp i{n} {x} to {_LL[target]}")
            g.set_real(d, real.saturate(g, r, _LL[target]) if sat else r, target, arithmetic=False)
            return
        if n == 64:
            wide = g.call(g.helpers.int64_odd(s == "s"), "i64", f"i64 {x}")
        else:
            wide = real.bits_of(g, g.op(f"{s}itofp i{n} {x} to double"), "f64")
        if sat:
            wide = real.bits_of(g, real.saturate(g, g.op(f"bitcast i64 {wide} to double"), "double"), "f64")
        r = real.pack(g, "f64", target, mode, wide)
        g.set_int(d, r, width(target))

    return Action(emit)


def _real_to_real(target: str, source: str, mode: str, ftz: bool, sat: bool, satfinite: bool, relu: bool) -> Action:
    if source == "tf32" or relu and target not in ("f16", "bf16", "tf32"):
        raise RefusedError("unsupported conversion")
    narrow = target in ("f16", "bf16", "tf32") or (target == "f32" and source == "f64")
    if mode == "rna" and target != "tf32":
        raise RefusedError("unsupported modifier .rna")
    if narrow and target != source and mode not in ("rn", "rz", "rm", "rp", "rna"):
        raise RefusedError("a rounding mode is expected")
    if mode in ("rn", "rz", "rm", "rp") and not narrow or satfinite and target == "f32":
        raise RefusedError("unsupported modifier")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        kind, x = _source(g, a, source)
        if ftz and source == "f32" and target != "f16":  # an H200 does not flush the source of a conversion to fp16
            x = real.flush(g, x)
        if mode in _TO_INTEGER:
            x = g.intrinsic(_TO_INTEGER[mode], _LL[kind], x)
        if sat:
            x = real.saturate(g, x, _LL[kind])
        if target in ("f16", "bf16", "tf32"):
            bits = _round(g, kind, x, target, mode if mode not in (*_TO_INTEGER, "none") else "rn", satfinite)
            if source == "f64":
                bits = _keep_payload(g, target, x, bits)
            if target == "tf32":
                bits = g.op(f"shl i32 {g.op(f'zext i19 {bits} to i32')}, 13")
                # With .rna a NaN does not become canonical. It keeps its high bits, which may make it an infinity.
                if mode == "rna":
                    nan = g.op(f"fcmp uno float {x}, 0.0")
                    bits = g.op(f"select i1 {nan}, i32 {g.op(f'and i32 {real.bits_of(g, x)}, -8192')}, i32 {bits}")
                if relu:
                    bits = g.op(f"select i1 {g.op(f'icmp slt i32 {bits}, 0')}, i32 0, i32 {bits}")
                g.set_int(d, bits, 32)
            else:
                g.set_int(d, relu16(g, bits) if relu else bits, 16)
            return
        if kind == target:
            g.set_real(d, x, target, arithmetic=source != "bf16")
        elif target == "f64":
            g.set_real(d, real.to_double(g, x), "f64")
        else:  # fp64 -> fp32
            direction = "rn" if mode in _TO_INTEGER else mode
            rounded = _keep_payload(g, "f32", x, _round(g, "f64", x, "f32", direction))
            if ftz:
                rounded = real.flush_tiny(g, "f32", direction, rounded, real.bits_of(g, x, "f64"), "f64")
            g.set_int(d, rounded, 32)

    return Action(emit)


def _keep_payload(g: Emitter, target: str, x: str, rounded: str) -> str:
    """The bits, in the format `target`, of the double `x`. They are those of `rounded`, unless x is a NaN. As on an
    H200, a NaN keeps its sign and the high bits of its payload, and becomes quiet.
    """
    f, bits = FORMATS[target], real.bits_of(g, x, "f64")
    payload = g.op(f"lshr i64 {bits}, {FORMATS['f64'].mantissa - f.mantissa}")
    payload = g.op(f"and i64 {payload}, {(1 << f.mantissa) - 1}")
    sign = g.op(f"and i64 {g.op(f'lshr i64 {bits}, {64 - f.width}')}, {1 << (f.width - 1)}")
    nan = g.op(f"or i64 {g.op(f'or i64 {payload}, {sign}')}, {f.infinity | 1 << (f.mantissa - 1)}")
    is_nan = g.op(f"fcmp uno double {x}, 0.0")
    n = f.width
    return g.op(f"select i1 {is_nan}, i{n} {g.op(f'trunc i64 {nan} to i{n}')}, i{n} {rounded}")


def _pairs(op: Opcode) -> Action:
    """A conversion of two sources to a packed type. The first source goes to the high half."""
    kinds = op.types(2)
    target, source = kinds
    mode = op.pick("rn", "rz", default="none")
    satfinite, relu = op.flag("satfinite"), op.flag("relu")
    if source == "f32" and target in _PAIRS:
        t = target[:-2]
        if mode == "none" or t in ("e4m3", "e5m2") and (mode != "rn" or not satfinite):
            raise RefusedError("unsupported modifiers of a packed conversion")

        def emit(g: Emitter, ins: Instruction) -> None:
            d, a, b = ins.operands
            halves = [_round(g, "f32", g.real(o, "f32"), t, mode, satfinite) for o in (b, a)]
            _join(g, d, halves, width(target) // 2, relu)

        return Action(emit)
    if source == "f16x2" and target in ("e4m3x2", "e5m2x2"):
        if mode != "rn" or not satfinite:
            raise RefusedError("unsupported modifiers of a packed conversion")

        def narrow(g: Emitter, ins: Instruction) -> None:
            d, a = ins.operands
            halves = [_round(g, "f32", real.unpack(g, "f16", h), target[:-2], "rn", True) for h in lanes(g, a, "f16x2")]
            _join(g, d, halves, 8, relu)

        return Action(narrow)
    if source in ("e4m3x2", "e5m2x2") and target == "f16x2":
        if mode != "rn" or satfinite:
            raise RefusedError("unsupported modifiers of a packed conversion")

        def widen(g: Emitter, ins: Instruction) -> None:
            d, a = ins.operands
            x = g.word(a, 16)
            bytes_ = [g.op(f"trunc i16 {x} to i8"), g.op(f"trunc i16 {g.op(f'lshr i16 {x}, 8')} to i8")]
            halves = [_round(g, "f32", real.unpack(g, source[:-2], b), "f16", "rn") for b in bytes_]
            _join(g, d, halves, 16, relu)

        return Action(widen)
    raise RefusedError(f"unsupported conversion .{target}.{source}")


def _join(g: Emitter, dst: Any, halves: list[str], n: int, relu: bool) -> None:
    if relu:
        halves = [g.op(f"select i1 {g.op(f'icmp slt i{n} {h}, 0')}, i{n} 0, i{n} {h}") for h in halves]
    high = g.op(f"shl i{2 * n} {g.op(f'zext i{n} {halves[1]} to i{2 * n}')}, {n}")
    g.set_int(dst, g.op(f"or i{2 * n} {high}, {g.op(f'zext i{n} {halves[0]} to i{2 * n}')}"), 2 * n)


def _pack_integers(op: Opcode) -> Action:
    """`cvt.pack.sat.T.s32[.b32] d, a, b[, c]`: b and a, saturated, in the low bits of d (b lowest), and c above
    them.
    """
    if not op.flag("sat"):
        raise RefusedError("the modifier .sat is expected")
    third = op.flag("b32")
    target = op.pick("u16", "s16", "u8", "s8")
    op.pick("s32")
    n = width(target)
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if is_signed(target) else (0, (1 << n) - 1)

    def emit(g: Emitter, ins: Instruction) -> None:
        parts = []
        for o in ins.operands[1:3]:
            x = g.intrinsic("llvm.smin", "i32", g.intrinsic("llvm.smax", "i32", g.word(o, 32), str(low)), str(high))
            parts.append(g.op(f"and i32 {x}, {(1 << n) - 1}"))
        r = g.op(f"or i32 {g.op(f'shl i32 {parts[0]}, {n}')}, {parts[1]}")
        if third and n == 8:
            r = g.op(f"or i32 {r}, {g.op(f'shl i32 {g.word(ins.operands[3], 32)}, 16')}")
        g.set_int(ins.operands[0], r, 32)

    return Action(emit)
