# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions of a warp: mma, wmma, ldmatrix, stmatrix, movmatrix.

Every lane of the warp has to come to the same instruction. Then a function of the native library `matrix` does what
they do together, on the registers that they have left in their exchange areas. Only wmma.load and wmma.store are done
by each lane alone, once all have come: they are ordinary accesses to the elements of its registers.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....ptx.fragments import LANES, WIDTHS, Fragment, Shape, of_mma, of_wmma, quads
from ....ptx.ir import Imm, Instruction, Vec
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode
from .memory import state_space

_ALL = 0xFFFFFFFF
_HALVES = ("f16", "f32")
_FP8 = ("e4m3", "e5m2")
_BYTES = ("u8", "s8")

# Shapes of mma by the type of A.
_MMA_SHAPES = {
    "f16": ("m8n8k4", "m16n8k8", "m16n8k16"),
    "bf16": ("m16n8k8", "m16n8k16"),
    "tf32": ("m16n8k4", "m16n8k8"),
    **dict.fromkeys(_FP8, ("m16n8k16", "m16n8k32")),
    **dict.fromkeys(_BYTES, ("m8n8k16", "m16n8k16", "m16n8k32")),
}
_WMMA_SHAPES = ("m16n16k16", "m32n8k16", "m8n32k16")
_REFUSED = {
    "sp": "sparse operands", "sp::ordered_metadata": "sparse operands", "f64": "fp64 operands", "b1": "1-bit operands",
    "u4": "4-bit operands", "s4": "4-bit operands",
}  # fmt: skip


def _refuse(op: Opcode) -> None:
    for part in op.rest:
        if part in _REFUSED:
            raise RefusedError(f"{op.base} of {_REFUSED[part]} is not supported")
        if part.startswith("kind::"):
            raise RefusedError(f"{op.base} with .{part} (sm_120a) is not supported")


def items(operand: Any, count: int) -> tuple[Any, ...]:
    """The registers of a fragment; a single one may stand without braces."""
    found = operand.items if isinstance(operand, Vec) else (operand,)
    if len(found) != count:
        raise RefusedError(f"a fragment of {count} register(s) is expected")
    return tuple(found)


def _together(g: Emitter, ins: Instruction, function: str | None) -> int:
    """Suspend until all lanes have come and `function` has done its work."""
    g.put("op_value", f"i64 {g.library(function) if function else 0}")
    g.put("op_mask", f"i32 {_ALL - (1 << 32)}")
    return g.suspend(ins, abi.Status.WARPOP, abi.WarpOp.MATRIX)


def _give(g: Emitter, registers: tuple[Any, ...]) -> None:
    """Leave registers in the lane's exchange area."""
    at = g.exchange()
    g.put("op_a", f"i32 {at}")
    for i, register in enumerate(registers):
        g.put(at + 4 * i, f"i32 {g.word(register, 32)}")


def _take(g: Emitter, registers: tuple[Any, ...]) -> None:
    for i, register in enumerate(registers):
        g.set_int(register, g.get(g.exchange() + 4 * i, "i32"), 32)


# Products -----------------------------------------------------------------------------------------------------------
def _distinct(fragment: Fragment) -> Fragment:
    """Without the registers that repeat earlier ones."""
    count = len(dict.fromkeys(fragment[0]))
    return tuple(lane[:count] for lane in fragment)


