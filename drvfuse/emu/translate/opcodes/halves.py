# SPDX-License-Identifier: Apache-2.0
"""Operations on fp16 and bf16 values and pairs of them. They are computed in fp32 or double and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import Instruction
from ..emitter import Emitter
from ..formats import FORMATS
from ..opcode import Action
from .real import bits_of, flush_tiny, pack, plain, saturate, to_double, unpack

Compute = Callable[[Emitter, list[str]], str]


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
            # Rounding the fp32 sum or product again gives the result of rounding the exact sum or product once.
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
