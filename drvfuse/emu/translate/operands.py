# SPDX-License-Identifier: Apache-2.0
"""The operands of instructions: values of symbols and special registers, and addresses of memory operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ptx.ir import Addr, Function, Imm, Special, Sym, Var
from .. import abi
from ..abi import layout, structs
from .helpers import Helpers
from .opcode import RefusedError, width
from .registers import Registers, signed
from .special import special

if TYPE_CHECKING:
    from .module import Unit

_HEADERS = {"t": structs.Thread, "block": structs.Block, "launch": structs.Launch}


class Operands(Registers):
    """The operands of the function `fn`, which is emitted in `mode` (see `Emitter`).

    param_pointers   pointers to `.param` variables, by the id of the variable
    local_offset     the offsets of local variables in the thread's local memory, by the id of the variable
    local_bytes      the size of the local variables, with gaps for their alignment
    allocas          lines of LLVM IR for the entry block
    """

    def __init__(self, unit: Unit, fn: Function, mode: str, helpers: Helpers):
        super().__init__(fn, helpers)
        self.unit, self.mode = unit, mode
        self.param_pointers: dict[int, str] = {}
        self.allocas: list[str] = []
        self.local_bytes = 0
        self.local_offset: dict[int, int] = {}

    def runtime(self, name: str, *args: str) -> str | None:
        """Emit the call of a runtime function, and return its result, or None for a void function."""
        result, types = abi.RUNTIME_FUNCTIONS[name]
        if self.mode == "raw":
            raise RefusedError(f"the runtime function {name} is not available with raw=True")
        self.helpers.declare(name, result, *types)
        text = f"call {result} @{name}({', '.join(f'{t} {a}' for t, a in zip(types, args, strict=True))})"
        if result == "void":
            self.do(text)
            return None
        return self.op(text)

    def word(self, operand: Any, n: int) -> str:
        """The value of an operand as an `i<n>`. The value of a symbol is its address in its state space."""
        if isinstance(operand, Sym):
            value, w = self.symbol_value(operand), 64
        elif isinstance(operand, Special):
            value, w = special(self, operand.name)
        else:
            return super().word(operand, n)
        return value if w == n else self.op(f"{'trunc' if w > n else 'zext'} i{w} {value} to i{n}")

    def pred(self, operand: Any) -> str:
        """The value of an operand, which may be a special register, as an i1."""
        if isinstance(operand, Special):
            value, n = special(self, operand.name)
            return self.op(f"icmp ne i{n} {value}, 0")
        return super().pred(operand)

    def header(self, base: str, member: str, index: int = 0) -> str:
        """Emit the load of a 32-bit member, or element of a member, of the structure `base`: "t" (the thread), "block"
        or "launch". The member does not change while the kernel runs.
        """
        pointer = self.op(f"getelementptr i8, ptr %{base}, i64 {layout.offset(_HEADERS[base], member, index)}")
        return self.op(f"load i32, ptr {pointer}, !invariant.load !0")

    def _variable(self, var: Var, offset: int) -> str:
        """The address (i64) of a variable in its own state space."""
        if var.space in ("global", "const"):
            return self.unit.global_address(self, var, offset)
        if var.space == "shared":
            if self.mode == "raw":
                raise RefusedError("shared memory is not available with raw=True")
            return self._shift(self.op("sub i64 %shared, %window"), self.unit.shared_offset(var, self.fn) + offset)
        if var.space == "local":
            if self.mode == "raw":
                return self._shift(self.op(f"ptrtoint ptr {self.stack_variable(var)} to i64"), offset)
            return str(self._local(var) + offset)
        if id(var) in self.param_pointers:
            return self._shift(self.op(f"ptrtoint ptr {self.param_pointers[id(var)]} to i64"), offset)
        return self._shift("%params", self.unit.param_offset(self.fn, var) + offset)

    def _local(self, var: Var) -> int:
        """The offset of a local variable in the thread's local memory, which is its address in the space .local."""
        if id(var) not in self.local_offset:
            raise RefusedError(f"{var.name} is not a variable of this function")
        return self.local_offset[id(var)]

    def stack_variable(self, var: Var) -> str:
        pointer = self.param_pointers.get(id(var))
        if pointer is None:
            pointer = f"%v{len(self.allocas)}"
            if id(var) in self.fn.persistent:
                self.allocas.append(f"{pointer} = getelementptr i8, ptr %t, i64 {self.slots}")
                self.slots += -(-var.size // 16) * 16
            else:
                self.allocas.append(f"{pointer} = alloca [{max(var.size, 8)} x i8], align {max(var.align, 16)}")
            self.param_pointers[id(var)] = pointer
        return pointer

    def _shift(self, base: str, offset: int) -> str:
        return base if offset == 0 else self.op(f"add i64 {base}, {offset}")

    def symbol_value(self, sym: Sym) -> str:
        """The result of a `mov` of a symbol: its address in its state space."""
        if sym.var is None:
            return self.unit.function_address(self, sym)
        return self._variable(sym.var, sym.offset)

    def address(self, operand: Any, space: str) -> str:
        """The host address (i64) of the memory operand `[operand]` in a state space."""
        if not isinstance(operand, Addr):
            raise RefusedError("an address is expected")
        base, offset = operand.base, operand.offset
        if isinstance(base, Sym):
            if base.var is None:
                raise RefusedError(f"{base.name} is not defined")
            if base.var.space == "shared":
                return self._shift("%shared", self.unit.shared_offset(base.var, self.fn) + base.offset + offset)
            if base.var.space == "local" and self.mode != "raw":
                return self._shift("%local", self._local(base.var) + base.offset + offset)
            return self._variable(base.var, base.offset + offset)
        if isinstance(base, Imm):
            value = str(signed(base.value + offset, 64))
        elif width(base.type) == 64:
            value = self._shift(self.word(base, 64), offset)
        else:
            # A 32-bit address plus an offset wraps around in 32 bits.
            narrow = self.word(base, 32)
            if offset:
                narrow = self.op(f"add i32 {narrow}, {offset}")
            value = self.op(f"zext i32 {narrow} to i64")
        if space.startswith("shared"):
            value = self.op(f"add i64 {'%shared' if isinstance(base, Imm) else '%window'}, {value}")
        elif space == "local" and self.mode != "raw":
            value = self.op(f"add i64 %local, {value}")
        return value

    def parameter(self, operand: Any) -> tuple[Var, int] | None:
        """The `.param` variable that an operand names, and the offset in it. None for any other operand."""
        base = operand.base if isinstance(operand, Addr) else None
        if isinstance(base, Sym) and base.var is not None and base.var.space == "param":
            return base.var, base.offset + operand.offset
        return None
