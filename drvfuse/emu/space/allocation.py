# SPDX-License-Identifier: Apache-2.0
"""What can lie at an address of a window: an allocation, or a mapping of physical memory or of a multicast object."""

from __future__ import annotations

from dataclasses import dataclass

from ..abi import Kind
from .access import AccessTable
from .members import Members


@dataclass(frozen=True)
class Allocation:
    """A range `[address, address + nbytes)` that is allocated or mapped, or was before it was freed.

    `lent`: the engine hands the range out in pieces (`Window.scratch`), so it is no allocation of a user. `table` is
    the access table of the process that owns the address, None for memory that is lent.
    """

    address: int
    nbytes: int
    device: int | None
    kind: Kind
    lent: bool = False
    table: AccessTable | None = None

    def __str__(self) -> str:
        if self.lent:
            return f"{self.kind.name.lower()} memory of kernels at 0x{self.address:x}"
        owner = "" if self.device is None else f" of device {self.device}"
        process = f", of {self.table.name}" if self.table is not None and self.table.name else ""
        return f"{self.nbytes} bytes at 0x{self.address:x} ({self.kind.name.lower()}{owner}{process})"

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.nbytes


@dataclass
class Physical:
    """Physical memory: bytes at `offset` in the files of `PhysicalMemory`, without an address of their own.

    Its pages are given back when it was released and its last mapping is gone.
    """

    nbytes: int
    device: int | None
    offset: int
    mappings: int = 0
    released: bool = False


@dataclass
class Mapping:
    """What is mapped at a range: physical memory from its byte `offset` on, or a multicast object (`members`)."""

    nbytes: int
    physical: Physical | None
    table: AccessTable
    offset: int = 0
    members: Members | None = None

    def at(self, address: int) -> Allocation:
        """The range of the mapping, which begins at `address`."""
        device = None if self.physical is None else self.physical.device
        kind = Kind.MULTICAST if self.physical is None else Kind.MAPPED
        return Allocation(address, self.nbytes, device, kind, table=self.table)


def nearby(address: int, start: int, nbytes: int) -> str:
    """Where an address lies relative to a range, in words that go before the name of the range."""
    if address < start:
        return f"{start - address} bytes before"
    if address < start + nbytes:
        return f"{address - start} bytes into"
    return f"{address - start - nbytes} bytes past the end of"
