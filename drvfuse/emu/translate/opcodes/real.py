# SPDX-License-Identifier: Apache-2.0
"""Operations on fp32 and fp64 values, from which the handlers of floating-point instructions are made.

LLVM's own instructions round to nearest even (IEEE, without contraction). An fp32 operation with a directed rounding is
computed in double and first rounded to odd (`helpers.odd`). Rounding this double to fp32 then gives the correctly
rounded result.
"""

from __future__ import annotations

from ..emitter import Emitter
from ..formats import FORMATS
from ..opcode import RefusedError, width

HALVES = ("f16", "f16x2", "bf16", "bf16x2")
KINDS = ("f32", "f64", *HALVES)


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
    """Flush `x`, an operand or result of an approximate fp64 function: a subnormal becomes 0, and the low 32 bits
    become 0.
    """
    bits = g.call(g.helpers.flush("f64"), "i64", f"i64 {bits_of(g, x, 'f64')}")
    bits = g.op(f"and i64 {bits}, {-1 << 32}")
    return g.op(f"bitcast i64 {bits} to double")


def flush_tiny(g: Emitter, kind: str, mode: str, result: str, unrounded: str, source: str) -> str:
    """Emit `.ftz` of a result, as on an H200. The result is flushed if the unrounded value, rounded to the precision of
    `kind` with unbounded exponent, is below the least normal number. `result` has the result as bits of the format
    `kind`, `unrounded` the unrounded value as bits of the format `source`.
    """
    n, m, f, s = FORMATS[kind].width, FORMATS[source].width, FORMATS[kind], FORMATS[source]
    magnitude = g.op(f"and i{m} {unrounded}, {(1 << (m - 1)) - 1}")
    least = (1 - f.bias + s.bias) << s.mantissa
    unit = 1 << s.mantissa - f.mantissa  # the distance between numbers in the precision of `kind`, as bits of `source`
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
    """min or max, with -0 < +0. If one operand is a NaN, the result is the other operand. With `nan`, the result is a
    NaN instead.
    """
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
    """Emit an fp32 operation in double, rounded to odd, and return the bits of the double. Rounding this double to fp32
    or to a narrower format, by any mode, gives the correctly rounded result.
    """
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
    """An fp32 operation, correctly rounded by rz, rm or rp."""
    return g.op(f"bitcast i32 {pack(g, 'f64', 'f32', mode, odd(g, verb, mode, v))} to float")


def directed_sum(g: Emitter, verb: str, mode: str, v: list[str]) -> str:
    """An fp64 sum or difference, correctly rounded by rz, rm or rp."""
    second = g.op(f"fneg double {v[1]}") if verb == "sub" else v[1]
    return g.call(g.helpers.add_directed(mode), "double", f"double {v[0]}", f"double {second}")


def directed64(g: Emitter, verb: str, mode: str, v: list[str]) -> str:
    """An fp64 operation, correctly rounded by rz, rm or rp."""
    if verb in ("add", "sub"):
        return directed_sum(g, verb, mode, v)
    operands = ["1.0", *v] if verb == "rcp" else v
    name = {"mul": "fmul", "mad": "fma", "div": "fdiv", "rcp": "fdiv"}.get(verb, verb)
    return g.call(g.helpers.rounded(name, mode), "double", *(f"double {x}" for x in operands))


def plain(g: Emitter, verb: str, v: list[str], ll: str, nan: bool = False) -> str:
    """An fp32 or fp64 operation, rounded to nearest even."""
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
