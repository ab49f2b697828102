# SPDX-License-Identifier: Apache-2.0
"""Inlining of the bodies of `.func` functions, in PTX.

Functions are inlined if they have suspension points, or local or shared memory, because a function that is called in
LLVM IR can have none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...ptx.ir import Addr, Function, Instruction, Module, Negated, Not, Pair, Part, Reg, Sym, Tuple, Var, Vec


def callee_of(module: Module, ins: Instruction) -> Function | None:
    """The function that a direct call names, if it has a body."""
    if ins.base != "call":
        return None
    for operand in ins.operands[:2]:
        if isinstance(operand, Sym) and operand.var is None:
            fn = module.functions.get(operand.name)
            return fn if fn is not None and fn.body is not None else None
    return None


def variables_of(operand: Any) -> list[Var]:
    """The variables that an operand names."""
    if isinstance(operand, Sym):
        return [operand.var] if operand.var is not None else []
    if isinstance(operand, Addr):
        return variables_of(operand.base)
    if isinstance(operand, (Tuple, Vec)):
        return [v for item in operand.items for v in variables_of(item)]
    return []


class Inliner:
    """Inlines functions of a module. `suspends(instruction)` tells whether the instruction has a suspension point."""

    def __init__(self, module: Module, suspends: Callable[[Instruction], bool]):
        self.module, self.suspends = module, suspends
        self._needed: dict[str, bool] = {}
        self._count = 0

    def needs(self, fn: Function, stack: tuple[str, ...] = ()) -> bool:
        """Whether calls of `fn` must be inlined: it has local variables, names a shared variable, has a suspension
        point, or calls such a function. `stack` has the names of the functions whose calls led to `fn`.
        """
        known = self._needed.get(fn.name)
        if known is not None or fn.name in stack:
            return bool(known)
        result = any(v.space == "local" for v in fn.variables)
        for item in fn.body or ():
            if result:
                break
            if isinstance(item, Instruction):
                callee = callee_of(self.module, item)
                result = (
                    self.suspends(item)
                    or any(v.space == "shared" for o in item.operands for v in variables_of(o))
                    or (callee is not None and self.needs(callee, (*stack, fn.name)))
                )
        self._needed[fn.name] = result
        return result

    def expand(self, fn: Function) -> None:
        """Inline, in place, the calls in `fn` that must be inlined."""
        fn.body = self._body(fn, fn.body or [], (fn.name,))

    def _body(self, fn: Function, body: list[Any], stack: tuple[str, ...]) -> list[Any]:
        out: list[Any] = []
        for item in body:
            callee = callee_of(self.module, item) if isinstance(item, Instruction) else None
            if callee is None or not self.needs(callee):
                out.append(item)
                continue
            if callee.name in stack:
                raise item.error(
                    "recursion through a function that suspends its thread or has local memory is not supported"
                )
            out += self._body(fn, self._clone(fn, callee, item), (*stack, callee.name))
        return out

    def _clone(self, fn: Function, callee: Function, call: Instruction) -> list[Any]:
        self._count += 1
        tag = f"@inline{self._count}"
        operands = list(call.operands)
        returns = operands.pop(0).items if isinstance(operands[0], Tuple) else ()
        operands.pop(0)
        arguments = operands[0].items if operands else ()
        variables: dict[int, Var] = {}
        formal, actual = (*callee.returns, *callee.params), (*returns, *arguments)
        if len(formal) != len(actual):
            raise call.error(f"{len(formal)} arguments and results in all are expected, not {len(actual)}")
        for var, operand in zip(formal, actual, strict=True):
            if not isinstance(operand, Sym) or operand.var is None or operand.var.space != "param":
                raise call.error("an argument of an inlined function must be a .param variable")
            if operand.var.size < var.size:
                raise call.error(f"{var.name} has {var.size} bytes, and the call gives {operand.var.size}")
            variables[id(var)] = operand.var
            fn.persistent.add(id(operand.var))
        for var in callee.variables:
            fresh = replace(var, name=var.name + tag)
            variables[id(var)] = fresh
            fn.variables.append(fresh)
        registers: dict[int, Reg] = {}
        for reg in callee.registers:
            registers[reg.index] = Reg(reg.name + tag, reg.type, len(fn.registers))
            fn.registers.append(registers[reg.index])
        labels = {item for item in callee.body or () if isinstance(item, str)} | set(callee.tables)
        for name, targets in callee.tables.items():
            fn.tables[name + tag] = tuple(t + tag for t in targets)

        def rename(o: Any) -> Any:
            if isinstance(o, Reg):
                return registers[o.index]
            if isinstance(o, Sym):
                if o.var is None:
                    return Sym(o.name + tag, None, o.offset) if o.name in labels else o
                var = variables.get(id(o.var), o.var)
                return Sym(var.name, var, o.offset)
            if isinstance(o, Addr):
                return Addr(rename(o.base), o.offset)
            if isinstance(o, (Vec, Tuple)):
                return type(o)(tuple(rename(i) for i in o.items))
            if isinstance(o, Pair):
                return Pair(rename(o.first), rename(o.second))
            if isinstance(o, Part):
                return Part(rename(o.of), o.selector)
            if isinstance(o, Negated):
                return Negated(rename(o.of))
            return Not(rename(o.reg)) if isinstance(o, Not) else o

        end = f"$end{tag}"
        out: list[Any] = []
        if call.guard:
            reg, negated = call.guard
            out.append(Instruction("bra", (Sym(end, None),), (reg, not negated), call.line, call.loc, call.text))
        for item in callee.body or ():
            if isinstance(item, str):
                out.append(item + tag)
                continue
            guard = (registers[item.guard[0].index], item.guard[1]) if item.guard else None
            if item.base == "ret":
                out.append(Instruction("bra", (Sym(end, None),), guard, item.line, item.loc, item.text))
            else:
                operands_ = tuple(rename(o) for o in item.operands)
                out.append(Instruction(item.opcode, operands_, guard, item.line, item.loc, item.text))
        return [*out, end]
