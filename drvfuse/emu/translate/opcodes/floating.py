# SPDX-License-Identifier: Apache-2.0
"""Floating-point instructions.

fp32 and fp64 operations are those of LLVM (IEEE, without contraction). Operations with directed rounding are computed
in double and rounded to odd on the way, so that they are exact. fp16 and bf16 operations are computed in fp32 or double
and rounded once. Approximate functions give the result of the double function, rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import Instruction
from ..emitter import Emitter
from ..floats import FORMATS
from ..opcode import Action, Opcode, RefusedError, opcode, width

HALVES = ("f16", "f16x2", "bf16", "bf16x2")
KINDS = ("f32", "f64", *HALVES)
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")
Compute = Callable[[Emitter, list[str]], str]


def to_double(g: Emitter, x: str) -> str:
    return g.op(f"fpext float {x} to double")


def to_float(g: Emitter, x: str) -> str:
    return g.op(f"fptrunc double {x} to float")


def bits_of(g: Emitter, x: str, kind: str = "f32") -> str:
    return g.op(f"bitcast {'float' if kind == 'f32' else 'double'} {x} to i{width(kind)}")


def pack(g: Emitter, source: str, target: str, mode: str, value: str, saturate: bool = False) -> str:
    """A value rounded from the format `source` to the format `target`, both as bits."""
    name = g.helpers.pack(source, target, mode, saturate)
    return g.call(name, f"i{FORMATS[target].width}", f"i{FORMATS[source].width} {value}")


def unpack(g: Emitter, source: str, value: str) -> str:
    return g.call(g.helpers.unpack(source), "float", f"i{FORMATS[source].width} {value}")


def flush(g: Emitter, x: str) -> str:
    return g.call(g.helpers.flush("f32"), "float", f"float {x}")


def flush64(g: Emitter, x: str) -> str:
    """An operand or result of an approximate fp64 function: a subnormal is flushed, and the low word is zero."""
    bits = g.call(g.helpers.flush("f64"), "i64", f"i64 {bits_of(g, x, 'f64')}")
    bits = g.op(f"and i64 {bits}, {-1 << 32}")
    return g.op(f"bitcast i64 {bits} to double")


def flush_tiny(g: Emitter, kind: str, mode: str, result: str, unrounded: str, source: str) -> str:
    """`.ftz` of a result, as on an H200. The result is flushed if it is below the least normal number after it was
    rounded to the precision of `kind` with unbounded exponent. `result` are bits of `kind`, `unrounded` bits of
    `source`.
    """
    n, m, f, s = FORMATS[kind].width, FORMATS[source].width, FORMATS[kind], FORMATS[source]
    magnitude = g.op(f"and i{m} {unrounded}, {(1 << (m - 1)) - 1}")
    least = (1 - f.bias + s.bias) << s.mantissa
    unit = 1 << s.mantissa - f.mantissa  # the last place of a number just below the least normal one
    limit = str(least - unit // 2 if mode == "rn" else least)
    if mode in ("rm", "rp"):
        away = g.op(f"icmp {'slt' if mode == 'rm' else 'sge'} i{m} {unrounded}, 0")
        limit = g.op(f"select i1 {away}, i{m} {least - unit + 1}, i{m} {least}")
    tiny = g.op(f"icmp ult i{m} {magnitude}, {limit}")
    return g.op(f"select i1 {tiny}, i{n} {g.op(f'and i{n} {result}, {-(1 << (n - 1))}')}, i{n} {result}")


def saturate(g: Emitter, x: str, ll: str = "float") -> str:
    """The value clamped to [0, 1]. A NaN gives +0."""
    x = g.op(f"select i1 {g.op(f'fcmp ogt {ll} {x}, 0.0')}, {ll} {x}, {ll} 0.0")
    return g.op(f"select i1 {g.op(f'fcmp olt {ll} {x}, 1.0')}, {ll} {x}, {ll} 1.0")


def extremum(g: Emitter, verb: str, x: str, y: str, kind: str, nan: bool) -> str:
    """min or max, with -0 < +0. If one operand is a NaN, the result is the other one or, with `nan`, a NaN."""
    n = width(kind)
    ll = "float" if kind == "f32" else "double"
    first = g.op(f"fcmp {'olt' if verb == 'min' else 'ogt'} {ll} {x}, {y}")
    r = g.op(f"select i1 {first}, {ll} {x}, {ll} {y}")
    both = g.op(f"{'or' if verb == 'min' else 'and'} i{n} {bits_of(g, x, kind)}, {bits_of(g, y, kind)}")
    equal = g.op(f"fcmp oeq {ll} {x}, {y}")
    r = g.op(f"select i1 {equal}, {ll} {g.op(f'bitcast i{n} {both} to {ll}')}, {ll} {r}")
    if nan:
        r = g.op(f"select i1 {g.op(f'fcmp uno {ll} {x}, 0.0')}, {ll} {x}, {ll} {r}")
        return g.op(f"select i1 {g.op(f'fcmp uno {ll} {y}, 0.0')}, {ll} {y}, {ll} {r}")
    return g.op(f"select i1 {g.op(f'fcmp uno {ll} {y}, 0.0')}, {ll} {x}, {ll} {r}")


def odd(g: Emitter, verb: str, mode: str, v: list[str]) -> str:
    """An fp32 operation in double, rounded to odd. Rounding its result to fp32 or less, by any mode, is exact."""
    d = [to_double(g, x) for x in v]
    add = g.helpers.add_odd(mode == "rm")
    if verb in ("add", "sub", "fma", "mad"):
        if verb == "sub":
            d[1] = g.op(f"fneg double {d[1]}")
        if len(d) == 3:
            d = [g.op(f"fmul double {d[0]}, {d[1]}"), d[2]]
        return g.call(add, "i64", f"double {d[0]}", f"double {d[1]}")
    if verb == "mul":
        return bits_of(g, g.op(f"fmul double {d[0]}, {d[1]}"), "f64")
    if verb == "div":
        return g.call(g.helpers.div_odd(), "i64", f"double {d[0]}", f"double {d[1]}")
    if verb == "rcp":
        return g.call(g.helpers.div_odd(), "i64", "double 1.0", f"double {d[0]}")
    return g.call(g.helpers.sqrt_odd(), "i64", f"double {d[0]}")


def directed(g: Emitter, verb: str, mode: str, v: list[str]) -> str:
    """An fp32 operation rounded by rz, rm or rp, exactly."""
    return g.op(f"bitcast i32 {pack(g, 'f64', 'f32', mode, odd(g, verb, mode, v))} to float")


def directed_sum(g: Emitter, verb: str, mode: str, v: list[str]) -> str:
    """An fp64 sum or difference rounded by rz, rm or rp, exactly."""
    second = g.op(f"fneg double {v[1]}") if verb == "sub" else v[1]
    return g.call(g.helpers.add_directed(mode), "double", f"double {v[0]}", f"double {second}")


def directed64(g: Emitter, verb: str, mode: str, v: list[str]) -> str:
    """An fp64 operation rounded by rz, rm or rp, exactly."""
    if verb in ("add", "sub"):
        return directed_sum(g, verb, mode, v)
    operands = ["1.0", *v] if verb == "rcp" else v
    name = {"mul": "fmul", "mad": "fma", "div": "fdiv", "rcp": "fdiv"}.get(verb, verb)
    return g.call(g.helpers.rounded(name, mode), "double", *(f"double {x}" for x in operands))


def plain(g: Emitter, verb: str, v: list[str], ll: str, nan: bool = False) -> str:
    """One operation, rounded to nearest even."""
    kind = "f32" if ll == "float" else "f64"
    if verb in ("add", "sub", "mul", "div"):
        return g.op(f"f{verb} {ll} {v[0]}, {v[1]}")
    if verb in ("fma", "mad"):
        return g.intrinsic("llvm.fma", ll, *v)
    if verb == "neg":
        return g.op(f"fneg {ll} {v[0]}")
    if verb == "abs":
        return g.intrinsic("llvm.fabs", ll, v[0])
    if verb == "sqrt":
        return g.intrinsic("llvm.sqrt", ll, v[0])
    if verb == "rcp":
        return g.op(f"fdiv {ll} 1.0, {v[0]}")
    if verb in ("min", "max"):
        return extremum(g, verb, v[0], v[1], kind, nan)
    raise RefusedError(f"unsupported operation {verb!r}")


def _operation(op: Opcode, kind: str, verb: str, mode: str, ftz: bool, sat: bool, nan: bool) -> Action:
    """An operation on fp32 or fp64 operands."""
    ll = "float" if kind == "f32" else "double"
    if kind == "f64" and (ftz and verb != "rcp" or sat):
        raise RefusedError(
            f"unsupported modifier of {verb}.f64: .{mode}{' .ftz' if ftz else ''}{' .sat' if sat else ''}"
        )

    def emit(g: Emitter, ins: Instruction) -> None:
        v = [g.real(o, kind) for o in ins.operands[1:]]
        if ftz:
            v = [flush(g, x) if kind == "f32" else flush64(g, x) for x in v]
        if mode == "rn":
            r = plain(g, verb, v, ll, nan)
        else:
            r = directed(g, verb, mode, v) if kind == "f32" else directed64(g, verb, mode, v)
        if ftz and kind == "f64":
            r = flush64(g, r)
        elif ftz and verb not in ("neg", "abs", "min", "max"):
            bits = flush_tiny(g, "f32", mode, bits_of(g, r), odd(g, verb, mode, v), "f64")
            r = g.op(f"bitcast i32 {bits} to float")
        if sat:
            r = saturate(g, r, ll)
        g.set_real(ins.operands[0], r, kind)

    return Action(emit)


def lanes(g: Emitter, operand: Any, kind: str) -> list[str]:
    """The i16 halves of an fp16/bf16 operand."""
    if not kind.endswith("x2"):
        return [g.word(operand, 16)]
    x = g.word(operand, 32)
    return [g.op(f"trunc i32 {x} to i16"), g.op(f"trunc i32 {g.op(f'lshr i32 {x}, 16')} to i16")]


def join(g: Emitter, dst: Any, halves: list[str]) -> None:
    """Write one or two i16 halves to a register."""
    if len(halves) == 1:
        g.set_int(dst, halves[0], 16)
        return
    high = g.op(f"shl i32 {g.op(f'zext i16 {halves[1]} to i32')}, 16")
    g.set_int(dst, g.op(f"or i32 {high}, {g.op(f'zext i16 {halves[0]} to i32')}"), 32)


def half_operation(
    kind: str, verb: str, ftz: bool = False, sat: bool = False, relu: bool = False, nan: bool = False
) -> Compute:
    """A function that emits an operation on i16 halves, whose result is rounded once to an i16 half."""
    t = kind.removesuffix("x2")

    def compute(g: Emitter, halves: list[str]) -> str:
        if ftz:
            halves = [g.call(g.helpers.flush(t), "i16", f"i16 {h}") for h in halves]
        if verb in ("neg", "abs"):
            x = halves[0]
            magnitude = g.op(f"and i16 {x}, 32767")
            r = g.op(f"xor i16 {x}, -32768") if verb == "neg" else magnitude
            is_nan = g.op(f"icmp ugt i16 {magnitude}, {FORMATS[t].infinity}")
            return g.op(f"select i1 {is_nan}, i16 {FORMATS[t].nan}, i16 {r}")
        v = [unpack(g, t, h) for h in halves]
        if verb in ("fma", "mad") or (verb == "mul" and t == "bf16"):
            d = [to_double(g, x) for x in v]
            p = g.op(f"fmul double {d[0]}, {d[1]}")  # the product is exact
            if len(d) == 3:
                p = g.call(g.helpers.add_odd(), "i64", f"double {p}", f"double {d[2]}")
            else:
                p = bits_of(g, p, "f64")
            if sat:
                p = bits_of(g, saturate(g, g.op(f"bitcast i64 {p} to double"), "double"), "f64")
            r = pack(g, "f64", t, "rn", p)
            unrounded = p, "f64"
        else:
            # The fp32 sum or product of two fp16 or bf16 values, rounded again, is as an exact one rounded once.
            x = plain(g, verb, v, "float", nan)
            if sat:
                x = saturate(g, x)
            unrounded = bits_of(g, x), "f32"
            r = pack(g, "f32", t, "rn", unrounded[0])
        if ftz:
            r = flush_tiny(g, t, "rn", r, *unrounded)
        return relu16(g, r) if relu else r

    return compute


def relu16(g: Emitter, x: str) -> str:
    """`.relu`: a negative number becomes +0. The canonical NaN is positive, so it is kept."""
    return g.op(f"select i1 {g.op(f'icmp slt i16 {x}, 0')}, i16 0, i16 {x}")


def map_halves(kind: str, compute: Compute) -> Action:
    def emit(g: Emitter, ins: Instruction) -> None:
        columns = [lanes(g, o, kind) for o in ins.operands[1:]]
        join(g, ins.operands[0], [compute(g, list(row)) for row in zip(*columns, strict=True)])

    return Action(emit)


# Handlers -----------------------------------------------------------------------------------------------------------
@opcode("fma")
def arithmetic(op: Opcode) -> Action:
    """fma, and the floating-point forms of the instructions that `integer` registers (add, sub, mul, mad, neg, ...)."""
    verb = op.base
    kinds = [p for p in op.rest if p in KINDS]
    if len(kinds) != 1:
        raise RefusedError("one floating-point type is expected")
    kind = op.type()
    mode = op.pick("rn", "rz", "rm", "rp", default="rn")
    ftz, sat, relu = op.flag("ftz"), op.flag("sat"), op.flag("relu")
    nan = verb in ("min", "max") and op.flag("NaN")
    xorsign = verb in ("min", "max") and op.flag("xorsign")
    if xorsign:
        op.flag("abs")
        return _xorsign(kind, verb, nan, ftz)
    op.flag("noftz")
    if kind in HALVES:
        if mode != "rn":
            raise RefusedError(f"unsupported modifier .{mode}")
        return map_halves(kind, half_operation(kind, verb, ftz, sat, relu, nan))
    if relu:
        raise RefusedError("unsupported modifier .relu")
    return _operation(op, kind, verb, mode, ftz, sat, nan)


def _xorsign(kind: str, verb: str, nan: bool, ftz: bool) -> Action:
    if kind != "f32" or ftz:
        raise RefusedError("unsupported modifier .xorsign")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands
        x, y = g.real(a, "f32"), g.real(b, "f32")
        sign = g.op(f"and i32 {g.op(f'xor i32 {bits_of(g, x)}, {bits_of(g, y)}')}, -2147483648")
        m = extremum(g, verb, plain(g, "abs", [x], "float"), plain(g, "abs", [y], "float"), "f32", nan)
        isnan = g.op(f"fcmp uno float {m}, 0.0")
        r = g.op(f"or i32 {bits_of(g, m)}, {sign}")
        g.set_int(d, g.op(f"select i1 {isnan}, i32 2147483647, i32 {r}"), 32)

    return Action(emit)


def division(op: Opcode) -> Action:
    """div: every form gives the correctly rounded quotient, .full too, and .approx unless the divisor is huge."""
    kind = op.type()
    if op.base != "div" or kind not in ("f32", "f64"):
        raise RefusedError("unsupported type")
    mode = op.pick("rn", "rz", "rm", "rp", "approx", "full")
    ftz = op.flag("ftz")
    quotient = _operation(op, kind, "div", "rn" if mode in ("approx", "full") else mode, ftz, False, False)
    if mode != "approx" or kind != "f32":
        return quotient

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands
        x, y = g.real(a, kind), g.real(b, kind)
        quotient.after(g, ins)
        # The reciprocal of a divisor above 2^126 would be subnormal, so it counts as zero.
        zero = g.op(f"bitcast i32 {g.op(f'and i32 {bits_of(g, y)}, -2147483648')} to float")
        huge = g.op(f"fcmp ogt float {plain(g, 'abs', [y], 'float')}, 0x47D0000000000000")
        r = g.op(f"select i1 {huge}, float {g.op(f'fmul float {x}, {zero}')}, float {g.real(d, kind)}")
        g.set_real(d, r, kind)

    return Action(emit)


@opcode("rcp", "sqrt")
def root(op: Opcode) -> Action:
    kind = op.type()
    if kind not in ("f32", "f64"):
        raise RefusedError(f"unsupported type .{kind}")
    mode = op.pick("rn", "rz", "rm", "rp", "approx")
    ftz = op.flag("ftz")
    return _operation(op, kind, op.base, "rn" if mode == "approx" else mode, ftz, False, False)


_LIBM = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}


@opcode("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def approximate(op: Opcode) -> Action:
    verb, kind = op.base, op.type()
    op.pick("approx")
    ftz = op.flag("ftz")

    def function(g: Emitter, x: str) -> str:
        if verb == "rsqrt":
            return g.op(f"fdiv double 1.0, {g.intrinsic('llvm.sqrt', 'double', x)}")
        name = g.helpers.declare(_LIBM[verb], "double", "double")
        return g.op(f"call double {name}(double {x})")

    if kind == "f64":
        if verb != "rsqrt":
            raise RefusedError("unsupported type .f64")

        def emit64(g: Emitter, ins: Instruction) -> None:
            x = g.real(ins.operands[1], "f64")
            r = flush64(g, function(g, flush64(g, x))) if ftz else function(g, x)
            g.set_real(ins.operands[0], r, "f64")

        return Action(emit64)
    if kind in HALVES:
        if verb not in ("ex2", "tanh"):
            raise RefusedError(f"unsupported type .{kind}")
        t = kind.removesuffix("x2")

        def half(g: Emitter, halves: list[str]) -> str:
            x = halves[0]
            if ftz:
                x = g.call(g.helpers.flush(t), "i16", f"i16 {x}")
            r = pack(g, "f64", t, "rn", bits_of(g, function(g, to_double(g, unpack(g, t, x))), "f64"))
            return g.call(g.helpers.flush(t), "i16", f"i16 {r}") if ftz else r

        return map_halves(kind, half)
    if kind != "f32":
        raise RefusedError(f"unsupported type .{kind}")

    def emit(g: Emitter, ins: Instruction) -> None:
        x = g.real(ins.operands[1], "f32")
        if ftz:
            x = flush(g, x)
        r = to_float(g, function(g, to_double(g, x)))
        g.set_real(ins.operands[0], flush(g, r) if ftz else r, "f32")

    return Action(emit)


@opcode("copysign")
def copysign(op: Opcode) -> Action:
    kind = op.type()
    if kind not in ("f32", "f64"):
        raise RefusedError(f"unsupported type .{kind}")
    n = width(kind)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands  # the sign of a, the magnitude of b
        top = -(1 << (n - 1))
        sign = g.op(f"and i{n} {g.word(a, n)}, {top}")
        g.set_int(d, g.op(f"or i{n} {sign}, {g.op(f'and i{n} {g.word(b, n)}, {~top}')}"), n)

    return Action(emit)


@opcode("testp")
def testp(op: Opcode) -> Action:
    verb = op.pick("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = op.type()
    if kind not in ("f32", "f64"):
        raise RefusedError(f"unsupported type .{kind}")
    n, f = width(kind), FORMATS[kind]

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        m = g.op(f"and i{n} {g.word(a, n)}, {(1 << (n - 1)) - 1}")
        least = 1 << f.mantissa
        if verb in ("normal", "subnormal"):
            base, size = (least, f.infinity - least) if verb == "normal" else (1, least - 1)
            p = g.op(f"icmp ult i{n} {g.op(f'sub i{n} {m}, {base}')}, {size}")
            if verb == "normal":  # to PTX, a zero is normal
                p = g.op(f"or i1 {p}, {g.op(f'icmp eq i{n} {m}, 0')}")
        else:
            test = {"finite": "ult", "infinite": "eq", "number": "ule", "notanumber": "ugt"}[verb]
            p = g.op(f"icmp {test} i{n} {m}, {f.infinity}")
        g.set_pred(d, p)

    return Action(emit)


# Comparison ---------------------------------------------------------------------------------------------------------
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
