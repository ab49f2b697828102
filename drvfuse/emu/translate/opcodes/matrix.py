# SPDX-License-Identifier: Apache-2.0
"""The matrix products mma and wmma.mma, and functions that all matrix instructions use.

All lanes of the warp suspend at the same instruction. A function of the native library `matrix` then executes the
instruction for the whole warp. It reads the registers of each lane from the exchange area of the lane's frame, where
the lane has stored them.
"""

from __future__ import annotations

import struct
from typing import Any

from ....ptx.fragments import LANES, Fragment, Shape, of_mma, of_wmma, quads
from ....ptx.ir import Instruction, Vec
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode

_ALL = 0xFFFFFFFF
_HALVES = ("f16", "f32")
_FP8 = ("e4m3", "e5m2")
BYTES = ("u8", "s8")

# The shapes of mma, by the type of A.
_MMA_SHAPES = {
    "f16": ("m8n8k4", "m16n8k8", "m16n8k16"),
    "bf16": ("m16n8k8", "m16n8k16"),
    "tf32": ("m16n8k4", "m16n8k8"),
    **dict.fromkeys(_FP8, ("m16n8k16", "m16n8k32")),
    **dict.fromkeys(BYTES, ("m8n8k16", "m16n8k16", "m16n8k32")),
}
_WMMA_SHAPES = ("m16n16k16", "m32n8k16", "m8n32k16")


def refuse(op: Opcode) -> None:
    for part in op.rest:
        if part.startswith("kind::"):
            raise RefusedError(f"{op.base} with .{part} (sm_120a) is not supported")


def items(operand: Any, count: int) -> tuple[Any, ...]:
    """The registers of a fragment. A single register may be written without braces."""
    found = operand.items if isinstance(operand, Vec) else (operand,)
    if len(found) != count:
        raise RefusedError(f"a fragment of {count} register(s) is expected")
    return tuple(found)


def together(g: Emitter, ins: Instruction, function: str | None = None) -> int:
    """Emit code that suspends the thread until all lanes have arrived and `function`, if given, has run for them."""
    g.put("op_value", f"i64 {g.library(function) if function else 0}")
    g.put("op_mask", f"i32 {_ALL - (1 << 32)}")
    return g.suspend(ins, abi.Status.WARPOP, abi.WarpOp.MATRIX)


def give(g: Emitter, registers: tuple[Any, ...]) -> None:
    """Emit stores of registers to the lane's exchange area in its frame, where the native library reads them."""
    assert len(registers) <= abi.EXCHANGE_WORDS
    at = g.exchange()
    g.put("op_a", f"i32 {at}")
    for i, register in enumerate(registers):
        g.put(at + 4 * i, f"i32 {g.word(register, 32)}")


def take(g: Emitter, registers: tuple[Any, ...]) -> None:
    for i, register in enumerate(registers):
        g.set_int(register, g.get(g.exchange() + 4 * i, "i32"), 32)


# Products -----------------------------------------------------------------------------------------------------------
def _distinct(fragment: Fragment) -> Fragment:
    """The registers of a fragment without those that repeat earlier ones."""
    count = len(dict.fromkeys(fragment[0]))
    return tuple(lane[:count] for lane in fragment)


def _product(
    shape: Shape, kinds: tuple[str, ...], fragments: tuple[Fragment, ...], method: abi.MatrixMethod, steps: int
) -> bytes:
    """The bytes of a `structs.Product` and of the tables that follow it."""
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
    """The position of element k of a row of A in the order in which the elements are multiplied. The row has `count`
    elements. The FP8 method has two steps: elements 0 and 1 of every four are multiplied in the first step, elements 2
    and 3 in the second. The other methods multiply in the order of k.
    """
    if method is not abi.MatrixMethod.FP8:
        return k
    return k // 4 * 2 + k % 2 + (count // 2 if k % 4 >= 2 else 0)


