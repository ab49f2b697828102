# SPDX-License-Identifier: Apache-2.0
"""The access rights of the devices, one word per granule of a window, which the native runtime reads."""

from __future__ import annotations

import ctypes

import numpy as np

from .. import abi
from . import pages

_MASKS = np.uint32(0x0000FFFF)


class AccessTable:
    """The access words of one process (`window`'s docstring has the format).

    All tables of a window say the same of what memory is (owner and kind); which devices may read and write it is said
    by the table of the process whose address it is, and by no other. `name` is that of the process, for messages.
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
        """The words of the granules that a range touches, to be read or written."""
        first = (address - self._base) >> abi.GRANULE_SHIFT
        last = (address + nbytes - 1 - self._base) >> abi.GRANULE_SHIFT
        return self._all[first : last + 1]

    def describe(self, address: int, nbytes: int, word: int) -> None:
        """Set the owner and the kind of a range, with access for no device."""
        self.words(address, nbytes)[:] = word

    def permit(self, address: int, nbytes: int, read_mask: int, write_mask: int) -> None:
        """Set the devices that may read and write a range; replaces the former masks."""
        words = self.words(address, nbytes)
        words[:] = (words & ~_MASKS) | np.uint32(read_mask | write_mask << 8)

    def take_over(self, other: AccessTable, until: int) -> None:
        """Copy owner and kind of all memory below an address from another table, with access for no device."""
        if until > self._base:
            self.words(self._base, until - self._base)[:] = other.words(self._base, until - self._base) & ~_MASKS
