# SPDX-License-Identifier: Apache-2.0
"""Finds the handler of an opcode. A handler reads the parts of the opcode's text and returns how to emit the
instruction (`Action`). An opcode with a modifier that its handler does not consume is refused. The order of the
modifiers does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ptx.ir import TYPE_BYTES, Instruction, NotEmulated
from .refused import refusal

if TYPE_CHECKING:
    from .emitter import Emitter

Emit = Callable[["Emitter", Instruction], None]


class RefusedError(Exception):
    """The reason why an instruction cannot be translated. The translator adds the line."""


@dataclass(slots=True, frozen=True)
class Action:
    """How to emit an instruction.

    `before` emits the part up to the suspension point and returns the status with which the thread is suspended; it is
    None for an instruction without a suspension point. `after` emits the part after that point, or the whole
    instruction. `rereads`: `after` reads the source operands again. `pure`: the instruction may run even if its guard
    is false, and its result is then dropped.
    """

    after: Emit
    before: Callable[[Emitter, Instruction], int] | None = None
    rereads: bool = False
    pure: bool = True


class Opcode:
    """The parts of an opcode between its dots, which a handler consumes one by one."""

    def __init__(self, text: str):
        self.text = text
        parts = text.split(".")
        self.base = parts[0]
        self.rest = parts[1:]

    def flag(self, *names: str) -> bool:
        """Consume all of `names` that are present. Returns whether any was."""
        found = False
        for name in names:
            while name in self.rest:
                self.rest.remove(name)
                found = True
        return found

    def pick(self, *names: str, default: str | None = None) -> str:
        """Consume and return one of `names`. If there is none, return `default`, or refuse the opcode if that is
        None.
        """
        for part in self.rest:
            if part in names:
                self.rest.remove(part)
                return part
        if default is None:
            raise RefusedError(f"one of .{' .'.join(names)} is expected")
        return default

    def types(self, count: int) -> list[str]:
        found = [p for p in self.rest if p in TYPE_BYTES]
        if len(found) != count:
            raise RefusedError(f"{count} type(s) expected, found {len(found)}")
        for f in found:
            self.rest.remove(f)
        return found

    def type(self) -> str:
        return self.types(1)[0]

    def done(self) -> None:
        if self.rest:
            raise RefusedError(f"unsupported modifier .{self.rest[0]} of {self.base!r}")


Handler = Callable[[Opcode], Action]
HANDLERS: dict[str, Handler] = {}


def opcode(*bases: str) -> Callable[[Handler], Handler]:
    """Register the handler of some opcodes. A name with a modifier ("st.async") takes precedence over a name without a
    modifier.
    """

    def register(handler: Handler) -> Handler:
        for base in bases:
            HANDLERS[base] = handler
        return handler

    return register


def width(type_: str) -> int:
    """The width of a PTX type in bits. The width of pred is 1."""
    return 1 if type_ == "pred" else TYPE_BYTES[type_] * 8


def is_signed(type_: str) -> bool:
    return type_[0] == "s"


def integer_type(op: Opcode, *allowed: str) -> str:
    """Consume and return the type of `op`. Raises RefusedError if this is not one of `allowed`, by default the integers
    of 16 bits or more.
    """
    t = op.type()
    if t not in (allowed or ("u16", "u32", "u64", "s16", "s32", "s64")):
        raise RefusedError(f"unsupported type .{t}")
    return t


# opcode -> (how to emit it, the maximum number of operands, or None if `_OPERANDS` does not have the opcode)
_cache: dict[str, tuple[Action, int | None]] = {}
# opcode without modifiers, or with its first one -> the maximum number of operands, which is the index of the opcode's
# row below. The cache policy, one operand more with .L2::cache_hint, is not counted.
_OPERANDS = {
    name: count
    for count, names in enumerate(
        (
            "barrier.cluster ret exit trap brkpt fence membar griddepcontrol",
            "activemask nanosleep pmevent prefetch prefetchu setmaxnreg",
            "abs applypriority bfind brev clz cnot cos cvta discard elect ex2 getctarank isspacep ld ldmatrix ldu lg2 "
            "mov movmatrix multimem.ld_reduce multimem.red multimem.st neg not popc rcp red rsqrt sin sqrt st stmatrix "
            "tanh testp",
            "add addc and bmsk copysign div mapa match max min mul mul24 or red.async redux rem shl shr st.async sub "
            "subc szext vote xor",
            "atom bar barrier bfe cvt dp2a dp4a fma fns mad mad24 madc prmt sad selp set setp shf slct vmad "
            "wmma.load wmma.store",
            "bfi mma shfl wmma.mma",
            "lop3",
        )
    )
    for name in names.split()
}


def _with_modifier(text: str) -> str:
    """An opcode with its first modifier only."""
    return ".".join(text.split(".", 2)[:2])


def decode(ins: Instruction) -> Action:
    """The action for an instruction. Raises PtxError, or NotEmulated if the opcode is one that `refused` lists."""
    known = _cache.get(ins.opcode)
    if known is None:
        known = _cache[ins.opcode] = _action(ins), _most_operands(ins)
    action, most = known
    if most is not None and len(ins.operands) > most:
        raise ins.error(f"at most {most} operand(s) are expected, not {len(ins.operands)}")
    return action


def _action(ins: Instruction) -> Action:
    reason = refusal(ins.opcode)
    if reason is not None:
        raise NotEmulated(ins.line, ins.text, reason)
    op = Opcode(ins.opcode)
    handler = HANDLERS.get(_with_modifier(ins.opcode)) or HANDLERS.get(op.base)
    if handler is None:
        raise ins.error("unsupported opcode")
    try:
        action = handler(op)
        op.done()
    except RefusedError as e:
        raise ins.error(str(e)) from None
    return action


def _most_operands(ins: Instruction) -> int | None:
    most = _OPERANDS.get(_with_modifier(ins.opcode), _OPERANDS.get(ins.base))
    return None if most is None else most + (".L2::cache_hint" in ins.opcode)
