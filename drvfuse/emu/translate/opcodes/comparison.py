# SPDX-License-Identifier: Apache-2.0
"""Comparisons of floating-point values, and the results of the instruction `set`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..emitter import Emitter
from ..opcode import RefusedError, width
from .halves import join, lanes
from .real import HALVES, flush, unpack

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
