# SPDX-License-Identifier: Apache-2.0
"""Raw modules, in which every function becomes a plain C function, without access checks and suspension points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ptx.ir import PtxError, Reg, Var
from .opcode import RefusedError

if TYPE_CHECKING:
    from .emitter import Emitter
    from .module import Unit


_SHORT = 40  # functions of fewer PTX instructions are inlined


def emit_module(unit: Unit) -> None:
    """Emit all variables and functions of a raw module."""
    for v in unit.module.variables.values():
        if v.space in ("global", "const"):
            _variable(unit, v)
    for fn in unit.module.functions.values():
        if fn.body is None:
            continue
        if fn.kernel:
            raise PtxError(fn.line, f".entry {fn.name}", "with raw=True, the module must have no kernels")
        g = unit.emitter(fn, "raw")
        arguments, prologue = [], []
        for i, v in enumerate((*fn.returns, *fn.params)):
            pointer = g.stack_variable(v)
            if v in fn.params:
                t = _type(v)
                arguments.append(f"{t} %c{i}")
                prologue.append(f"store {t} %c{i}, ptr {pointer}")
        linkage, inlined = ("", "") if fn.visible else ("internal ", " alwaysinline" if len(fn.body) < _SHORT else "")
        signature = f'define {linkage}{_result(fn.returns)} @"{unit.prefix}{fn.name}"({", ".join(arguments)}){inlined}'
        unit.text.append(g.function(signature, prologue))


def _variable(unit: Unit, v: Var) -> None:
    if v.relocations or v.extern:
        raise PtxError(
            v.line, v.name, "with raw=True, a variable must be defined, and be initialised without addresses"
        )
    data = "".join(f"\\{b:02X}" for b in v.init.ljust(v.size, b"\0"))
    value = f'c"{data}"' if any(v.init) else "zeroinitializer"
    unit.text.append(f'@"{unit.prefix}{v.name}" = internal global [{v.size} x i8] {value}, align {max(v.align, 1)}')


def symbol(unit: Unit, name: str) -> str:
    """The symbol of a function. A function that the module only declares keeps its name."""
    return name if unit.module.functions[name].body is None else unit.prefix + name


def emit_return(g: Emitter) -> None:
    """Emit the return of a function, with its result if it has one."""
    if g.fn.returns:
        v = g.fn.returns[0]
        t = _type(v)
        g.do(f"ret {t} {g.op(f'load {t}, ptr {g.param_pointers[id(v)]}')}")
    else:
        g.do("ret void")


def emit_call(g: Emitter, callee: Any, results: list[str], arguments: list[str], prototype: str | None) -> None:
    """Emit the call of a function. `results` and `arguments` are pointers to the values."""
    unit = g.unit
    if isinstance(callee, Reg):
        if prototype is None or prototype not in g.fn.prototypes:
            raise RefusedError("an indirect call needs a prototype")
        declared: Any = g.fn.prototypes[prototype]
        target = g.op(f"inttoptr i64 {g.word(callee, 64)} to ptr")
    else:
        declared = unit.module.functions.get(callee.name)
        if declared is None:
            raise RefusedError(f"the function {callee.name!r} is not declared")
        target = f'@"{symbol(unit, callee.name)}"'
        if declared.body is None:
            unit.helpers.declare(callee.name, _result(declared.returns), *map(_type, declared.params))
    typed = []
    for p, pointer in zip(declared.params, arguments, strict=True):
        t = _type(p)
        typed.append(f"{t} {g.op(f'load {t}, ptr {pointer}')}")
    returned = _result(declared.returns)
    if returned == "void":
        g.do(f"call void {target}({', '.join(typed)})")
    else:
        value = g.op(f"call {returned} {target}({', '.join(typed)})")
        g.do(f"store {returned} {value}, ptr {results[0]}")


def _type(v: Var) -> str:
    """The LLVM type of a C parameter or result."""
    if not v.array and v.size in (1, 2, 4, 8):
        return f"i{8 * v.size}"
    return f"[{-(-v.size // 8)} x i64]"


def _result(returns: tuple[Var, ...]) -> str:
    if len(returns) > 1:
        raise RefusedError("a function returns at most one value")
    return _type(returns[0]) if returns else "void"