def _product(
    shape: Shape, kinds: tuple[str, ...], fragments: tuple[Fragment, ...], method: abi.MatrixMethod, steps: int
) -> bytes:
    """`structs.Product` and the tables behind it."""
    numbers = [shape.m, shape.n, shape.k, quads(shape), int(method), steps]
    numbers += [int(abi.MatrixKind[kind.upper()]) for kind in kinds]
    numbers += [len(fragment[0]) for fragment in fragments]
    table: list[int] = []
    for which, fragment in zip("abcd", fragments, strict=True):
        rows, columns = shape.of(which)
        for lane in range(LANES):
            first = rows * columns * (lane % 16 // 4) if quads(shape) == 4 else 0
            for row, column in (cell for register in fragment[lane] for cell in register):
                if which == "a":
                    place = row * columns + _order(column, columns, method)
                elif which == "b":
                    place = column * rows + _order(row, rows, method)
                else:
                    place = row * columns + column
                table.append(first + place)
    return struct.pack(f"<{len(numbers)}I{len(table)}H", *numbers, *table)


def _order(k: int, count: int, method: abi.MatrixMethod) -> int:
    """Where element k of a row of A is put. An FP8 product takes the lower two of each four in its first step."""
    if method is not abi.MatrixMethod.FP8:
        return k
    return k // 4 * 2 + k % 2 + (count // 2 if k % 4 >= 2 else 0)


def _multiply(
    shape: Shape, kinds: tuple[str, ...], fragments: tuple[Fragment, ...], saturated: bool = False, steps: int = 1
) -> Action:
    if kinds[0] in _BYTES:
        method = abi.MatrixMethod.SATURATED if saturated else abi.MatrixMethod.INTEGER
    elif quads(shape) == 4:
        method = abi.MatrixMethod.CHAIN
    elif kinds[0] in _FP8:
        method, steps = abi.MatrixMethod.FP8, 2
    else:
        method = abi.MatrixMethod.TENSOR
    read = tuple(_distinct(fragment) for fragment in fragments)
    data = _product(shape, kinds, read, method, steps)

    def before(g: Emitter, ins: Instruction) -> int:
        given = [items(x, len(f[0]))[: len(r[0])] for x, f, r in zip(ins.operands[1:], fragments, read, strict=False)]
        _give(g, tuple(register for fragment in given for register in fragment))
        g.put("op_addr", f"i64 ptrtoint (ptr {g.unit.constant(data)} to i64)")
        return _together(g, ins, "mx_multiply")

    def after(g: Emitter, ins: Instruction) -> None:
        _take(g, items(ins.operands[0], len(fragments[3][0])))

    return Action(after, before=before, pure=False)


def _typed(op: Opcode, count: int) -> list[str]:
    return [op.pick(*(kind.name.lower() for kind in abi.MatrixKind)) for _ in range(count)]


@opcode("mma")
def mma(op: Opcode) -> Action:
    _refuse(op)
    op.pick("sync")
    op.pick("aligned")
    name = op.pick(*{shape for shapes in _MMA_SHAPES.values() for shape in shapes})
    shape = Shape.parse(name)
    rows_first = [op.pick("row", "col") for _ in range(2)]
    saturated = op.flag("satfinite")
    d, a, b, c = _typed(op, 4)
    if name not in _MMA_SHAPES.get(a, ()):
        raise RefusedError(f"mma of shape .{name} has no operands of type .{a}")
    alike = a in _FP8 and b in _FP8 or a in _BYTES and b in _BYTES or a == b
    both = {"f16": _HALVES, **dict.fromkeys(_FP8, _HALVES), **dict.fromkeys(_BYTES, ("s32",))}.get(a, ("f32",))
    mixed = quads(shape) == 4 and (c, d) == ("f16", "f32")
    if not alike or c not in both or d not in both or (c != d and not mixed) or (saturated and a not in _BYTES):
        raise RefusedError(f"mma has no combination .{d}.{a}.{b}.{c}{'.satfinite' if saturated else ''}")
    if quads(shape) == 1 and rows_first != ["row", "col"]:
        raise RefusedError(f"the modifiers .row.col are expected of shape .{name}")
    layouts = {"a": rows_first[0], "b": rows_first[1]}
    kinds = (a, b, c, d)
    fragments = tuple(of_mma(w, shape, k, layouts.get(w, "")) for w, k in zip("abcd", kinds, strict=True))
    return _multiply(shape, kinds, fragments, saturated)


# wmma ---------------------------------------------------------------------------------------------------------------
def _wmma_shape(op: Opcode) -> Shape:
    return Shape.parse(op.pick(*_WMMA_SHAPES, "m16n16k8"))


def _has(shape: Shape, *kinds: str) -> None:
    """Refuse element types of A, B and C that a shape does not have."""
    for kind in kinds:
        allowed = ("tf32", "f32") if shape.k == 8 else ("f16", "bf16", "f32", "s32", *_BYTES)
        if kind not in allowed:
            raise RefusedError(f"wmma of shape .{shape} has no elements of type .{kind}")


@opcode("wmma.mma")
def wmma_mma(op: Opcode) -> Action:
    _refuse(op)
    for part in ("mma", "sync", "aligned"):
        op.pick(part)
    for _ in range(2):
        op.pick("row", "col")
    shape = _wmma_shape(op)
    saturated = op.flag("satfinite")
    count = len(op.rest)
    types = _typed(op, count)
    if count == 2:  # fp16 does not name the types of A and B
        (d, c), a, b = types, "f16", "f16"
        right = c in _HALVES and d in _HALVES
    elif count == 4:
        d, a, b, c = types
        right = a == b and ((a in _BYTES and c == d == "s32") or (a in ("bf16", "tf32") and c == d == "f32"))
    else:
        raise RefusedError("two or four types are expected")
    if not right or (saturated and a not in _BYTES):
        raise RefusedError(f"wmma.mma has no combination .{'.'.join(types)}{'.satfinite' if saturated else ''}")
    kinds = (a, b, c, d)
    _has(shape, *kinds)
    fragments = tuple(of_wmma(w, shape, k) for w, k in zip("abcd", kinds, strict=True))
    return _multiply(shape, kinds, fragments, saturated, steps=2 if a == "tf32" else 1)


@dataclass(frozen=True)
class _Memory:
    """Where a fragment's elements lie in memory."""

    fragment: Fragment  # without registers that repeat others
    kind: str
    layout: str
    space: str
    flags: int

    def pieces(self) -> list[list[tuple[int, int, int]]]:
        """Of each register in lane 0, lowest bits first, its pieces that are contiguous: (bytes, row, column)."""
        size, found = WIDTHS[self.kind] // 8, []
        step = (0, 1) if self.layout == "row" else (1, 0)
        for cells in self.fragment[0]:
            near = all((r + step[0], c + step[1]) == after for (r, c), after in itertools.pairwise(cells))
            found.append([(4, *cells[0])] if near else [(size, *cell) for cell in cells])
        return found

    def address(self, g: Emitter, base: Any, stride: Any) -> Callable[[int, int], str]:
        """The address (i64) of an element by its row and column in lane 0. A lane's elements lie a step for its number
        modulo four, and another one for its number by four, from those of lane 0.
        """
        size = WIDTHS[self.kind] // 8
        apart = g.op(f"mul i64 {g.op(f'zext i32 {g.word(stride, 32)} to i64')}, {size}")
        lane = g.op(f"zext i32 {g.get('lane', 'i32')} to i64")
        rows, columns = (apart, str(size)) if self.layout == "row" else (str(size), apart)

        def off(start: str, row: str | int, column: str | int) -> str:
            for count, bytes_ in ((row, rows), (column, columns)):
                if count:
                    start = g.op(f"add i64 {start}, {g.op(f'mul i64 {count}, {bytes_}')}")
            return start

        start = g.address(base, self.space)
        (row, column), lanes = self.fragment[0][0][0], self.fragment
        for divided, other in (("urem", 1), ("udiv", 4)):
            (r, c), number = lanes[other][0][0], g.op(f"{divided} i64 {lane}, 4")
            start = off(start, *(g.op(f"mul i64 {number}, {x}") if x else 0 for x in (r - row, c - column)))
        return lambda row, column: off(start, row, column)


def _memory(op: Opcode, which: str) -> _Memory:
    op.pick("load" if which in "abc" else "store")
    op.pick(which)
    op.pick("sync")
    op.pick("aligned")
    layout = op.pick("row", "col")
    shape = _wmma_shape(op)
    space, flags = state_space(op)
    kind = op.pick(*(("f16", "f32", "s32") if which in "cd" else ("f16", "bf16", "tf32", *_BYTES)))
    _has(shape, kind)
    return _Memory(of_wmma(which, shape, kind), kind, layout, space, flags)


def _stride(memory: _Memory, operands: tuple[Any, ...]) -> Any:
    """The optional last operand; without it, rows (or columns) follow one another."""
    if len(operands) > 2:
        return operands[2]
    cells = [cell for lane in memory.fragment for register in lane for cell in register]
    return Imm(1 + max(cell[memory.layout == "row"] for cell in cells), "int")


@opcode("wmma.load")
def wmma_load(op: Opcode) -> Action:
    _refuse(op)
    memory = _memory(op, next((part for part in op.rest if part in ("a", "b", "c")), "a"))
    distinct = len(dict.fromkeys(memory.fragment[0]))

    def after(g: Emitter, ins: Instruction) -> None:
        registers = items(ins.operands[0], len(memory.fragment[0]))
        address = memory.address(g, ins.operands[1], _stride(memory, ins.operands))
        words = []
        for pieces in memory.pieces()[:distinct]:
            word = "0"
            for i, (size, row, column) in enumerate(pieces):
                at = address(row, column)
                g.check(at, size, memory.flags, ins)
                n = 8 * size
                part = g.op(f"load i{n}, ptr {g.op(f'inttoptr i64 {at} to ptr')}, align {size}")
                if n < 32:
                    part = g.op(f"shl i32 {g.op(f'zext i{n} {part} to i32')}, {n * i}")
                    part = g.op(f"or i32 {word}, {part}")
                word = part
            words.append(word)
        for i, register in enumerate(registers):
            g.set_int(register, words[i % distinct], 32)

    return Action(after, before=lambda g, ins: _together(g, ins, None), rereads=True, pure=False)


@opcode("wmma.store")
def wmma_store(op: Opcode) -> Action:
    _refuse(op)
    memory = _memory(op, "d")

    def after(g: Emitter, ins: Instruction) -> None:
        registers = items(ins.operands[1], len(memory.fragment[0]))
        address = memory.address(g, ins.operands[0], _stride(memory, ins.operands))
        for register, pieces in zip(registers, memory.pieces(), strict=True):
            word = g.word(register, 32)
            for i, (size, row, column) in enumerate(pieces):
                at, n = address(row, column), 8 * size
                g.check(at, size, memory.flags | abi.Access.WRITE, ins)
                part = word if n == 32 else g.op(f"trunc i32 {g.op(f'lshr i32 {word}, {n * i}')} to i{n}")
                g.do(f"store i{n} {part}, ptr {g.op(f'inttoptr i64 {at} to ptr')}, align {size}")

    return Action(after, before=lambda g, ins: _together(g, ins, None), rereads=True, pure=False)


# Rows of shared memory ----------------------------------------------------------------------------------------------
def _rows(op: Opcode) -> tuple[int, bool, int]:
    """(matrices, transposed, flags of the access)."""
    op.pick("sync")
    op.pick("aligned")
    if "m16n16" in op.rest or "m8n16" in op.rest or "m16n8" in op.rest:
        raise RefusedError(f"{op.base} of 8-bit, 6-bit and 4-bit elements (sm_100a) is not supported")
    op.pick("m8n8")
    count = int(op.pick("x1", "x2", "x4")[1:])
    transposed = op.flag("trans")
    space, _ = state_space(op)
    if space not in ("", "shared"):
        raise RefusedError(f"{op.base} accesses shared memory")
    op.pick("b16")
    return count, transposed, int(abi.Space.SHARED) << abi.SPACE_SHIFT


def _row_operands(g: Emitter, address: Any, space: str, count: int, transposed: bool, flags: int) -> None:
    g.put("op_addr", f"i64 {g.address(address, space)}")
    g.put("op_b", f"i32 {count}")
    g.put("op_c", f"i32 {int(transposed)}")
    g.put("op_size", f"i32 {flags}")


@opcode("ldmatrix")
def ldmatrix(op: Opcode) -> Action:
    space = "shared" if any(part.startswith("shared") for part in op.rest) else ""
    count, transposed, flags = _rows(op)

    def before(g: Emitter, ins: Instruction) -> int:
        _give(g, ())
        _row_operands(g, ins.operands[1], space, count, transposed, flags)
        return _together(g, ins, "mx_load_rows")

    return Action(lambda g, ins: _take(g, items(ins.operands[0], count)), before=before, pure=False)


@opcode("stmatrix")
def stmatrix(op: Opcode) -> Action:
    space = "shared" if any(part.startswith("shared") for part in op.rest) else ""
    count, transposed, flags = _rows(op)

    def before(g: Emitter, ins: Instruction) -> int:
        _give(g, items(ins.operands[1], count))
        _row_operands(g, ins.operands[0], space, count, transposed, flags)
        return _together(g, ins, "mx_store_rows")

    return Action(lambda g, ins: None, before=before, pure=False)


@opcode("movmatrix")
def movmatrix(op: Opcode) -> Action:
    for part in ("sync", "aligned", "m8n8", "trans", "b16"):
        op.pick(part)

    def before(g: Emitter, ins: Instruction) -> int:
        _give(g, ins.operands[1:])
        return _together(g, ins, "mx_transpose")

    return Action(lambda g, ins: _take(g, ins.operands[:1]), before=before, pure=False)
