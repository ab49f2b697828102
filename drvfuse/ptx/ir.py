# SPDX-License-Identifier: Apache-2.0
"""A parsed PTX module: functions with instructions, variables with initial bytes, source positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import DrvfuseError

TYPE_BYTES = {
    f"{kind}{bits}": bits // 8
    for kind, widths in {
        "b": (8, 16, 32, 64, 128),
        "u": (8, 16, 32, 64),
        "s": (8, 16, 32, 64),
        "f": (16, 32, 64),
    }.items()
    for bits in widths
} | {"f16x2": 4, "bf16": 2, "bf16x2": 4, "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2}
TYPE_BYTES |= {"e4m3x4": 4, "e5m2x4": 4, "tf32": 4, "pred": 1}

# Opcodes that write no register; the others write their first operand.
NO_DESTINATION = frozenset(
    {
        *(
            "st",
            "stmatrix",
            "red",
            "bar",
            "barrier",
            "bra",
            "brx",
            "call",
            "ret",
            "exit",
            "trap",
            "brkpt",
            "membar",
            "fence",
        ),
        *("prefetch", "prefetchu", "griddepcontrol", "nanosleep", "pmevent", "discard", "applypriority", "setmaxnreg"),
    }
)


class PtxError(DrvfuseError):
    """PTX cannot be translated. `line` is the line of the PTX text, from 1, `text` the instruction, `reason` the cause.

    `source` is (file, line) in the source, if the PTX has line information for that line, else None.
    """

    def __init__(self, line: int, text: str, reason: str):
        self.line, self.text, self.reason = line, " ".join(text.split()), reason
        self.source: tuple[str, int] | None = None
        super().__init__(f"PTX line {line}: {reason}: {self.text!r}")


class NotEmulated(PtxError):
    """Valid PTX that the emulator does not support; the error names the instruction."""


@dataclass(slots=True, eq=False)
class Reg:
    name: str
    type: str
    index: int


@dataclass(slots=True, frozen=True)
class Imm:
    """An immediate of `kind` "int", "f32" or "f64" (bits of a 0f/0d literal), or "dec" (`value` is a float)."""

    value: Any
    kind: str


@dataclass(slots=True, eq=False)
class Var:
    """A variable or parameter. `init` are its initial bytes, which may be fewer than its size, and `relocations` are
    (offset, symbol, addend). If `managed`, the host may access it too.
    """

    name: str
    space: str
    type: str
    size: int
    align: int
    init: bytes = b""
    relocations: list[tuple[int, str, int]] = field(default_factory=list)
    extern: bool = False
    managed: bool = False
    array: bool = False
    line: int = 0


@dataclass(slots=True, frozen=True)
class Sym:
    """The address of a variable (or of a function: `var` is None) plus an offset."""

    name: str
    var: Var | None
    offset: int = 0


@dataclass(slots=True, frozen=True)
class Special:
    name: str


@dataclass(slots=True, frozen=True)
class Addr:
    base: Any  # Reg, Sym or Imm
    offset: int


@dataclass(slots=True, frozen=True)
class Vec:
    items: tuple[Any, ...]


@dataclass(slots=True, frozen=True)
class Pair:
    """The two destinations `d|p` of an instruction."""

    first: Any
    second: Any


@dataclass(slots=True, frozen=True)
class Not:
    reg: Any


@dataclass(slots=True, frozen=True)
class Part:
    """An operand such as `x.b0` or `x.h10`: the part or parts of a register that a video instruction reads or
    writes."""

    of: Any
    selector: str


@dataclass(slots=True, frozen=True)
class Negated:
    """A negated operand, `-x`."""

    of: Any


@dataclass(slots=True, frozen=True)
class Unread:
    """An operand of an instruction that is not emulated, kept as text."""

    text: str


@dataclass(slots=True, frozen=True)
class Tuple:
    items: tuple[Any, ...]


class Sink:
    """`_`: a destination that is not written."""


SINK = Sink()


@dataclass(slots=True, eq=False)
class Instruction:
    opcode: str
    operands: tuple[Any, ...]
    guard: tuple[Reg, bool] | None  # register, negated
    line: int
    loc: int  # index into Module.locations
    text: str
    base: str = field(init=False)  # the opcode without its modifiers

    def __post_init__(self) -> None:
        self.base = self.opcode.split(".", 1)[0]

    def error(self, reason: str) -> PtxError:
        return PtxError(self.line, self.text, reason)


@dataclass(slots=True, frozen=True)
class Prototype:
    returns: tuple[Var, ...]
    params: tuple[Var, ...]


@dataclass(slots=True, eq=False)
class Function:
    """A function. `body` has its Instructions and label names (str) in order; `tables` has the `.branchtargets` and
    `.calltargets` by label.

    `persistent` are the ids of `.param` variables that must keep their values while the thread is suspended.
    """

    name: str
    kernel: bool
    visible: bool
    line: int
    returns: tuple[Var, ...] = ()
    params: tuple[Var, ...] = ()
    body: list[Any] | None = None
    registers: list[Reg] = field(default_factory=list)
    variables: list[Var] = field(default_factory=list)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, Prototype] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    persistent: set[int] = field(default_factory=set)

    def offsets(self) -> tuple[list[int], int]:
        """The offset of each parameter in the parameter buffer, and the size of the buffer."""
        offsets, end = [], 0
        for v in self.params:
            offsets.append(-(-end // v.align) * v.align)
            end = offsets[-1] + v.size
        return offsets, end

    def thread_limit(self) -> int | None:
        """The maximum number of threads of a block, by .maxntid or .reqntid. None if the function has neither."""
        limit = self.directives.get("maxntid") or self.directives.get("reqntid")
        return math.prod(limit) if limit else None


@dataclass(slots=True, frozen=True)
class Location:
    """A source position. `inlined` are the (file, line) of the calls by which its code was inlined, innermost first."""

    file: str
    line: int
    inlined: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, eq=False)
class Module:
    version: tuple[int, int]
    target: str
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Var] = field(default_factory=dict)
    locations: list[Location] = field(default_factory=lambda: [Location("", 0)])

    def source(self, line: int) -> tuple[str, int] | None:
        """(file, line) of the source that a line of the PTX comes from, by the line information before it."""
        before = [fn for fn in self.functions.values() if fn.body and fn.line <= line]
        body = max(before, key=lambda fn: fn.line).body if before else None
        known = [(ins.line, ins.loc) for ins in body or () if isinstance(ins, Instruction) and ins.line <= line]
        found = max(known, default=(0, 0))[1]
        location = self.locations[found]
        return (location.file, location.line) if found and location.file != "?" else None
