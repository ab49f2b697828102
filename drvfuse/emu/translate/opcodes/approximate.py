# SPDX-License-Identifier: Apache-2.0
"""Approximate functions: reciprocal square root, powers of 2, logarithms, sines, cosines and hyperbolic tangents. Each
result is computed in fp64, and rounded for a narrower type.
"""

from __future__ import annotations

from ....ptx.ir import Instruction
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode
from .halves import map_halves
from .real import HALVES, bits_of, flush, flush64, pack, to_double, to_float, unpack

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
