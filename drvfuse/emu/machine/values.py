# SPDX-License-Identifier: Apache-2.0
"""Values that a stream writes to memory, and values of memory that it waits for.

Memory ordering, as the race detector has it (`native/race_values.cuh`). A write is a strong store of one word with the
scope of the system, and a release: whoever acquires it knows all that its operation knew, which is all that was in
front of it in its stream; with NO_MEMORY_BARRIER it is relaxed, so nothing is known by it. A wait is a strong load of
the same scope, and an acquire: it is judged once, when it finds its value, and what follows it in its stream knows what
the write that it saw has published: by another stream's write, or by a kernel's release at the scope of the system. So
a word that all sides access by such operations is no race, and a plain store by a kernel that runs meanwhile is one, as
it is in a kernel that polls. The driver does not know of this order: nothing but the wait itself holds work back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .work import Access, Command

if TYPE_CHECKING:
    from .machine import Machine

GEQ, EQ, AND, NOR = range(4)  # CUstreamWaitValue_flags
_CONDITIONS = {GEQ: "at least {} (cyclically)", EQ: "{}", AND: "with a bit of {}", NOR: "without a bit of {}"}


@dataclass(frozen=True)
class WriteValue:
    """Write the word of `size` bytes at `address`. `barrier`: a release."""

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
    """Wait until the word of `size` bytes at `address` fulfils a condition."""

    address: int
    value: int
    size: int
    condition: int

    writes: ClassVar[bool] = False
    barrier: ClassVar[bool] = True

    def proceed(self, machine: Machine) -> bool:
        """True if the condition is fulfilled."""
        found, bits = self.found(machine), 8 * self.size
        mask = (1 << bits) - 1
        if self.condition == GEQ:
            return not ((found - self.value) & mask) >> (bits - 1)
        if self.condition == EQ:
            return found == self.value
        return bool((found & self.value if self.condition == AND else ~(found | self.value)) & mask)

    def found(self, machine: Machine) -> int:
        """The value of the word now."""
        return int(machine.window.view(self.address, self.size).view(f"<u{self.size}")[0])

    def __str__(self) -> str:
        return f"a word at 0x{self.address:x} to be {_CONDITIONS[self.condition].format(hex(self.value))}"


@dataclass(frozen=True, eq=False)
class ValueOps(Command):
    """Writes and waits, one after another; a memory barrier between two of them would order nothing more."""

    operations: tuple[WriteValue | WaitValue, ...]

    @property
    def title(self) -> str:
        kinds = {o.writes for o in self.operations}
        return "stream memory operations" if len(kinds) != 1 else "stream write" if kinds.pop() else "stream wait"

    def accesses(self) -> tuple[Access, ...]:
        return tuple(Access(o.address, o.size, o.writes) for o in self.operations)

    def touches(self) -> Iterable[Access]:
        """Nothing: each word that is written or read is judged by itself (`Detector.value`)."""
        return ()
