# SPDX-License-Identifier: Apache-2.0
"""Facts about the kernels of a parsed module: parameters with sizes and offsets, launch bounds, PDL instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .ir import Function, Instruction, Module, Sym, Var


@dataclass(frozen=True)
class Param:
    """A kernel parameter: kind "int" (also pointers), "float" or "bytes" (a struct by value), size and offset."""

    kind: str
    size: int
    offset: int


@dataclass(frozen=True)
class KernelInfo:
    """Facts about a kernel that are known without loading it.

    `name` is its name expression or its symbol, `lowered` its symbol in PTX. `has_pdl_wait` and `has_pdl_trigger` say
    whether the kernel, or a function that it calls, contains griddepcontrol.wait or griddepcontrol.launch_dependents.
    `max_threads` comes from __launch_bounds__.
    """

    name: str
    lowered: str
    params: tuple[Param, ...]
    param_bytes: int
    has_pdl_wait: bool
    has_pdl_trigger: bool
    max_threads: int | None


def kernels(module: Module, lowered: Mapping[str, str]) -> dict[str, KernelInfo]:
    """The kernels of a module by symbol. A kernel in `lowered` (name expression -> symbol) is in the result by its name
    expression too.

    The module may have been parsed without bodies.
    """
    found = {fn.name: _describe(module, fn) for fn in module.functions.values() if fn.kernel and fn.body is not None}
    named = {name: replace(found[symbol], name=name) for name, symbol in lowered.items() if symbol in found}
    return found | named


def _describe(module: Module, fn: Function) -> KernelInfo:
    offsets, size = fn.offsets()
    params = tuple(Param(_kind(v), v.size, offset) for v, offset in zip(fn.params, offsets, strict=True))
    used = {ins.opcode for reached in _reached(module, fn) for ins in _instructions(reached, "griddepcontrol")}
    wait, trigger = "griddepcontrol.wait" in used, "griddepcontrol.launch_dependents" in used
    return KernelInfo(fn.name, fn.name, params, size, wait, trigger, fn.thread_limit())


def _kind(v: Var) -> str:
    return "bytes" if v.array else "float" if v.type in ("f32", "f64") else "int"


def _reached(module: Module, fn: Function) -> list[Function]:
    """The function and those that it calls, directly or not."""
    found = [fn]
    for function in found:  # the list grows while it is read
        names = {o.name for ins in _instructions(function, "call") for o in ins.operands if isinstance(o, Sym)}
        callees = (module.functions[name] for name in sorted(names) if name in module.functions)
        found += [callee for callee in callees if callee not in found]
    return found


def _instructions(fn: Function, base: str) -> list[Instruction]:
    return [item for item in fn.body or () if isinstance(item, Instruction) and item.base == base]
