# SPDX-License-Identifier: Apache-2.0
"""Reserved addresses of a window, and what is mapped there: physical memory and multicast objects."""

from __future__ import annotations

from ...errors import ArgumentError
from ..abi import KIND_FULL, KIND_INITIALISED, Kind
from .access import AccessTable, AccessTables
from .allocation import Allocation, Mapping, Physical
from .index import Index
from .members import Members, Teams
from .pages import GRANULE, Ranges
from .physical import PhysicalMemory


class Mappings:
    """The reservations of a window, and what is mapped in them. `physical` is the physical memory, `teams` are the
    multicast addresses.

    The window shares its free `addresses`, its access `tables` and its `index` with this object. No device may access a
    mapping before `Window.set_access`.
    """

    def __init__(
        self, addresses: Ranges, tables: AccessTables, index: Index, physical: PhysicalMemory, check_initialised: bool
    ) -> None:
        self._addresses, self._tables, self._index = addresses, tables, index
        self.physical = physical
        self.teams = Teams()
        self._reservations: dict[int, int] = {}
        self._bits = KIND_FULL if check_initialised else KIND_FULL | KIND_INITIALISED

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        """Reserve `nbytes` addresses, a multiple of the granule, and return the first. Nothing is mapped there."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise ArgumentError("nbytes", nbytes, f"a positive multiple of {GRANULE}")
        address = self._addresses.take(nbytes + GRANULE, max(alignment, GRANULE), nbytes)
        self._reservations[address] = nbytes
        return address

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Give back what `reserve` returned. Nothing may be mapped there any more."""
        if self._reservations.get(address) != nbytes:
            raise ArgumentError("address", f"0x{address:x} with {nbytes} bytes", "a reservation, with its size")
        if next(self._index.mapped(address, nbytes), None):
            raise ArgumentError("address", f"0x{address:x}", "a reservation with nothing mapped")
        del self._reservations[address]
        self._addresses.give(address, nbytes + GRANULE)

    def map(
        self, address: int, nbytes: int, physical: Physical, offset: int = 0, table: AccessTable | None = None
    ) -> None:
        """Map part of a physical allocation inside a reservation, for the process of `table`; None for the first
        process.
        """
        if nbytes <= 0 or nbytes % GRANULE or offset % GRANULE or offset + nbytes > physical.nbytes:
            raise ArgumentError(
                "nbytes, offset", (nbytes, offset), f"multiples of {GRANULE} inside the physical allocation"
            )
        self._require_vacant(address, nbytes)
        self._map(address, nbytes, physical, offset)
        self._index.add_mapping(address, Mapping(nbytes, physical, table or self._tables.first, offset))

    def map_multicast(self, address: int, nbytes: int, members: Members, table: AccessTable | None = None) -> None:
        """Map the first `nbytes` of a multicast object inside a reservation.

        There is no memory at these addresses. For an access to them, the native runtime accesses the memory that each
        device of the team has bound.
        """
        self._require_vacant(address, nbytes)
        self._index.add_mapping(address, Mapping(nbytes, None, table or self._tables.first, members=members))
        self.teams.add(address, nbytes, members)
        self._tables.describe(address, nbytes, None, Kind.MULTICAST | KIND_FULL)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap all mappings of a range. Raises ArgumentError unless the range consists of whole mappings."""
        inside = list(self._index.mapped(address, nbytes))
        if not inside or any(a < address or a + m.nbytes > address + nbytes for a, m in inside):
            raise ArgumentError("address", f"0x{address:x} with {nbytes} bytes", "a range of whole mappings")
        for start, mapping in inside:
            if mapping.physical is not None:
                self.physical.unmap(start, mapping.nbytes, mapping.physical)
            else:
                self.teams.remove(start)
            self._tables.describe(start, mapping.nbytes, mapping.at(start).device, Kind.FREED)
            self._index.remove_mapping(start)

    def alias(self, nbytes: int, physical: Physical, offset: int) -> int:
        """Map part of a physical allocation for the native runtime, and return the address. The runtime accesses memory
        that is bound to a multicast object by such addresses. No program gets them, and no device may access them.
        """
        address = self._addresses.take(nbytes + GRANULE, GRANULE, nbytes)
        self._map(address, nbytes, physical, offset)
        self._index.add_alias(Allocation(address, nbytes, physical.device, Kind.MAPPED))
        return address

    def drop_alias(self, address: int, nbytes: int, physical: Physical) -> None:
        """Give back what `alias` returned."""
        self.physical.unmap(address, nbytes, physical)
        self._tables.describe(address, nbytes, None, Kind.FREED)
        self._index.remove_alias(address)
        self._addresses.give(address, nbytes + GRANULE)

    def _map(self, address: int, nbytes: int, physical: Physical, offset: int) -> None:
        self.physical.map(address, nbytes, physical, offset)
        self._tables.describe(address, nbytes, physical.device, Kind.MAPPED | self._bits)

    def _require_vacant(self, address: int, nbytes: int) -> None:
        """Raise ArgumentError unless a range lies in one reservation and nothing is mapped there."""
        if not any(a <= address and address + nbytes <= a + n for a, n in self._reservations.items()):
            raise ArgumentError("address", f"0x{address:x}", f"the start of {nbytes} bytes inside one reservation")
        if next(self._index.mapped(address, nbytes), None):
            raise ArgumentError("address", f"0x{address:x}", "a range with nothing mapped")
