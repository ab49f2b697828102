# SPDX-License-Identifier: Apache-2.0
"""Finds the allocation or mapping that holds an address of a window, or that held it until it was freed."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator

from ..abi import Kind
from .allocation import Allocation, Mapping, nearby

_REMEMBERED = 4096  # the most freed allocations that are remembered for messages about faults
_NEAR_NULL = 1 << 16  # addresses below this one count as null pointers with an offset


class Index:
    """The live allocations and mappings of a window that spans `[base, end)`, and those that were freed last."""

    def __init__(self, base: int, end: int) -> None:
        self._base, self._end = base, end
        self._live: dict[int, Allocation] = {}
        self._starts: list[int] = []  # sorted keys of _live
        self._mappings: dict[int, Mapping] = {}
        self._mapping_starts: list[int] = []  # sorted keys of _mappings
        self._aliases: dict[int, Allocation] = {}
        self._freed: OrderedDict[int, Allocation] = OrderedDict()

    # Changes ---------------------------------------------------------------------------------------------------------

    def add(self, allocation: Allocation) -> None:
        """Add an allocation, at addresses where there is none."""
        self._live[allocation.address] = allocation
        bisect.insort(self._starts, allocation.address)

    def remove(self, address: int) -> Allocation | None:
        """Remove the allocation that begins at an address, and return it; None if there is none."""
        allocation = self._live.pop(address, None)
        if allocation is not None:
            self._starts.pop(bisect.bisect_left(self._starts, address))
        return allocation

    def add_mapping(self, address: int, mapping: Mapping) -> None:
        """Add a mapping, at addresses where there is none."""
        self._mappings[address] = mapping
        bisect.insort(self._mapping_starts, address)

    def remove_mapping(self, address: int) -> None:
        """Remove the mapping that begins at an address, and remember it as freed."""
        mapping = self._mappings.pop(address)
        self._mapping_starts.pop(bisect.bisect_left(self._mapping_starts, address))
        self.remember(mapping.at(address))

    def add_alias(self, alias: Allocation) -> None:
        """Add a range at which the runtime accesses memory of a multicast object. Only `nearest` finds the range."""
        self._aliases[alias.address] = alias

    def remove_alias(self, address: int) -> None:
        """Remove what `add_alias` added."""
        del self._aliases[address]

    def remember(self, allocation: Allocation) -> None:
        """Remember an allocation or mapping as freed."""
        self._freed.pop(allocation.address, None)
        self._freed[allocation.address] = allocation
        if len(self._freed) > _REMEMBERED:
            self._freed.popitem(last=False)

    # Look-ups --------------------------------------------------------------------------------------------------------

    def find(self, address: int) -> Allocation | None:
        """The live allocation or mapping that holds an address, or None."""
        i = bisect.bisect_right(self._starts, address) - 1
        if i >= 0 and (allocation := self._live[self._starts[i]]).holds(address):
            return allocation
        found = next(self.mapped(address, 1), None)
        return found[1].at(found[0]) if found else None

    def freed(self, address: int) -> Allocation | None:
        """The allocation or mapping that held an address and was freed, or None if it is not remembered any more, or if
        the address is in use again.
        """
        if self.find(address) is None:
            for gone in reversed(self._freed.values()):
                if gone.holds(address):
                    return gone
        return None

    def lent(self) -> list[Allocation]:
        """The allocations that the native engine divides into pieces and lends to launches (`Window.scratch`)."""
        return [allocation for allocation in self._live.values() if allocation.lent]

    def mapped(self, address: int, nbytes: int) -> Iterator[tuple[int, Mapping]]:
        """The mappings that overlap a range, each with its address, in ascending order."""
        i = max(bisect.bisect_right(self._mapping_starts, address) - 1, 0)
        for start in self._mapping_starts[i:]:
            mapping = self._mappings[start]
            if start >= address + nbytes:
                return
            if start + mapping.nbytes > address:
                yield start, mapping

    def same(self, address: int) -> list[int]:
        """All addresses at which the byte at an address is mapped. The given address is the first one."""
        found = next(self.mapped(address, 1), None)
        if found is None or found[1].physical is None:
            return [address]
        start, mapping = found
        offset = mapping.offset + address - start  # the offset of the byte in the physical memory
        places = [
            other + offset - m.offset
            for other, m in self._mappings.items()
            if m.physical is mapping.physical and 0 <= offset - m.offset < m.nbytes
        ]
        return [address, *(place for place in places if place != address)]

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether every byte of a range is allocated or mapped. Several adjacent mappings may make up the range."""
        end = address + nbytes
        while address < end:
            allocation = self.find(address)
            if allocation is None or allocation.kind is Kind.MULTICAST:
                return False
            address = allocation.address + allocation.nbytes
        return True

    def nearest(self, address: int) -> str:
        """Where an address lies, for messages about faults: the allocation or mapping that holds it or is nearest to
        it, in words. Memory that the native engine lends to launches does not count.
        """
        for bound in self._aliases.values():
            if bound.holds(address):
                at = f"{address - bound.address} bytes into {bound.nbytes} bytes of device {bound.device}"
                return f"{at}, which are bound to a multicast object"
        holder, gone = self.find(address), self.freed(address)
        if holder is not None and not holder.lent:
            return f"{nearby(address, holder.address, holder.nbytes)} {holder}"
        if gone is not None:
            return f"{nearby(address, gone.address, gone.nbytes)} {gone}, which was freed"
        if address < _NEAR_NULL:
            return "outside of device memory: a null pointer, or close to one"
        known = [a for a in self._live.values() if not a.lent]
        known += [mapping.at(start) for start, mapping in self._mappings.items()]
        if not known:
            return "no device memory: nothing is allocated"
        near = min(known, key=lambda a: max(a.address - address, address - (a.address + a.nbytes) + 1))
        if not self._base <= address < self._end:
            return "outside of device memory, as is memory of the host that the driver does not know"
        return f"{nearby(address, near.address, near.nbytes)} {near}"
