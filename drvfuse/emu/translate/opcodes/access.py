# SPDX-License-Identifier: Apache-2.0
"""What the instructions that access memory have in common: reading the state space, the order, the scope and the
elements from an opcode, and emitting the part of an instruction before its suspension point.

The runtime checks every access before it is made. Each strong load and each atomic begins with a suspension point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import Addr, Instruction, Var, Vec
from ... import abi
from ..emitter import Emitter
from ..opcode import Opcode, RefusedError

SPACES = {
    "global": abi.Space.GLOBAL,
    "shared": abi.Space.SHARED,
    "shared::cta": abi.Space.SHARED,
    "shared::cluster": abi.Space.CLUSTER,
    "local": abi.Space.LOCAL,
    "const": abi.Space.CONST,
    "param": abi.Space.PARAM,
    "param::entry": abi.Space.PARAM,
    "param::func": abi.Space.PARAM,
}
SCOPES = {scope.name.lower(): scope for scope in abi.Scope}
ORDERS = {order.name.lower(): order for order in abi.Order}


def state_space(op: Opcode) -> tuple[str, int]:
    """(name, flag bits) of the state space of an opcode. The name "" is generic."""
    name = op.pick(*SPACES, default="")
    flags = int(SPACES[name]) << abi.SPACE_SHIFT if name else 0
    return name.split("::")[0], flags


def drop_hints(op: Opcode) -> None:
    """Consume the cache hints of an opcode, which have no effect."""
    op.flag("ca", "cg", "cs", "lu", "cv", "wb", "wt")
    op.rest = [p for p in op.rest if not p.startswith(("L1::", "L2::"))]


def scope_flags(op: Opcode, default: str | None = None) -> int:
    return int(SCOPES[op.pick(*SCOPES, default=default)]) << abi.SCOPE_SHIFT


def announce(space: str, size: int) -> Callable[[Emitter, Instruction], int]:
    """Returns a function that emits the part of an instruction before its strong access. This part stores the address
    and the size of the access in the thread's frame, and suspends the thread with the status YIELD.
    """

    def before(g: Emitter, ins: Instruction) -> int:
        operand = next((o for o in ins.operands if isinstance(o, Addr)), None)
        if operand is None:
            raise RefusedError("an address in brackets is expected")
        g.put("op_addr", f"i64 {g.address(operand, space)}")
        g.put("op_size", f"i32 {size}")
        return g.suspend(ins, abi.Status.YIELD)

    return before


def seen(g: Emitter, value: str, n: int) -> None:
    if g.mode == "raw":
        return
    if n != 64:
        value = g.op(f"{'trunc' if n > 64 else 'zext'} i{n} {value} to i64")
    g.put("op_seen", f"i64 {value}")


def _pointer(g: Emitter, address: str, offset: int = 0) -> str:
    if offset:
        address = g.op(f"add i64 {address}, {offset}")
    return g.op(f"inttoptr i64 {address} to ptr")


def elements_flag(count: int, strong: bool) -> int:
    return (count.bit_length() - 1) << abi.ELEMENTS_SHIFT if strong else 0


def elements(operand: Any, count: int) -> tuple[Any, ...]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != count:
        raise RefusedError(f"an operand of {count} element(s) is expected, not of {len(items)}")
    return tuple(items)


def place(g: Emitter, operand: Any, space: str, size: int, flags: int, ins: Instruction) -> Callable[[int], str]:
    """Emit the check of an access. Returns a function that emits the pointer to an element, given the element's byte
    offset.
    """
    named = g.parameter(operand) if space == "param" else None
    if named is not None and not _inside(g, *named, size):
        g.refuse_parameter(*named, size, flags, ins)
        return lambda offset: "null"  # no thread comes here
    address = g.address(operand, space)
    # Code writes arguments and results of functions, which are on the stack, but not the parameters of a kernel.
    if named is None or (flags & abi.Access.WRITE and g.is_of_kernel(named[0])):
        g.check(address, size, flags, ins)
    return lambda offset: _pointer(g, address, offset)


def _inside(g: Emitter, var: Var, offset: int, size: int) -> bool:
    """Whether an access of `size` bytes at an offset in a parameter is aligned and inside of the parameter."""
    begin = g.unit.param_offset(g.fn, var) if g.mode == "kernel" and g.is_of_kernel(var) else 0
    return 0 <= offset <= var.size - size and (begin + offset) % size == 0
