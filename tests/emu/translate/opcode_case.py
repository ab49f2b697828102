# SPDX-License-Identifier: Apache-2.0
"""A case of an opcode: its instruction, its operands and a reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from exact_numbers import FORMATS

COUNT = 48


class Case:
    """One instruction: a body that computes register r from x, y and z, the kinds of these registers, and a reference
    that computes the bits of r from theirs."""

    def __init__(self, body: str, sources: str, result: str, reference: Callable[..., int]):
        self.body, self.sources, self.result, self.reference = body, sources.split(), result, reference
        self.name = body.split(";")[0].split()[0]

    def ptx(self, name: str) -> str:
        out = [f".visible .entry {name}(" + ", ".join(f".param .u64 {name}_{i}" for i in range(4)) + ") {"]
        out += [".reg .b64 %p<4>; .reg .b64 %i<4>; .reg .pred p, q; .reg .b32 %t<4>; .reg .b64 %l<4>; .reg .b16 %h<4>;"]
        out += ["mov.u32 %t0, %tid.x; cvt.u64.u32 %i0, %t0;"]
        for register, kind, i in zip("xyz", self.sources, (1, 2, 3), strict=False):
            out.append(
                f".reg .{_register(kind)} {register}; {_address(name, i, kind)} "
                f"ld.global.{_memory(kind)} {register}, [%i1];"
            )
        out.append(f".reg .{_register(self.result)} r; {self.body}")
        out.append(f"{_address(name, 0, self.result)} st.global.{_memory(self.result)} [%i1], r; ret; }}")
        return "\n".join(out)


def bytes_of(kind: str) -> int:
    return FORMATS[kind][0] // 8 if kind in FORMATS else int(kind[1:]) // 8


def _register(kind: str) -> str:
    return kind if kind in ("f32", "f64") else f"b{max(16, 8 * bytes_of(kind))}"


def _memory(kind: str) -> str:
    return kind if kind in ("f32", "f64") else f"u{8 * bytes_of(kind)}"


def _address(name: str, index: int, kind: str) -> str:
    return f"ld.param.u64 %p1, [{name}_{index}]; mul.lo.s64 %i1, %i0, {bytes_of(kind)}; add.s64 %i1, %i1, %p1;"


def samples(kind: str, seed: int, count: int = COUNT) -> np.ndarray:
    """Return `count` operands as bits: edge values, random patterns and ordinary numbers, as the seed chooses."""
    rng = np.random.default_rng(seed)
    if kind in FORMATS:
        width, eb, mb = FORMATS[kind]
        top, bias = ((1 << eb) - 1) << mb, (1 << (eb - 1)) - 1
        one = bias << mb
        edges = [
            0,
            1,
            (1 << mb) - 1,
            1 << mb,
            one,
            one + 1,
            one - 1,
            one + (1 << mb) // 2,
            top - 1,
            top,
            top | 1 << (mb - 1),
        ]
        edges = [e & ((1 << (width - 1)) - 1) for e in edges]
        near = [
            int(x)
            for x in rng.integers(one - (6 << mb if eb > 4 else 1 << mb), one + (6 << mb if eb > 4 else 1 << mb), count)
        ]
        pool = edges + [e | 1 << (width - 1) for e in edges] + near + [n | 1 << (width - 1) for n in near[: count // 2]]
    else:
        width = int(kind[1:])
        m = (1 << width) - 1
        pool = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, m, m - 1, m >> 1, (m >> 1) + 1, 0x5A & m]
        pool += [int(x) & m for x in rng.integers(0, 40, count)]
    pool += [int.from_bytes(rng.bytes(width // 8), "little") for _ in range(count)]
    rng.shuffle(pool)
    return np.array(pool[:count], f"u{width // 8}")


def corners(kind: str) -> list[int]:
    """Values of which every pair is tried: zeros, the least and largest ones, NaN; of both signs."""
    if kind not in FORMATS:
        n = int(kind[1:])
        return [0, 1, n - 1, (1 << n - 1) - 1, 1 << n - 1, (1 << n) - 1]
    n, eb, mb = FORMATS[kind]
    positive = [0, 1, ((1 << (eb - 1)) - 1) << mb, ((1 << eb) - 1) << mb, (1 << n - 1) - 1]
    return positive + [x | 1 << n - 1 for x in positive]
