# SPDX-License-Identifier: Apache-2.0
"""Addresses of functions, and indirect calls.

The address of a function is not an address in memory. Only functions whose address is taken, by an instruction or an
initial value, have an address. It consists of `BASE`, a hash of the module's PTX, and the index of the function among
these functions. An indirect call is replaced by comparisons with the addresses of all functions that the call may
reach, and by a direct call of the function whose address is equal. If the call has a list of targets, it may reach the
functions in this list; if it has a prototype, all functions whose parameters and results have the number and sizes that
the prototype gives. So an indirectly called function may contain barriers and shuffles. A call of any other address is
a fault, even if this is the address of a function of another module.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from ...ptx.ir import Function, Instruction, Module, Prototype, Reg, Sym, Tuple, Vec

BASE = 0x7F00_0000_0000_0000
STEP = 16
NO_FUNCTION = "@no_function"  # an opcode of the translator's own: a call of an address that no function has


def addresses(module: Module, text: str) -> dict[str, int]:
    """The addresses of the functions whose address is taken, by name. `text` is the PTX of the module."""
    taken = {name for v in module.variables.values() for _, name, _ in v.relocations if name in module.functions}
    for fn in module.functions.values():
        for item in fn.body or ():
            if isinstance(item, Instruction) and item.base not in ("bra", "brx"):
                operands = _arguments(item) if item.base == "call" else item.operands
                taken |= {name for o in operands for name in _names(o) if name in module.functions}
    base = BASE + (zlib.crc32(text.encode()) << 20)
    return {name: base + STEP * i for i, name in enumerate(sorted(taken))}


def _arguments(call: Instruction) -> tuple[Any, ...]:
    """The operands of a call after its callee."""
    if len(call.operands) <= isinstance(call.operands[0] if call.operands else None, Tuple):
        raise call.error("the name of a function is expected")
    return call.operands[2 if isinstance(call.operands[0], Tuple) else 1 :]


def _names(operand: Any) -> list[str]:
    if isinstance(operand, (Tuple, Vec)):
        return [name for item in operand.items for name in _names(item)]
    return [operand.name] if isinstance(operand, Sym) and operand.var is None else []


def lower(module: Module, taken: dict[str, int]) -> None:
    """Replace the indirect calls in all functions by comparisons and direct calls, in place."""
    for fn in module.functions.values():
        if fn.body is not None and any(_is_indirect(item) for item in fn.body):
            parts = [
                _calls(module, fn, item, taken, f"@call{i}") if _is_indirect(item) else [item]
                for i, item in enumerate(fn.body)
            ]
            fn.body = [item for part in parts for item in part]


def _is_indirect(item: Any) -> bool:
    return isinstance(item, Instruction) and item.base == "call" and isinstance(_callee(item), Reg)


def _callee(call: Instruction) -> Any:
    return call.operands[1 if isinstance(call.operands[0], Tuple) else 0]


def _calls(module: Module, fn: Function, call: Instruction, taken: dict[str, int], tag: str) -> list[Any]:
    returns = call.operands[0] if isinstance(call.operands[0], Tuple) else None
    target, (arguments, may_be) = _callee(call), _described(fn, call)
    end = f"$end{tag}"

    def instruction(opcode: str, operands: tuple[Any, ...], guard: tuple[Reg, bool] | None = None) -> Instruction:
        return Instruction(opcode, operands, guard, call.line, call.loc, call.text)

    out: list[Any] = []
    if call.guard:
        out.append(instruction("bra", (Sym(end, None),), (call.guard[0], not call.guard[1])))
    for name in taken:
        callee = module.functions[name]
        if callee.kernel or callee.body is None or not may_be(callee):
            continue
        other = f"$not {name}{tag}"
        is_it = Reg(f"%is {name}{tag}", "pred", len(fn.registers))
        fn.registers.append(is_it)
        out.append(instruction("setp.eq.u64", (is_it, target, Sym(name, None))))
        out.append(instruction("bra", (Sym(other, None),), (is_it, True)))
        out.append(instruction("call", tuple(x for x in (returns, Sym(name, None), arguments) if x is not None)))
        out += [instruction("bra", (Sym(end, None),)), other]
    return [*out, instruction(NO_FUNCTION, (target,)), end]


def _described(fn: Function, call: Instruction) -> tuple[Tuple | None, Callable[[Function], bool]]:
    """(the arguments of an indirect call or None, a function that tells whether the call may reach a given function).
    The latter decides by the prototype of the call or by its list of targets.
    """
    rest = list(_arguments(call))
    arguments = rest.pop(0) if rest and isinstance(rest[0], Tuple) else None
    if not rest or not isinstance(rest[0], Sym):
        raise call.error("an indirect call needs a prototype or a list of targets")
    name = rest[0].name
    if name in fn.prototypes:
        return arguments, lambda callee: _fits(callee, fn.prototypes[name])
    if name in fn.tables:
        return arguments, lambda callee: callee.name in fn.tables[name]
    raise call.error(f"the prototype or list of targets {name!r} is not defined")


def _fits(fn: Function, prototype: Prototype) -> bool:
    """Whether the results and parameters of a function have the sizes that a prototype gives."""
    sizes = [[v.size for v in group] for group in (fn.returns, fn.params)]
    return sizes == [[v.size for v in group] for group in (prototype.returns, prototype.params)]
