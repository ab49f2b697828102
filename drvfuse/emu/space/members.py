# SPDX-License-Identifier: Apache-2.0
"""Where the memory behind multicast addresses is, as the native runtime reads it.

A multicast object has pieces of 2 MiB. For each piece and each place in the team there is the address of the memory
that the device has bound there, or 0. All mappings of an object share one such table (`Members`); `Teams` is the list
of the mappings. Both change only between calls of the native runtime.
"""

from __future__ import annotations

import ctypes

import numpy as np

from .. import abi
from ..abi import structs

PIECE = 1 << abi.PIECE_SHIFT


class Members:
    """The members of every piece of one multicast object of `nbytes` (a multiple of PIECE), for `size` devices."""

    def __init__(self, nbytes: int, size: int) -> None:
        self.size = size
        self._addresses = np.zeros((nbytes // PIECE, abi.MEMBERS), np.uint64)

    @property
    def address(self) -> int:
        return int(self._addresses.ctypes.data)

    def bind(self, member: int, offset: int, nbytes: int, address: int) -> None:
        """Put memory at `address` behind part of the object, for one place in the team."""
        first, count = offset // PIECE, nbytes // PIECE
        self._addresses[first : first + count, member] = address + np.arange(count, dtype=np.uint64) * np.uint64(PIECE)

    def unbind(self, member: int, offset: int, nbytes: int) -> None:
        self._addresses[offset // PIECE : (offset + nbytes) // PIECE, member] = 0

    def at(self, offset: int) -> list[int]:
        """The addresses of the members' bytes at an offset, 0 where nothing is bound."""
        bases = self._addresses[offset // PIECE, : self.size]
        return [int(base) + offset % PIECE if base else 0 for base in bases]


class Teams:
    """The multicast addresses of a machine. `address` is a `structs.Teams`, which stays where it is."""

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[int, Members]] = {}
        self._entries: ctypes.Array[structs.Team] | None = None
        self._header = structs.Teams()

    @property
    def address(self) -> int:
        return ctypes.addressof(self._header)

    def add(self, address: int, nbytes: int, members: Members) -> None:
        self._mapped[address] = nbytes, members
        self._write()

    def remove(self, address: int) -> None:
        del self._mapped[address]
        self._write()

    def members(self, address: int) -> list[int] | None:
        """What `Members.at` tells of a multicast address; None for any other address."""
        for start, (nbytes, members) in self._mapped.items():
            if start <= address < start + nbytes:
                return members.at(address - start)
        return None

    def _write(self) -> None:
        found = [structs.Team(start, n, m.address, m.size) for start, (n, m) in self._mapped.items()]
        self._entries = (structs.Team * max(len(found), 1))(*found)
        self._header.first, self._header.count = ctypes.addressof(self._entries), len(found)
