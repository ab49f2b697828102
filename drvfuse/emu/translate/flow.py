# SPDX-License-Identifier: Apache-2.0
"""Control-flow graph of one PTX function and liveness of its registers.

An instruction that suspends its thread is split in two: its block ends with the part before the suspension point, and a
new block, which is reached only when the thread is resumed, begins with the part after it. The registers that are live
at the start of the new block are kept in the frame.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...ptx.ir import NO_DESTINATION, Addr, Function, Instruction, Negated, Not, Pair, Part, Reg, Tuple, Vec
from .indirect import NO_FUNCTION


@dataclass(slots=True, eq=False)
class Block:
    """A basic block. If it begins with the part of an instruction after a suspension point, `resumed` is that
    instruction. If it ends with the part of an instruction before a suspension point, `suspended` is that instruction.

    `branch` is (register, negated) if the block ends with a conditional branch. `successors` are then (the block that
    follows if the branch is taken, the block that follows if it is not taken).
    """

    index: int
    instructions: list[Instruction] = field(default_factory=list)
    resumed: Instruction | None = None
    suspended: Instruction | None = None
    branch: tuple[Reg, bool] | None = None
    jump: Instruction | None = None  # a brx, whose table has the successors
    end: Instruction | None = None  # the branch or jump that ends the block
    successors: list[Block] = field(default_factory=list)
    live_in: int = 0
    live_out: int = 0


@dataclass(slots=True)
class Traits:
    """Whether an instruction has a suspension point (`suspends`), whether it reads its source registers again after
    that point (`rereads`), and whether it may be executed although its guard is false, if its result is then dropped
    (`pure`).
    """

    suspends: bool
    rereads: bool
    pure: bool


def _registers(operand: Any) -> int:
    """The registers of an operand, as a mask (bit i: register i)."""
    if isinstance(operand, Reg):
        return 1 << operand.index
    if isinstance(operand, Addr):
        return _registers(operand.base)
    if isinstance(operand, (Vec, Tuple)):
        return functools.reduce(operator.or_, map(_registers, operand.items), 0)
    if isinstance(operand, Pair):
        return _registers(operand.first) | _registers(operand.second)
    if isinstance(operand, (Part, Negated)):
        return _registers(operand.of)
    return _registers(operand.reg) if isinstance(operand, Not) else 0


def _writes_first(ins: Instruction) -> bool:
    base = ins.base
    if base in ("bar", "barrier"):
        return ".red" in ins.opcode
    if base == "wmma":
        return ".store" not in ins.opcode
    if base == "multimem":
        return ".ld_reduce" in ins.opcode
    if base == "mbarrier":
        return any(f".{x}" in ins.opcode for x in ("arrive", "test_wait", "try_wait"))
    if base in ("cp", NO_FUNCTION):
        return False
    if base == "call":
        return bool(ins.operands) and isinstance(ins.operands[0], Tuple) and len(ins.operands) > 1
    return base not in NO_DESTINATION


def uses_defs(ins: Instruction) -> tuple[int, int]:
    """(registers that an instruction reads, registers that it writes), as masks (bit i: register i). A register that an
    instruction with a guard writes counts as read too, because the register keeps its value if the guard is false.
    """
    uses = defs = 0
    operands = ins.operands
    if operands and _writes_first(ins) and not isinstance(operands[0], Addr):
        defs = _registers(operands[0])
        operands = operands[1:]
    for operand in operands:
        uses |= _registers(operand)
    if ins.guard:
        uses |= defs | 1 << ins.guard[0].index
    return uses, defs


class Graph:
    """The reachable blocks of `fn` in order, the entry first. `traits(instruction)` returns its Traits."""

    def __init__(self, fn: Function, traits: Callable[[Instruction], Traits]):
        self.fn = fn
        self.traits = traits
        self.blocks: list[Block] = []
        self._build()
        self._reach()
        self._liveness()

    def _new(self) -> Block:
        block = Block(len(self.blocks))
        self.blocks.append(block)
        return block

    def _build(self) -> None:
        labels: dict[str, Block] = {}
        fixups: list[tuple[Block, Instruction, tuple[str, ...], Block | None]] = []
        block: Block = self._new()
        open_ = True  # whether control reaches the end of `block`
        for item in self.fn.body or ():
            if isinstance(item, str):
                if block.instructions or block.resumed or not open_ or block.index == 0:
                    fresh = self._new()
                    if open_:
                        block.successors = [fresh]
                    block, open_ = fresh, True
                labels[item] = block
                continue
            if not open_:
                block, open_ = self._new(), True
            base = item.base
            if base == "bra":
                target = item.operands[0].name
                block.end = item
                if item.guard:
                    after = self._new()
                    block.branch = item.guard
                    fixups.append((block, item, (target,), after))
                    block = after
                else:
                    fixups.append((block, item, (target,), None))
                    open_ = False
                continue
            traits = self.traits(item)
            after_guard: Block | None = None
            if item.guard and not traits.pure:
                inner, after_guard = self._new(), self._new()
                block.branch = item.guard
                block.successors = [inner, after_guard]
                block = inner
                item = Instruction(item.opcode, item.operands, None, item.line, item.loc, item.text)
            if base == "brx":
                names = self.fn.tables.get(item.operands[1].name)
                if names is None:
                    raise item.error("the branch table is not defined")
                block.jump = block.end = item
                fixups.append((block, item, names, None))
                open_ = False
            elif base in ("ret", "exit", "trap"):
                block.instructions.append(item)
                open_ = False
            elif traits.suspends:
                block.suspended = item
                resumed = self._new()
                resumed.resumed = item
                block.successors = [resumed]
                block = resumed
            else:
                block.instructions.append(item)
            if after_guard is not None:
                if open_:
                    block.successors = [after_guard]
                block, open_ = after_guard, True
        for source, item, names, fallthrough in fixups:
            for name in names:
                if name not in labels:
                    raise item.error(f"label {name!r} is not defined")
                source.successors.append(labels[name])
            if fallthrough is not None:
                source.successors.append(fallthrough)

    def closing_edges(self, accesses: Callable[[Instruction], bool]) -> set[tuple[int, int]]:
        """Returns edges of the graph, as pairs of block indices. Every cycle of blocks that have neither a suspension
        point nor an access contains at least one of these edges. `accesses(instruction)` tells whether an instruction
        accesses memory.
        """
        free = [b for b in self.blocks if not (b.suspended or b.resumed or any(map(accesses, b.instructions)))]
        rest = {b.index for b in free}
        edges: set[tuple[int, int]] = set()
        for root in free:
            if root.index not in rest:
                continue
            rest.discard(root.index)
            open_ = {root.index}
            path = [(root, iter(root.successors))]
            while path:
                block, successors = path[-1]
                after = next((s for s in successors if s.index in open_ or s.index in rest), None)
                if after is None:
                    path.pop()
                    open_.discard(block.index)
                elif after.index in open_:
                    edges.add((block.index, after.index))
                else:
                    rest.discard(after.index)
                    open_.add(after.index)
                    path.append((after, iter(after.successors)))
        return edges

    def _reach(self) -> None:
        seen = {self.blocks[0].index}
        stack = [self.blocks[0]]
        while stack:
            for s in stack.pop().successors:
                if s.index not in seen:
                    seen.add(s.index)
                    stack.append(s)
        self.blocks = [b for b in self.blocks if b.index in seen]

    def _liveness(self) -> None:
        summary: dict[int, tuple[int, int]] = {}
        predecessors: dict[int, list[Block]] = {b.index: [] for b in self.blocks}
        for block in self.blocks:
            for s in block.successors:
                predecessors[s.index].append(block)
            use = define = 0
            if block.branch:
                use |= 1 << block.branch[0].index
            if block.jump:
                use |= uses_defs(block.jump)[0]
            if block.suspended:
                use |= uses_defs(block.suspended)[0]
            for ins in reversed(block.instructions):
                u, d = uses_defs(ins)
                use = (use & ~d) | u
                define |= d
            if block.resumed:
                u, d = uses_defs(block.resumed)
                use &= ~d
                define |= d
                if self.traits(block.resumed).rereads:
                    use |= u
            summary[block.index] = (use, define)
        work = list(self.blocks)
        queued = {b.index for b in work}
        while work:
            block = work.pop()
            queued.discard(block.index)
            out = 0
            for s in block.successors:
                out |= s.live_in
            block.live_out = out
            use, define = summary[block.index]
            live = use | (out & ~define)
            if live != block.live_in:
                block.live_in = live
                for p in predecessors[block.index]:
                    if p.index not in queued:
                        queued.add(p.index)
                        work.append(p)


def bits(mask: int) -> list[int]:
    """The indices of the bits that are set, in ascending order."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out
