# SPDX-License-Identifier: Apache-2.0
"""Emission of one function as LLVM IR: blocks, suspension points, checked accesses."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from ...ptx.ir import SINK, Addr, Function, Instruction, Reg, Var
from .. import abi
from . import raw
from .flow import Block, Graph, Traits, uses_defs
from .helpers import Helpers
from .opcode import RefusedError, decode
from .operands import Operands
from .registers import storage

if TYPE_CHECKING:
    from .module import Unit

EXITED = -1  # the status that a device function returns if its thread has exited


class Emitter(Operands):
    """Emits the function `fn` in one of three modes.

    A "kernel" function can be suspended and resumed. A "device" function is called by kernels and cannot be suspended.
    A "raw" function becomes a C function, which has no checks of accesses and cannot be suspended.
    """

    def __init__(self, unit: Unit, fn: Function, mode: str, helpers: Helpers):
        super().__init__(unit, fn, mode, helpers)
        self.fault_used = False
        self.waits = self.triggers = self.copies = False
        self.closing: set[tuple[int, int]] = set()
        self._exchange: int | None = None

    # Checks ---------------------------------------------------------------------------------------------------------
    def site(self, ins: Instruction) -> int:
        return self.unit.site(ins)

    def check(self, address: str, size: int, flags: int, ins: Instruction) -> None:
        """Emit the check of an access by the runtime. If the runtime refuses the access, the emitted function returns
        FAULT.
        """
        if self.mode == "raw":
            return
        plain = flags & ~(0xF << abi.SPACE_SHIFT)
        if self.unit.has_clusters and flags >> abi.SPACE_SHIFT & 0xF == abi.Space.SHARED:
            # With the state space in it, `plain` is neither 0 nor WRITE. So the call below is that of rt_access, which
            # refuses an access to the shared memory of another block.
            plain = flags
        if size in (4, 8, 16) and plain in (0, abi.Access.WRITE):
            name = f"rt_{'write' if plain else 'read'}{size}"
            bad = self.runtime(name, "%t", address, str(self.site(ins)))
        else:
            bad = self.runtime("rt_access", "%t", address, str(size), str(flags), str(self.site(ins)))
        self.leave_if(bad)

    def refuse_parameter(self, var: Var, offset: int, size: int, flags: int, ins: Instruction) -> None:
        """Emit the fault of an access that is outside of a parameter, or not aligned."""
        if self.mode == "raw":
            raise RefusedError(f"offset {offset} is outside of the {var.size} bytes of {var.name}")
        numbers = (offset, size, flags, var.size, self.site(ins))
        self.leave_if(self.runtime("rt_parameter", "%t", *map(str, numbers)))

    def is_of_kernel(self, var: Var) -> bool:
        """Whether a `.param` variable is a parameter of the kernel that is emitted."""
        return id(var) not in self.param_pointers

    @functools.cached_property
    def _read(self) -> int:
        """The registers that any instruction of the function reads, as a mask (bit i: register i)."""
        found = 0
        for item in self.fn.body or ():
            if isinstance(item, Instruction):
                found |= uses_defs(item)[0]
        return found

    def unread(self, items: tuple[Any, ...]) -> int:
        """The elements of a vector load whose registers are never read, as a mask (bit i: element i). The memory of
        these elements need not be initialised, as compilers load more elements than they need.
        """
        idle = (x is SINK or (isinstance(x, Reg) and not self._read >> x.index & 1) for x in items)
        return sum(1 << i for i, unused in enumerate(idle) if unused)

    def leave_if(self, bad: str | None) -> None:
        """Emit a return of FAULT for the case that `bad`, the result of a runtime function, is not 0."""
        ok, label = self.op(f"icmp eq i32 {bad}, 0"), self.label()
        self.fault_used = True
        self.do(f"br i1 {ok}, label %{label}, label %fault, !prof !1")
        self.start(label)

    @staticmethod
    def _accesses(ins: Instruction) -> bool:
        """Whether an instruction makes an access that the runtime checks and counts."""
        if ins.base == "cp":
            return len(ins.operands) > 1 and ".prefetch" not in ins.opcode
        if ins.base not in ("ld", "ldu", "st", "atom", "red", "multimem"):
            return False
        place = next((o for o in ins.operands if isinstance(o, Addr)), None)
        return ".param" not in ins.opcode or (place is not None and isinstance(place.base, Reg))

    def leave(self, status: int) -> None:
        """Emit a return of `status`. A new block follows."""
        self.do(f"ret i32 {status}")
        self.start(self.label())

    def suspend(self, ins: Instruction, status: abi.Status, kind: int | None = None) -> int:
        """Emit the end of the code before a suspension point: stores of `kind` and the site. Returns `status`."""
        if kind is not None:
            self.put("op_kind", f"i32 {int(kind)}")
        self.put("site", f"i32 {self.site(ins)}")
        return int(status)

    def exchange(self) -> int:
        """The offset of the exchange area in the frame. This area holds a lane's registers for a matrix instruction."""
        if self._exchange is None:
            self._exchange = self.frame_bytes
            self.frame_bytes += 4 * abi.EXCHANGE_WORDS
        return self._exchange

    def library(self, name: str) -> str:
        """The address of a function of a native library. The library will be loaded together with this module."""
        self.unit.libraries.add(next(library for library, names in abi.LIBRARIES.items() if name in names))
        self.helpers.declare(name, "i32", "ptr")
        return f"ptrtoint (ptr @{name} to i64)"

    def copying(self, name: str, *args: str) -> None:
        """Emit the call of a runtime function for asynchronous copies. If that function finds a fault, the emitted code
        returns FAULT.
        """
        self.copies = True
        failed = self.runtime(name, "%t", *args)
        if failed is not None:
            self.leave_if(failed)

    # The whole function ---------------------------------------------------------------------------------------------
    def classify(self, ins: Instruction) -> Traits:
        action = decode(ins)
        suspends = action.before is not None
        if suspends and self.mode == "raw":
            if not action.rereads:
                raise ins.error("the instruction suspends its thread, which is not possible with raw=True")
            suspends = False
        return Traits(suspends, action.rereads, action.pure and not suspends)

    def emit(self, ins: Instruction, step: str) -> int | None:
        """Emit the part of an instruction "before" or "after" its suspension point."""
        action = decode(ins)
        try:
            if step == "before":
                assert action.before is not None
                return action.before(self, ins)
            if ins.guard:
                reg, negated = ins.guard
                self.guard = self.pred(reg)
                if negated:
                    self.guard = self.op(f"xor i1 {self.guard}, true")
            action.after(self, ins)
        except RefusedError as e:
            raise ins.error(str(e)) from None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, AssertionError) as e:
            raise ins.error(f"unsupported operands ({e})") from e
        finally:
            self.guard = None
        return None

    def function(self, signature: str, prologue: list[str]) -> str:
        """The text of the function's definition. `prologue` are lines of its entry block, after the allocas."""
        for var in self.fn.variables:
            if var.space == "param":
                self.stack_variable(var)
            elif self.mode != "raw":
                self.local_bytes = -(-self.local_bytes // var.align) * var.align
                self.local_offset[id(var)] = self.local_bytes
                self.local_bytes += var.size
        self.frame_bytes = max(self.frame_bytes, self.slots)
        graph = Graph(self.fn, self.classify)
        if self.mode != "raw":
            self.closing = graph.closing_edges(self._accesses)
        if self.closing:
            self.allocas.append("%rounds = alloca i32")
            prologue = [*prologue, f"store i32 {abi.LOOP_SLICE}, ptr %rounds"]
        resumes = [b for b in graph.blocks if b.resumed]
        kept = functools.reduce(operator.or_, (b.live_in for b in resumes), 0)
        self.place({live & kept for b in graph.blocks for live in (b.live_in, b.live_out)})
        number = {b.index: i + 1 for i, b in enumerate(resumes)}
        self.start("start")
        self.clear(graph.blocks[0].live_in)
        self.do(f"br label %B{graph.blocks[0].index}")
        for block in graph.blocks:
            self._block(block, number)
        entry = [f"{signature} {{", "entry:"]
        entry += [f"  %r{i} = alloca {storage(self.fn.registers[i].type)}" for i in sorted(self.slots_used)]
        entry += ["  " + a for a in self.allocas]
        entry += ["  " + p for p in prologue]
        if resumes:
            entry.append("  %resume = load i32, ptr %t")
            cases = " ".join(f"i32 {number[b.index]}, label %B{b.index}" for b in resumes)
            entry.append(f"  switch i32 %resume, label %start [{cases}]")
        else:
            entry.append("  br label %start")
        if self.fault_used:
            self.out += ["fault:", f"  ret i32 {int(abi.Status.FAULT)}"]
        return "\n".join([*entry, *self.out, "}"])

    def _block(self, block: Block, number: dict[int, int]) -> None:
        self.values, self.carry = {}, None
        self.start(f"B{block.index}")
        if block.resumed:
            self.emit(block.resumed, "after")
        for ins in block.instructions:
            self.emit(ins, "after")
        if block.suspended:
            status = self.emit(block.suspended, "before")
            target = block.successors[0]
            self.flush(target.live_in)
            self.do(f"store i32 {number[target.index]}, ptr %t")
            self.do(f"ret i32 {int(status or 0)}")
            return
        condition = None
        if block.branch:
            condition = self.pred(block.branch[0])
            if block.branch[1]:
                condition = self.op(f"xor i1 {condition}, true")
        selector = self._selector(block.jump) if block.jump else None
        self.flush(block.live_out)
        closed = {s.index: self.label() for s in block.successors if (block.index, s.index) in self.closing}
        targets = [closed.get(s.index, f"B{s.index}") for s in block.successors]
        if selector is not None:
            cases = " ".join(f"i32 {i}, label %{target}" for i, target in enumerate(targets))
            dead = self.label()
            self.do(f"switch i32 {selector}, label %{dead} [{cases}]")
            self.start(dead)
            assert block.jump is not None
            if self.mode == "raw":
                self.do("unreachable")
            else:
                self.do(f"ret i32 {self.suspend(block.jump, abi.Status.TRAP, abi.Trap.TABLE)}")
        elif condition is not None:
            self.do(f"br i1 {condition}, label %{targets[0]}, label %{targets[1]}")
        elif targets:
            self.do(f"br label %{targets[0]}")
        elif not self._ended(block):
            self.finish()
        for head in block.successors:
            if (label := closed.pop(head.index, None)) is not None:
                self._count_round(block, label, head)

    def _selector(self, jump: Instruction) -> str:
        try:
            return self.word(jump.operands[0], 32)
        except RefusedError as e:
            raise jump.error(str(e)) from None

    def _count_round(self, block: Block, label: str, head: Block) -> None:
        """Emit the edge from `label` to `head`, which closes a loop without accesses to memory, and code that counts
        the iterations of this loop. After each LOOP_SLICE iterations of such loops, the code calls rt_loop, which may
        end the thread with a fault.
        """
        some = (block.end, *block.instructions[-1:], head.end, *head.instructions, *(self.fn.body or ()))
        ins = next(x for x in some if isinstance(x, Instruction))
        index, ask, more = head.index, self.label(), self.label()
        self.start(label)
        left = self.op(f"sub i32 {self.op('load i32, ptr %rounds')}, 1")
        self.do(f"store i32 {left}, ptr %rounds")
        self.do(f"br i1 {self.op(f'icmp ne i32 {left}, 0')}, label %B{index}, label %{ask}, !prof !1")
        self.start(ask)
        refused = self.runtime("rt_loop", "%t", str(self.site(ins)))
        self.fault_used = True
        self.do(f"br i1 {self.op(f'icmp eq i32 {refused}, 0')}, label %{more}, label %fault, !prof !1")
        self.start(more)
        self.do(f"store i32 {abi.LOOP_SLICE}, ptr %rounds")
        self.do(f"br label %B{index}")

    def _ended(self, block: Block) -> bool:
        return bool(block.instructions) and block.instructions[-1].base in ("ret", "exit", "trap")

    def finish(self) -> None:
        """Emit the return of the function, as `ret` does."""
        if self.mode == "raw":
            raw.emit_return(self)
        else:
            self.do(f"ret i32 {int(abi.Status.EXIT)}")
