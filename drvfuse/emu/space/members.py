# SPDX-License-Identifier: Apache-2.0
"""The tables by which the native runtime finds the memory that is bound to a multicast address.

A multicast object has pieces of 2 MiB. Its table (`Members`) has, for each piece and each device, the address of the
memory that the device has bound there, or 0. All mappings of the object share the table. `Teams` is the list of all
mappings. Both change only between calls of the native runtime.
"""

from __future__ import annotations

import ctypes

import numpy as np

from .. import abi
from ..abi import structs

PIECE = 1 << abi.PIECE_SHIFT


class Members:
    """The memory that is bound to a multicast object of `nbytes`, a multiple of PIECE. `devices` are the devices of its
    team.
    """

    def __init__(self, nbytes: int) -> None:
        self.devices: list[int] = []
        self._addresses = np.zeros((nbytes // PIECE, abi.MEMBERS), np.uint64)

    @property
    def address(self) -> int:
        """The address of the table, for `abi.structs.Team.members`."""
        return int(self._addresses.ctypes.data)

    def bind(self, device: int, offset: int, nbytes: int, address: int) -> None:
        """Bind a device's memory at `address` to `nbytes` of the object, from its byte `offset` on."""
        first, count = offset // PIECE, nbytes // PIECE
        self._addresses[first : first + count, device] = address + np.arange(count, dtype=np.uint64) * np.uint64(PIECE)

    def unbind(self, device: int, offset: int, nbytes: int) -> None:
        """Undo `bind` for part of the object."""
        self._addresses[offset // PIECE : (offset + nbytes) // PIECE, device] = 0

    def unbound(self, offset: int) -> list[int]:
        """The devices of the team that have bound nothing at an offset of the object."""
        return [device for device in self.devices if not self._addresses[offset // PIECE, device]]

    def offset_of(self, address: int) -> tuple[int, int] | None:
        """Return (offset in the object, device) if `address` lies in memory that `bind` has bound: the offset to which
        that byte is bound, and the device that has bound it. Return None for other addresses.
        """
        inside = np.uint64(address) - self._addresses
        found = np.argwhere((self._addresses != 0) & (self._addresses <= address) & (inside < PIECE))
        if not len(found):
            return None
        piece, device = map(int, found[0])
        return piece * PIECE + int(inside[piece, device]), device


class Teams:
    """All multicast addresses of a machine, as the native runtime reads them. `address` is the address of an
    `abi.structs.Teams`, and never changes.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[int, Members]] = {}
        self._entries: ctypes.Array[structs.Team] | None = None
        self._header = structs.Teams()

    @property
    def address(self) -> int:
        return ctypes.addressof(self._header)

    def add(self, address: int, nbytes: int, members: Members) -> None:
        """Add a mapping of the first `nbytes` of a multicast object at an address."""
        self._mapped[address] = nbytes, members
        self._write()

    def remove(self, address: int) -> None:
        """Remove the mapping that begins at an address."""
        del self._mapped[address]
        self._write()

    def find(self, address: int) -> tuple[int, Members] | None:
        """(offset in the object, members of the object) of a multicast address. None for other addresses."""
        for start, (nbytes, members) in self._mapped.items():
            if start <= address < start + nbytes:
                return address - start, members
        return None

    def behind(self, address: int) -> tuple[int, int] | None:
        """Return (multicast address, device) if `address` lies in memory that `Members.bind` has bound to a mapped
        multicast object: the multicast address of that byte, and the device that has bound it. Return None for other
        addresses.
        """
        for start, (nbytes, members) in self._mapped.items():
            found = members.offset_of(address)
            if found is not None and found[0] < nbytes:
                return start + found[0], found[1]
        return None

    def _write(self) -> None:
        """Write the table that the native runtime reads."""
        found = [
            structs.Team(start, nbytes, members.address, sum(1 << device for device in members.devices))
            for start, (nbytes, members) in self._mapped.items()
        ]
        self._entries = (structs.Team * max(len(found), 1))(*found)
        self._header.first, self._header.count = ctypes.addressof(self._entries), len(found)
