# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic: sums, products, quotients, roots, signs and classes of numbers."""

from __future__ import annotations

from ....ptx.ir import Instruction
from ..emitter import Emitter
from ..formats import FORMATS
from ..opcode import Action, Opcode, RefusedError, opcode, width
from .halves import half_operation, map_halves
from .real import (
    HALVES,
    KINDS,
    bits_of,
    directed,
    directed64,
    extremum,
    flush,
    flush64,
    flush_tiny,
    odd,
    plain,
    saturate,
)


def _operation(op: Opcode, kind: str, verb: str, mode: str, ftz: bool, sat: bool, nan: bool) -> Action:
    """An operation on fp32 or fp64 operands."""
    ll = "float" if kind == "f32" else "double"
    wrong = "sat" if sat else "ftz" if ftz and verb != "rcp" else None
    if kind == "f64" and wrong is not None:
        raise RefusedError(f"unsupported modifier .{wrong} of {verb}.f64")

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
    """`div`: every form gives the correctly rounded quotient, except .approx with a divisor above 2^126."""
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


@opcode("copysign")
def copysign(op: Opcode) -> Action:
    kind = op.type()
    if kind not in ("f32", "f64"):
        raise RefusedError(f"unsupported type .{kind}")
    n = width(kind)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, b = ins.operands  # the result has the sign of a and the magnitude of b
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
            if verb == "normal":  # in PTX, a zero counts as normal
                p = g.op(f"or i1 {p}, {g.op(f'icmp eq i{n} {m}, 0')}")
        else:
            test = {"finite": "ult", "infinite": "eq", "number": "ule", "notanumber": "ugt"}[verb]
            p = g.op(f"icmp {test} i{n} {m}, {f.infinity}")
        g.set_pred(d, p)

    return Action(emit)
