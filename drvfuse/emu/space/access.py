# SPDX-License-Identifier: Apache-2.0
"""What the devices may do with each granule of a window, as the native runtime reads it: one word for each."""

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
        """Say what a range is, and that no device may access it."""
        self.words(address, nbytes)[:] = word

    def permit(self, address: int, nbytes: int, read_mask: int, write_mask: int) -> None:
        """Say which devices may read and write a range; replaces the former masks."""
        words = self.words(address, nbytes)
        words[:] = (words & ~_MASKS) | np.uint32(read_mask | write_mask << 8)

    def take_over(self, other: AccessTable, until: int) -> None:
        """Say of all memory in front of an address what another table says it is; no device may access it."""
        if until > self._base:
            self.words(self._base, until - self._base)[:] = other.words(self._base, until - self._base) & ~_MASKS
