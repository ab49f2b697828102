# SPDX-License-Identifier: Apache-2.0
"""The fragments of `mma` and `wmma`: which lane of a warp holds which elements of a matrix, in which register.

`fragment[lane][register]` are the (row, column) pairs of the elements in that lane's register, lowest bits first. The
layouts of `mma` are documented in the PTX manual. The manual leaves the layouts of `wmma` open; those here are the
layouts of an H200, on which a fragment of `wmma` consists of fragments of `mma`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

LANES = 32
WIDTHS = {
    "f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "u8": 8, "s8": 8, "f32": 32, "s32": 32, "b16": 16,
}  # fmt: skip

Register = tuple[tuple[int, int], ...]
Fragment = tuple[tuple[Register, ...], ...]


@dataclass(frozen=True)
class Shape:
    """The sizes of A [m, k], B [k, n], C and D [m, n]."""

    m: int
    n: int
    k: int

    @staticmethod
    def parse(text: str) -> Shape:
        """The shape that a text such as "m16n8k16" names."""
        m, _, rest = text[1:].partition("n")
        n, _, k = rest.partition("k")
        return Shape(int(m), int(n), int(k))

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"

    def of(self, which: str) -> tuple[int, int]:
        """How many rows and columns matrix "a", "b", "c" or "d" has."""
        return {"a": (self.m, self.k), "b": (self.k, self.n)}.get(which, (self.m, self.n))


def quads(shape: Shape) -> int:
    """The number of products that an instruction of this shape computes: m8n8k4 computes four, each in eight lanes."""
    return 4 if shape == Shape(8, 8, 4) else 1


@functools.cache
def of_mma(which: str, shape: Shape, kind: str, layout: str = "") -> Fragment:
    """The fragment of matrix `which` ("a" to "d") of `mma`, whose elements are of type `kind`.

    `layout` ("row" or "col") matters only for m8n8k4, which computes four products: lanes 4 q .. 4 q + 3 and 16 + 4 q
    .. 16 + 4 q + 3 hold the matrices of product q. For other shapes A is row-major and B column-major.
    """
    if quads(shape) == 4:
        return tuple(_quad_pair(which, kind, layout, lane) for lane in range(LANES))
    rows, columns = shape.of(which)
    count = 32 // WIDTHS[kind]  # elements in one register
    if which in ("c", "d"):
        return tuple(tuple(_accumulators(rows, kind, lane)) for lane in range(LANES))
    found = []
    for lane in range(LANES):
        group, member = divmod(lane, 4)
        registers: list[Register] = []
        along, across = (columns, rows) if which == "a" else (rows, columns)
        for k in range(0, along, 4 * count):
            for other in range(0, across, 8):
                cells = [(other + group, k + member * count + e) for e in range(count)]
                registers.append(tuple(cells if which == "a" else [(c, r) for r, c in cells]))
        found.append(tuple(registers))
    return tuple(found)


def _accumulators(rows: int, kind: str, lane: int) -> list[Register]:
    """The registers of a lane for an accumulator with eight columns. From every eight rows, the lane has two adjacent
    elements, which lie in one row.
    """
    group, member = divmod(lane, 4)
    pairs = [[(top + group, 2 * member + e) for e in range(2)] for top in range(0, rows, 8)]
    return [tuple(pair) for pair in pairs] if WIDTHS[kind] == 16 else [(cell,) for pair in pairs for cell in pair]


def _quad_pair(which: str, kind: str, layout: str, lane: int) -> tuple[Register, ...]:
    high, near = 4 * (lane >= 16), lane % 4
    cells: list[tuple[int, int]]
    if which == "a":
        cells = [(near + high, i) if layout == "row" else (i + high, near) for i in range(4)]
    elif which == "b":
        cells = [(near, i + high) if layout == "row" else (i, near + high) for i in range(4)]
    elif kind == "f16":
        cells = [(near + high, i) for i in range(8)]
    else:
        cells = [((lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1)) for i in range(8)]
    count = 32 // WIDTHS[kind]
    return tuple(tuple(cells[i : i + count]) for i in range(0, len(cells), count))


@functools.cache
def of_wmma(which: str, shape: Shape, kind: str) -> Fragment:
    """The fragment of matrix `which` of `wmma`, which is the same for both layouts in memory.

    It consists of m16n8 fragments, one for each 16 rows and 8 columns of the result. An fp16 fragment of A or B has
    eight registers: if its elements fill fewer registers, the filled registers are repeated, and instructions read only
    their first copy. m8n32 is the transpose of m32n8.
    """
    if shape.m == 8:
        other = of_wmma({"a": "b", "b": "a"}.get(which, which), Shape(shape.n, shape.m, shape.k), kind)
        return tuple(tuple(tuple((c, r) for r, c in register) for register in lane) for lane in other)
    tile = of_mma(which, Shape(16, 8, shape.k), kind)
    tops = range(0, shape.m, 16) if which != "b" else (0,)
    lefts = range(0, shape.n, 8) if which != "a" else (0,)
    found = []
    for lane in tile:
        registers = [
            tuple((r + top, c + left) for r, c in register) for top in tops for left in lefts for register in lane
        ]
        found.append(tuple(registers * (8 // len(registers) if kind == "f16" and which in "ab" else 1)))
    return tuple(found)