def _multiply(
    shape: Shape, kinds: tuple[str, ...], fragments: tuple[Fragment, ...], saturated: bool = False, steps: int = 1
) -> Action:
    if kinds[0] in BYTES:
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
        give(g, tuple(register for fragment in given for register in fragment))
        g.put("op_addr", f"i64 ptrtoint (ptr {g.unit.constant(data)} to i64)")
        return together(g, ins, "mx_multiply")

    def after(g: Emitter, ins: Instruction) -> None:
        take(g, items(ins.operands[0], len(fragments[3][0])))

    return Action(after, before=before, pure=False)


def _typed(op: Opcode, count: int) -> list[str]:
    return [op.pick(*(kind.name.lower() for kind in abi.MatrixKind)) for _ in range(count)]


@opcode("mma")
def mma(op: Opcode) -> Action:
    refuse(op)
    op.pick("sync")
    op.pick("aligned")
    name = op.pick(*{shape for shapes in _MMA_SHAPES.values() for shape in shapes})
    shape = Shape.parse(name)
    rows_first = [op.pick("row", "col") for _ in range(2)]
    saturated = op.flag("satfinite")
    d, a, b, c = _typed(op, 4)
    if name not in _MMA_SHAPES.get(a, ()):
        raise RefusedError(f"mma of shape .{name} has no operands of type .{a}")
    alike = a in _FP8 and b in _FP8 or a in BYTES and b in BYTES or a == b
    both = {"f16": _HALVES, **dict.fromkeys(_FP8, _HALVES), **dict.fromkeys(BYTES, ("s32",))}.get(a, ("f32",))
    mixed = quads(shape) == 4 and (c, d) == ("f16", "f32")
    if not alike or c not in both or d not in both or (c != d and not mixed) or (saturated and a not in BYTES):
        raise RefusedError(f"mma has no combination .{d}.{a}.{b}.{c}{'.satfinite' if saturated else ''}")
    if quads(shape) == 1 and rows_first != ["row", "col"]:
        raise RefusedError(f"mma of shape .{name} needs the modifiers .row.col")
    layouts = {"a": rows_first[0], "b": rows_first[1]}
    kinds = (a, b, c, d)
    fragments = tuple(of_mma(w, shape, k, layouts.get(w, "")) for w, k in zip("abcd", kinds, strict=True))
    return _multiply(shape, kinds, fragments, saturated)


# wmma ---------------------------------------------------------------------------------------------------------------
def aligned(op: Opcode) -> None:
    op.pick("sync")
    op.flag("aligned")  # optional before PTX 6.3


def wmma_shape(op: Opcode) -> Shape:
    return Shape.parse(op.pick(*_WMMA_SHAPES, "m16n16k8"))


def has(shape: Shape, *kinds: str) -> None:
    """Refuse element types of A, B and C that a shape does not have."""
    for kind in kinds:
        allowed = ("tf32", "f32") if shape.k == 8 else ("f16", "bf16", "f32", "s32", *BYTES)
        if kind not in allowed:
            raise RefusedError(f"wmma of shape .{shape} has no elements of type .{kind}")


@opcode("wmma.mma")
def wmma_mma(op: Opcode) -> Action:
    refuse(op)
    op.pick("mma")
    aligned(op)
    for _ in range(2):
        op.pick("row", "col")
    shape = wmma_shape(op)
    saturated = op.flag("satfinite")
    count = len(op.rest)
    types = _typed(op, count)
    if count == 2:  # if A and B are fp16, the opcode names only the types of D and C
        (d, c), a, b = types, "f16", "f16"
        right = c in _HALVES and d in _HALVES
    elif count == 4:
        d, a, b, c = types
        right = a == b and ((a in BYTES and c == d == "s32") or (a in ("bf16", "tf32") and c == d == "f32"))
    else:
        raise RefusedError("two or four types are expected")
    if not right or (saturated and a not in BYTES):
        raise RefusedError(f"wmma.mma has no combination .{'.'.join(types)}{'.satfinite' if saturated else ''}")
    kinds = (a, b, c, d)
    has(shape, *kinds)
    fragments = tuple(of_wmma(w, shape, k) for w, k in zip("abcd", kinds, strict=True))
    return _multiply(shape, kinds, fragments, saturated, steps=2 if a == "tf32" else 1)
