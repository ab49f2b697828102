# SPDX-License-Identifier: Apache-2.0
"""Instructions that move fragments: wmma.load, wmma.store, ldmatrix, stmatrix and movmatrix.

Once all lanes have arrived at a wmma.load or wmma.store, each lane accesses the elements of its own registers. The
native library executes the other instructions for the whole warp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....ptx.fragments import WIDTHS, Fragment, of_wmma
from ....ptx.ir import Imm, Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode
from .access import state_space
from .matrix import BYTES, aligned, give, has, items, refuse, take, together, wmma_shape


# wmma ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Memory:
    """The layout of a fragment's elements in memory."""

    fragment: Fragment
    kind: str
    layout: str
    space: str
    flags: int

    def pieces(self) -> list[list[tuple[int, int, int]]]:
        """The contiguous pieces of memory of each register in lane 0, as (bytes, row, column), lowest bits first."""
        size, found = WIDTHS[self.kind] // 8, []
        step = (0, 1) if self.layout == "row" else (1, 0)
        for cells in self.fragment[0]:
            near = all((r + step[0], c + step[1]) == after for (r, c), after in itertools.pairwise(cells))
            found.append([(4, *cells[0])] if near else [(size, *cell) for cell in cells])
        return found

    def address(self, g: Emitter, base: Any, stride: Any) -> Callable[[int, int], str]:
        """A function that emits the address (i64) of an element of the executing lane, given the row and column of the
        element that lane 0 has in the same register. The address for lane l is that for lane 0 plus one stride times
        (l mod 4) plus another stride times (l div 4).
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
    aligned(op)
    layout = op.pick("row", "col")
    shape = wmma_shape(op)
    space, flags = state_space(op)
    kind = op.pick(*(("f16", "f32", "s32") if which in "cd" else ("f16", "bf16", "tf32", *BYTES)))
    has(shape, kind)
    return _Memory(of_wmma(which, shape, kind), kind, layout, space, flags)


def _stride(memory: _Memory, operands: tuple[Any, ...]) -> Any:
    """The stride between rows or columns: the optional last operand. If it is missing, the stride is that of a matrix
    without gaps.
    """
    if len(operands) > 2:
        return operands[2]
    cells = [cell for lane in memory.fragment for register in lane for cell in register]
    return Imm(1 + max(cell[memory.layout == "row"] for cell in cells), "int")


@opcode("wmma.load")
def wmma_load(op: Opcode) -> Action:
    refuse(op)
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

    return Action(after, before=lambda g, ins: together(g, ins), rereads=True, pure=False)


@opcode("wmma.store")
def wmma_store(op: Opcode) -> Action:
    refuse(op)
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

    return Action(after, before=lambda g, ins: together(g, ins), rereads=True, pure=False)


# Rows of shared memory ----------------------------------------------------------------------------------------------
def _rows(op: Opcode) -> tuple[int, Callable[[Emitter, Any], None]]:
    """The number of matrices that ldmatrix or stmatrix moves, and a function that emits the stores of the operands for
    the native library. The function takes the operand with the address.
    """
    op.pick("sync")
    op.pick("aligned")
    if {"m16n16", "m8n16", "m16n8"} & set(op.rest):
        raise RefusedError(f"{op.base} of 8-bit, 6-bit and 4-bit elements (sm_100a) is not supported")
    op.pick("m8n8")
    count = int(op.pick("x1", "x2", "x4")[1:])
    transposed = op.flag("trans")
    space, _ = state_space(op)
    if space not in ("", "shared"):
        raise RefusedError(f"{op.base} needs an address in shared memory or a generic one, not one in .{space}")
    op.pick("b16")

    def leave(g: Emitter, address: Any) -> None:
        g.put("op_addr", f"i64 {g.address(address, space)}")
        g.put("op_b", f"i32 {count}")
        g.put("op_c", f"i32 {int(transposed)}")

    return count, leave


@opcode("ldmatrix")
def ldmatrix(op: Opcode) -> Action:
    count, leave = _rows(op)

    def before(g: Emitter, ins: Instruction) -> int:
        give(g, ())
        leave(g, ins.operands[1])
        return together(g, ins, "mx_load_rows")

    return Action(lambda g, ins: take(g, items(ins.operands[0], count)), before=before, pure=False)


@opcode("stmatrix")
def stmatrix(op: Opcode) -> Action:
    count, leave = _rows(op)

    def before(g: Emitter, ins: Instruction) -> int:
        give(g, items(ins.operands[1], count))
        leave(g, ins.operands[0])
        return together(g, ins, "mx_store_rows")

    return Action(lambda g, ins: None, before=before, pure=False)


@opcode("movmatrix")
def movmatrix(op: Opcode) -> Action:
    for part in ("sync", "aligned", "m8n8", "trans", "b16"):
        op.pick(part)

    def before(g: Emitter, ins: Instruction) -> int:
        give(g, ins.operands[1:])
        return together(g, ins, "mx_transpose")

    return Action(lambda g, ins: take(g, ins.operands[:1]), before=before, pure=False)
