# SPDX-License-Identifier: Apache-2.0
"""The access words of a window: for each granule, what its memory is and which devices may access it. The native
runtime reads them.
"""

from __future__ import annotations

import ctypes

import numpy as np

from .. import abi
from ..abi import Kind
from . import pages

_MASKS = np.uint32(0x0000FFFF)
_OWNERS = {Kind.SHARED: abi.OWNER_SHARED, Kind.LOCAL: abi.OWNER_LOCAL, Kind.PARAM: abi.OWNER_LOCAL}


class AccessTable:
    """The access words of one process; the docstring of `space/window.py` has their format.

    All tables of a window agree on the owner and the kind of memory. The table of the process that owns an address says
    which devices may read and write it; in all other tables no device may access the address. `name` is the name of the
    process, for messages. `address` is the address of the words; if it is None, the constructor allocates the words.
    """

    def __init__(self, base: int, nbytes: int, address: int | None = None, name: str = "") -> None:
        self.name = name
        self._base = base
        count = nbytes >> abi.GRANULE_SHIFT
        if address is None:
            self._arena = pages.arena(max(count * 4, 4))
            self._all = np.frombuffer(self._arena, np.uint32, count)
        else:
            self._all = np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))
        self.address = int(self._all.ctypes.data)

    def words(self, address: int, nbytes: int) -> np.ndarray:
        """The access words of all granules that a range of addresses touches, as a writable view."""
        first = (address - self._base) >> abi.GRANULE_SHIFT
        last = (address + nbytes - 1 - self._base) >> abi.GRANULE_SHIFT
        return self._all[first : last + 1]

    def describe(self, address: int, nbytes: int, word: int) -> None:
        """Set the access words of a range to `word`, which has the owner and the kind, and access for no device."""
        self.words(address, nbytes)[:] = word

    def permit(self, address: int, nbytes: int, read_mask: int, write_mask: int) -> None:
        """Set the devices that may read and write a range, as masks. They replace the masks that were set before."""
        words = self.words(address, nbytes)
        words[:] = (words & ~_MASKS) | np.uint32(read_mask | write_mask << 8)

    def take_over(self, other: AccessTable, until: int) -> None:
        """Copy the owners and kinds of all memory below the address `until` from another table, with access for no
        device.
        """
        if until > self._base:
            self.words(self._base, until - self._base)[:] = other.words(self._base, until - self._base) & ~_MASKS


class AccessTables:
    """The access tables of a window of `nbytes` at `base`. `first` is the table of its first process."""

    def __init__(self, base: int, nbytes: int) -> None:
        self._base, self._nbytes = base, nbytes
        self.first = AccessTable(base, nbytes, pages.access_address(base))
        self._all = [self.first]

    def open(self, name: str, until: int) -> AccessTable:
        """Make a table for one more process. It copies the owners and kinds of all memory below the address `until`."""
        table = AccessTable(self._base, self._nbytes, name=name)
        table.take_over(self.first, until)
        self._all.append(table)
        return table

    def close(self, table: AccessTable) -> None:
        """Close a table of `open`. All memory of its process must have been freed."""
        self._all.remove(table)

    def describe(self, address: int, nbytes: int, device: int | None, kind: int) -> None:
        """Set the owner and the kind of a range in all tables, with access for no device. `device` is the owner, or
        None for memory that belongs to no device; `kind` is a `Kind` with flags.
        """
        if nbytes:
            owner = _OWNERS.get(Kind(kind & 0x3F), abi.OWNER_HOST) if device is None else device
            for table in self._all:
                table.describe(address, nbytes, owner << 16 | kind << 24)

    def permit(self, address: int, nbytes: int, read_mask: int, write_mask: int) -> None:
        """Set the devices that may read and write a range in all tables."""
        for table in self._all:
            table.permit(address, nbytes, read_mask, write_mask)
