# SPDX-License-Identifier: Apache-2.0
"""The table of the forms of matrix instructions: the PTX of a warp, its input bytes, and its number of output bytes.

A form's body is PTX for one warp. It may use `%in` and `%out`, the addresses of the warp's input and output; `%me` and
`%to`, these addresses plus 4 * lane; `%lane`; `%near`, the address of SHARED bytes of shared memory; and `%mine`, that
address plus 4 * lane.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from drvfuse.ptx.fragments import LANES, WIDTHS, Shape, of_mma, of_wmma, quads

from .matrix_operands import MODES, tiles
from .operands import Stream

SHARED = 2048
MMA_WARPS, WMMA_WARPS, MOVE_WARPS = 6 * len(MODES), len(MODES), 4


@dataclass(frozen=True)
class MatrixForm:
    """One instruction form. `name` is its opcode; if several forms have this opcode, a space and a note follow."""

    name: str
    body: str
    warps: int
    in_bytes: int  # bytes of input per warp
    out_bytes: int
    fill: Callable[[MatrixForm], np.ndarray]  # makes the input bytes of all warps

    def inputs(self) -> np.ndarray:
        data = self.fill(self)
        assert data.dtype == np.uint8 and data.size == self.warps * self.in_bytes, self.name
        return data


def registers(which: str, kind: str, count: int) -> str:
    return f".reg .{'f32' if kind == 'f32' else 'b32'} {which}<{count}>;"


def braces(which: str, count: int) -> str:
    return "{" + ", ".join(f"{which}{i}" for i in range(count)) + "}"


def _load(which: str, kind: str, count: int, at: int) -> str:
    t = "f32" if kind == "f32" else "b32"
    loads = " ".join(f"ld.global.{t} {which}{i}, [%me+{at + 4 * LANES * i}];" for i in range(count))
    return f"{registers(which, kind, count)} {loads}"


def _store(which: str, kind: str, count: int, at: int = 0) -> str:
    t = "f32" if kind == "f32" else "b32"
    return " ".join(f"st.global.{t} [%to+{at + 4 * LANES * i}], {which}{i};" for i in range(count))


@functools.cache
def _cells(which: str, shape: Shape, kind: str, layout: str) -> tuple[np.ndarray, ...]:
    """(product, row, column) of the elements of a fragment: arrays [register, lane, element]."""
    cells = np.array(of_mma(which, shape, kind, layout)).swapaxes(0, 1)
    product = np.arange(LANES) % 16 // 4 * (quads(shape) == 4)
    return np.broadcast_to(product[:, None], cells.shape[:3]), cells[..., 0], cells[..., 1]


def packed(matrices: np.ndarray, which: str, shape: Shape, kind: str, layout: str = "") -> np.ndarray:
    """Pack matrices [warp, product, row, column] into the registers [warp, register, lane] of their fragments."""
    product, row, column = _cells(which, shape, kind, layout)
    elements = matrices[:, product, row, column] << np.arange(32 // WIDTHS[kind], dtype=np.uint64) * WIDTHS[kind]
    return np.bitwise_or.reduce(elements, -1)


def _mma(shape: Shape, layouts: tuple[str, str], kinds: tuple[str, str, str, str], extra: str = "") -> MatrixForm:
    """A form of mma. `kinds` are the element types of A, B, C and D."""
    a, b, c, d = kinds
    name = f"mma.sync.aligned.{shape}.{layouts[0]}.{layouts[1]}{extra}.{d}.{a}.{b}.{c}"
    layout = {"a": layouts[0], "b": layouts[1]}
    counts = {w: len(of_mma(w, shape, k, layout.get(w, ""))[0]) for w, k in zip("abcd", kinds, strict=True)}
    body, at = [], 0
    for which, kind in zip("abc", kinds, strict=False):
        body.append(_load(which, kind, counts[which], at))
        at += 4 * LANES * counts[which]
    body.append(registers("d", d, counts["d"]))
    body.append(f"{name} {', '.join(braces(w, counts[w]) for w in 'dabc')};")
    body.append(_store("d", d, counts["d"]))

    def fill(form: MatrixForm) -> np.ndarray:
        made = tiles(name, shape, (a, b, c), form.warps * quads(shape))
        out = []
        for i, (which, kind) in enumerate(zip("abc", (a, b, c), strict=True)):
            matrices = np.array([tile[i] for tile in made]).reshape(form.warps, quads(shape), *shape.of(which))
            out.append(packed(matrices, which, shape, kind, layout.get(which, "")).reshape(form.warps, -1))
        return np.concatenate(out, 1).reshape(-1).astype("<u4").view(np.uint8)

    return MatrixForm(name, "\n".join(body), MMA_WARPS // quads(shape), at, 4 * LANES * counts["d"], fill)


def _mma_forms() -> Iterator[MatrixForm]:
    both = (("f16", "f16"), ("f32", "f32"))
    for layouts in itertools.product(("row", "col"), repeat=2):
        for c, d in (*both, ("f16", "f32")):
            yield _mma(Shape(8, 8, 4), layouts, ("f16", "f16", c, d))
    row_col = ("row", "col")
    for k in (8, 16):
        for c, d in both:
            yield _mma(Shape(16, 8, k), row_col, ("f16", "f16", c, d))
        yield _mma(Shape(16, 8, k), row_col, ("bf16", "bf16", "f32", "f32"))
    for k in (4, 8):
        yield _mma(Shape(16, 8, k), row_col, ("tf32", "tf32", "f32", "f32"))
    for k in (16, 32):
        for a, b in itertools.product(("e4m3", "e5m2"), repeat=2):
            for c, d in both:
                yield _mma(Shape(16, 8, k), row_col, (a, b, c, d))
    for shape in (Shape(8, 8, 16), Shape(16, 8, 16), Shape(16, 8, 32)):
        for a, b in itertools.product(("u8", "s8"), repeat=2):
            for extra in ("", ".satfinite"):
                yield _mma(shape, row_col, (a, b, "s32", "s32"), extra)


# wmma ---------------------------------------------------------------------------------------------------------------
WMMA_SHAPES = (Shape(16, 16, 16), Shape(32, 8, 16), Shape(8, 32, 16))
_TF32 = Shape(16, 16, 8)


def _least(which: str, shape: Shape, layout: str) -> int:
    """The least stride of a matrix, in elements: that of rows or columns without gaps between them."""
    rows, columns = shape.of(which)
    return columns if layout == "row" else rows


def _random_bytes(form: MatrixForm) -> np.ndarray:
    return Stream("bytes " + form.name).words(form.warps * form.in_bytes // 8).astype("<u8").view(np.uint8)


def _wmma_load(which: str, shape: Shape, kind: str, layout: str, gap: int, space: str) -> MatrixForm:
    count, stride = len(of_wmma(which, shape, kind)[0]), _least(which, shape, layout) + gap
    rows, columns = shape.of(which)
    opcode = f"wmma.load.{which}.sync.aligned.{layout}.{shape}{space}.{kind}"
    lines = columns if layout == "col" else rows
    size = -(-lines * stride * WIDTHS[kind] // 8 // 64) * 64
    body = [registers("f", kind, count)]
    source = "%in"
    if space == ".shared":
        source = "%near"
        for at in range(0, size, 4 * LANES):
            body.append(f"ld.global.b32 %word, [%me+{at}]; st.shared.b32 [%mine+{at}], %word;")
        body.append("bar.warp.sync 0xFFFFFFFF;")
        size = -(-size // 128) * 128
    body.append(f"{opcode} {braces('f', count)}, [{source}], {stride};")
    body.append(_store("f", kind, count))
    if space == ".shared":
        body.append("bar.warp.sync 0xFFFFFFFF;")
    note = f"stride {stride}"
    return MatrixForm(f"{opcode} {note}", "\n".join(body), MOVE_WARPS, size, 4 * LANES * count, _random_bytes)


def _wmma_store(shape: Shape, kind: str, layout: str, gap: int, space: str) -> MatrixForm:
    count, stride = len(of_wmma("d", shape, kind)[0]), _least("d", shape, layout) + gap
    lines = shape.n if layout == "col" else shape.m
    opcode = f"wmma.store.d.sync.aligned.{layout}.{shape}{space}.{kind}"
    size = -(-lines * stride * WIDTHS[kind] // 8 // 128) * 128
    target = "%near" if space == ".shared" else "%out"
    body = [_load("f", kind, count, 0)]
    if space == ".shared":
        for at in range(0, size, 4 * LANES):
            body.append(f"st.shared.b32 [%mine+{at}], 0;")
        body.append("bar.warp.sync 0xFFFFFFFF;")
    body.append(f"{opcode} [{target}], {braces('f', count)}, {stride};")
    if space == ".shared":
        body.append("bar.warp.sync 0xFFFFFFFF;")
        for at in range(0, size, 4 * LANES):
            body.append(f"ld.shared.b32 %word, [%mine+{at}]; st.global.b32 [%to+{at}], %word;")
        body.append("bar.warp.sync 0xFFFFFFFF;")
    return MatrixForm(f"{opcode} stride {stride}", "\n".join(body), MOVE_WARPS, 4 * LANES * count, size, _random_bytes)


def _wmma_mma(shape: Shape, layouts: tuple[str, str], kinds: tuple[str, str, str, str], extra: str = "") -> MatrixForm:
    """A form of wmma.mma. Its body loads A, B and C before that instruction, and stores D by rows after it."""
    a, b, c, d = kinds
    types = f"{d}.{c}" if a == "f16" else f"{d}.{a}.{b}.{c}"
    opcode = f"wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{types}{extra}"
    layout = {"a": layouts[0], "b": layouts[1], "c": "row"}
    counts = {w: len(of_wmma(w, shape, k)[0]) for w, k in zip("abcd", kinds, strict=True)}
    body, at = [], 0
    for which, kind in zip("abc", kinds, strict=False):
        stride = _least(which, shape, layout[which])
        body.append(registers(which, kind, counts[which]))
        load = f"wmma.load.{which}.sync.aligned.{layout[which]}.{shape}.global.{kind}"
        body.append(f"{load} {braces(which, counts[which])}, [%in+{at}], {stride};")
        rows, columns = shape.of(which)
        at += rows * columns * WIDTHS[kind] // 8
    body.append(registers("d", d, counts["d"]))
    body.append(f"{opcode} {', '.join(braces(w, counts[w]) for w in 'dabc')};")
    body.append(f"wmma.store.d.sync.aligned.row.{shape}.global.{d} [%out], {braces('d', counts['d'])}, {shape.n};")

    def fill(form: MatrixForm) -> np.ndarray:
        out = []
        for tile in tiles(opcode, shape, (a, b, c), form.warps):
            for matrix, which, kind in zip(tile, "abc", (a, b, c), strict=True):
                ordered = matrix if layout[which] == "row" else matrix.T
                out.append(np.ascontiguousarray(ordered).astype(f"<u{WIDTHS[kind] // 8}").reshape(-1).view(np.uint8))
        return np.concatenate(out)

    return MatrixForm(opcode, "\n".join(body), WMMA_WARPS, at, shape.m * shape.n * WIDTHS[d] // 8, fill)


def _wmma_forms() -> Iterator[MatrixForm]:
    kinds = [(s, k) for s in WMMA_SHAPES for k in ("f16", "bf16", "u8", "s8")] + [(_TF32, "tf32")]
    for shape, kind in kinds:
        gap = 128 // WIDTHS[kind]  # strides are multiples of 16 bytes
        for which, layout in itertools.product("ab", ("row", "col")):
            yield _wmma_load(which, shape, kind, layout, 0, ".global")
            yield _wmma_load(which, shape, kind, layout, gap, ".shared")
    results = [(s, k) for s in WMMA_SHAPES for k in ("f16", "f32", "s32")] + [(_TF32, "f32")]
    for shape, kind in results:
        gap = 128 // WIDTHS[kind]
        for layout in ("row", "col"):
            yield _wmma_load("c", shape, kind, layout, 0, ".global")
            yield _wmma_load("c", shape, kind, layout, gap, ".shared")
            yield _wmma_store(shape, kind, layout, 0, ".shared")
            yield _wmma_store(shape, kind, layout, gap, ".global")
    for layouts in itertools.product(("row", "col"), repeat=2):
        for shape in WMMA_SHAPES:
            for c, d in itertools.product(("f16", "f32"), repeat=2):
                yield _wmma_mma(shape, layouts, ("f16", "f16", c, d))
            yield _wmma_mma(shape, layouts, ("bf16", "bf16", "f32", "f32"))
            for kind, extra in itertools.product(("u8", "s8"), ("", ".satfinite")):
                yield _wmma_mma(shape, layouts, (kind, kind, "s32", "s32"), extra)
        yield _wmma_mma(_TF32, layouts, ("tf32", "tf32", "f32", "f32"))


# Rows of shared memory ----------------------------------------------------------------------------------------------
def _rows_form(opcode: str, count: int, store: bool) -> MatrixForm:
    """ldmatrix or stmatrix, with the rows permuted in each warp w: lane l has the address of row (5 l + 3 w) % 32."""
    body = [".reg .b32 row; ld.global.b32 row, [%me]; add.u32 row, %near, row;"]
    if store:
        body.append(_load("f", "b16", count, 4 * LANES))
        body += [f"st.shared.b32 [%mine+{at}], 0;" for at in range(0, 512, 4 * LANES)]
    else:
        for at in range(0, 512, 4 * LANES):
            body.append(f"ld.global.b32 %word, [%me+{at + 4 * LANES}]; st.shared.b32 [%mine+{at}], %word;")
        body.append(registers("f", "b16", count))
    body.append("bar.warp.sync 0xFFFFFFFF;")
    if store:
        body.append(f"{opcode} [row], {braces('f', count)};")
        body.append("bar.warp.sync 0xFFFFFFFF;")
        for at in range(0, 512, 4 * LANES):
            body.append(f"ld.shared.b32 %word, [%mine+{at}]; st.global.b32 [%to+{at}], %word;")
    else:
        body.append(f"{opcode} {braces('f', count)}, [row];")
        body.append(_store("f", "b16", count))
    body.append("bar.warp.sync 0xFFFFFFFF;")

    def fill(form: MatrixForm) -> np.ndarray:
        out = []
        stream = Stream("rows " + form.name)
        for warp in range(form.warps):
            row = 16 * ((5 * np.arange(LANES) + 3 * warp) % LANES)
            out.append(row.astype("<u4").view(np.uint8))
            out.append(stream.words((form.in_bytes - 4 * LANES) // 8).astype("<u8").view(np.uint8))
        return np.concatenate(out)

    size = 4 * LANES * (1 + (count if store else 4))
    return MatrixForm(opcode, "\n".join(body), MOVE_WARPS, size, 512 if store else 4 * LANES * count, fill)


def _row_forms() -> Iterator[MatrixForm]:
    for count, trans in itertools.product((1, 2, 4), ("", ".trans")):
        yield _rows_form(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", count, False)
        yield _rows_form(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", count, True)
    opcode = "movmatrix.sync.aligned.m8n8.trans.b16"
    body = f"{_load('a', 'b16', 1, 0)} {registers('d', 'b16', 1)} {opcode} d0, a0; {_store('d', 'b16', 1)}"
    yield MatrixForm(opcode, body, MOVE_WARPS, 4 * LANES, 4 * LANES, _random_bytes)


@functools.cache
def table() -> tuple[MatrixForm, ...]:
    """All forms, in order. ValueError if two forms have the same name."""
    found = (*_mma_forms(), *_wmma_forms(), *_row_forms())
    twice = [name for name, count in Counter(f.name for f in found).items() if count > 1]
    if twice:
        raise ValueError(f"more than one form has the name {', '.join(twice)}")
    return found
