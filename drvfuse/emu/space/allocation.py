# SPDX-License-Identifier: Apache-2.0
"""What can lie at an address of a window: an allocation, or a mapping of physical memory or of a multicast object."""

from __future__ import annotations

from dataclasses import dataclass

from ..abi import Kind
from .access import AccessTable
from .members import Members


@dataclass(frozen=True)
class Allocation:
    """A range `[address, address + nbytes)` that is allocated or mapped, or was until it was freed. `device` is the
    owner, None for memory of the host.

    If `lent`, the native engine lends the range to launches in pieces (`Window.scratch`), so it is no allocation of a
    program. `table` is the access table of the process that owns the address, None for memory that is lent.
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
    """Physical memory, which has no address of its own: `nbytes` bytes, from `offset` on, of the files of
    `PhysicalMemory`.

    `mappings` counts the ranges of addresses at which it is mapped. Its pages are given back when it is `released` and
    no mapping is left.
    """

    nbytes: int
    device: int | None
    offset: int
    mappings: int = 0
    released: bool = False


@dataclass
class Mapping:
    """What is mapped at a range of `nbytes` addresses: physical memory from its byte `offset` on, or a multicast object
    (`members`). `table` is the access table of the process that mapped it.
    """

    nbytes: int
    physical: Physical | None
    table: AccessTable
    offset: int = 0
    members: Members | None = None

    def at(self, address: int) -> Allocation:
        """The mapping as a range of addresses that begins at `address`."""
        device = None if self.physical is None else self.physical.device
        kind = Kind.MULTICAST if self.physical is None else Kind.MAPPED
        return Allocation(address, self.nbytes, device, kind, table=self.table)


def nearby(address: int, start: int, nbytes: int) -> str:
    """Where an address lies relative to a range, such as "8 bytes into". The caller appends the name of the range."""
    if address < start:
        return f"{start - address} bytes before"
    if address < start + nbytes:
        return f"{address - start} bytes into"
    return f"{address - start - nbytes} bytes past the end of"
