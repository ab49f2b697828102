# SPDX-License-Identifier: Apache-2.0
"""Values that a stream writes to memory, and values in memory for which a stream waits.

They order accesses in the race detector (`native/race_values.cuh`):

- A write is a strong store of one word at system scope, with release semantics: all that precedes the write in its
  stream happens before what acquires the value. With NO_MEMORY_BARRIER a write is relaxed, and orders nothing.
- A wait is a strong load at system scope, with acquire semantics. The detector checks a wait once, when the wait finds
  its value. What follows the wait in its stream happens after the release whose value the wait has read: a write of
  another stream, or a release of a kernel at system scope.

So accesses to a word by such writes and waits alone are no race. A plain store to the word by a concurrent kernel is a
race, just as if a kernel polled the word.

The machine does not use this order to start operations: only a wait itself holds the later work of its stream back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .work import Access, Command

if TYPE_CHECKING:
    from ..machine import Machine

GEQ, EQ, AND, NOR = range(4)  # CUstreamWaitValue_flags
_CONDITIONS = {GEQ: "at least {} (cyclically)", EQ: "{}", AND: "with a bit of {}", NOR: "without a bit of {}"}


@dataclass(frozen=True)
class WriteValue:
    """A write of the word of `size` bytes at `address`. With `barrier`, the write is a release."""

    address: int
    value: int
    size: int
    barrier: bool = True

    writes: ClassVar[bool] = True

    def proceed(self, machine: Machine) -> bool:
        """Write the word. Returns True: a write never waits."""
        machine.window.view(self.address, self.size).view(f"<u{self.size}")[0] = self.value
        if machine.window.contains(self.address, self.size):
            machine.window.mark_initialised(self.address, self.size)
        return True


@dataclass(frozen=True)
class WaitValue:
    """A wait until the word of `size` bytes at `address` satisfies a condition."""

    address: int
    value: int
    size: int
    condition: int

    writes: ClassVar[bool] = False
    barrier: ClassVar[bool] = True

    def proceed(self, machine: Machine) -> bool:
        """True if the condition is satisfied."""
        found, bits = self.found(machine), 8 * self.size
        mask = (1 << bits) - 1
        if self.condition == GEQ:
            return not ((found - self.value) & mask) >> (bits - 1)
        if self.condition == EQ:
            return found == self.value
        return bool((found & self.value if self.condition == AND else ~(found | self.value)) & mask)

    def found(self, machine: Machine) -> int:
        """The present value of the word."""
        return int(machine.window.view(self.address, self.size).view(f"<u{self.size}")[0])

    def __str__(self) -> str:
        return f"a word at 0x{self.address:x} to be {_CONDITIONS[self.condition].format(hex(self.value))}"


@dataclass(frozen=True, eq=False)
class ValueOps(Command):
    """Writes and waits of a stream, executed one after another. The program's memory barriers between them are left
    out, as they would have no effect.
    """

    operations: tuple[WriteValue | WaitValue, ...]

    @property
    def title(self) -> str:
        kinds = {o.writes for o in self.operations}
        return "stream memory operations" if len(kinds) != 1 else "stream write" if kinds.pop() else "stream wait"

    def accesses(self) -> tuple[Access, ...]:
        return tuple(Access(o.address, o.size, o.writes) for o in self.operations)

    def touches(self) -> Iterable[Access]:
        """No ranges: `Progress` has the race detector check each word when it is written or read (`Detector.value`)."""
        return ()
