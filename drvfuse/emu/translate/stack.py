# SPDX-License-Identifier: Apache-2.0
"""Implements `alloca`, `stacksave` and `stackrestore` with a stack of fixed size in local memory.

Each function that uses these instructions has a stack of `BYTES` bytes, which is empty when the function is called, and
a register with the number of bytes in use. The memory after the stack may belong to other local variables of the
thread. An access beyond the stack is a fault only if it is outside of the thread's local memory.
"""

from __future__ import annotations

from typing import Any

from ...ptx.ir import Function, Imm, Instruction, Module, Reg, Sym, Var

BYTES = 4096
_ALIGNMENT = 16
# opcode -> the numbers of operands that it may have
_COUNTS = {"alloca": (2, 3), "stacksave": (1,), "stackrestore": (1,)}


def lower(module: Module) -> None:
    """Replace `alloca`, `stacksave` and `stackrestore` by arithmetic in all functions of a module, in place."""
    for fn in module.functions.values():
        if any(isinstance(item, Instruction) and item.base in _COUNTS for item in fn.body or ()):
            _lower(fn)


def _lower(fn: Function) -> None:
    assert fn.body is not None
    memory = Var("%stack", "local", "b8", BYTES, _ALIGNMENT, array=True)
    fn.variables.append(memory)
    used = Reg("%stack.used", "b64", len(fn.registers))
    fn.registers.append(used)
    out: list[Any] = [Instruction("mov.b64", (used, Imm(0, "int")), None, fn.line, 0, "")]
    for item in fn.body:
        out += _replaced(item, memory, used) if isinstance(item, Instruction) and item.base in _COUNTS else [item]
    fn.body = out


def _replaced(ins: Instruction, memory: Var, used: Reg) -> list[Instruction]:
    def made(opcode: str, *operands: Any) -> Instruction:
        return Instruction(opcode, operands, ins.guard, ins.line, ins.loc, ins.text)

    bits = ins.opcode.rsplit(".", 1)[-1]
    if bits != "u64":
        raise ins.error("the type .u64 is expected")
    if not all(isinstance(x, Reg) for x in ins.operands[:1]) or len(ins.operands) not in _COUNTS[ins.base]:
        raise ins.error(f"{' or '.join(map(str, _COUNTS[ins.base]))} operand(s), first a register, are expected")
    if ins.base == "stacksave":
        return [made("mov.b64", ins.operands[0], used)]
    if ins.base == "stackrestore":
        return [made("mov.b64", used, ins.operands[0])]
    pointer, size, *align = ins.operands
    least = align[0] if align else Imm(_ALIGNMENT, "int")
    if not isinstance(least, Imm) or least.value > _ALIGNMENT:
        raise ins.error(f"an alignment of at most {_ALIGNMENT} is expected")
    return [
        made("mov.b64", pointer, Sym(memory.name, memory)),
        made("add.u64", pointer, pointer, used),
        made("add.u64", used, used, size),
        made("add.u64", used, used, Imm(_ALIGNMENT - 1, "int")),
        made("and.b64", used, used, Imm(-_ALIGNMENT, "int")),
    ]
