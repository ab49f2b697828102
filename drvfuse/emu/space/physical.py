# SPDX-License-Identifier: Apache-2.0
"""The physical memory of a window: sparse files in memory, parts of which are mapped at addresses of the window.

One file holds the data. A second file holds the shadow: which bytes are addressable and initialised. With a race
detector, a third file holds its cells. A mapping maps the corresponding parts of all files. So if a byte of physical
memory has several addresses, they share its content, its shadow and its state in the race detector.
"""

from __future__ import annotations

import os

from ...errors import ArgumentError
from .. import abi
from . import pages
from .allocation import Physical
from .pages import GRANULE, Ranges

_LARGEST = 1 << 42  # the most bytes of each file of a `PhysicalMemory`


class PhysicalMemory:
    """The physical memory of one window. `files` are its file descriptors, which the owner of this object closes."""

    def __init__(self, cells: bool) -> None:
        names = ("data", "shadow", "cells")[: 3 if cells else 2]
        self.files = [os.memfd_create(f"drvfuse-{name}", os.MFD_CLOEXEC) for name in names]
        self._space = Ranges(0, _LARGEST, "the files of physical memory")
        self._size = 0

    def create(self, nbytes: int, device: int | None) -> Physical:
        """New zeroed memory of `nbytes`, a multiple of the granule. `Mappings.map` gives it addresses."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise ArgumentError("nbytes", nbytes, f"a positive multiple of {GRANULE}")
        offset = self._space.take(nbytes, GRANULE)
        if offset + nbytes > self._size:
            self._size = offset + nbytes
            for file, _, size in self._parts(0, self._size):
                os.ftruncate(file, size)
        return Physical(nbytes, device, offset)

    def release(self, physical: Physical) -> None:
        """Release the handle of an allocation. The memory stays while it is mapped."""
        if physical.released:
            raise ArgumentError("physical", "released already", "a live physical allocation")
        physical.released = True
        self._drop(physical)

    def map(self, address: int, nbytes: int, physical: Physical, offset: int) -> None:
        """Map `nbytes` of a physical allocation, from its byte `offset` on, at an address of the window."""
        parts = self._parts(physical.offset + offset, nbytes)
        for area, (file, at, size) in zip(self._areas(address), parts, strict=True):
            pages.map_file(area, size, file, at)
        physical.mappings += 1

    def unmap(self, address: int, nbytes: int, physical: Physical) -> None:
        """Undo `map`. The addresses read as zero afterwards."""
        for area, (_, _, size) in zip(self._areas(address), self._parts(0, nbytes), strict=True):
            pages.map_empty(area, size)
        physical.mappings -= 1
        self._drop(physical)

    def _areas(self, address: int) -> tuple[int, ...]:
        """The addresses of the data, the shadow and (if there are cells) the cell of an address of the window."""
        return (address, address + abi.SHADOW_OFFSET, pages.cell_address(address))[: len(self.files)]

    def _parts(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """(file, offset, bytes) of the part of each file that belongs to `nbytes` of data at `offset`."""
        cells = offset >> abi.LINE_SHIFT << 2, nbytes >> abi.LINE_SHIFT << 2
        ranges = ((offset, nbytes), (offset, nbytes), cells)[: len(self.files)]
        return [(file, *part) for file, part in zip(self.files, ranges, strict=True)]

    def _drop(self, physical: Physical) -> None:
        """Give the pages of an allocation back, if it is released and not mapped."""
        if physical.released and physical.mappings == 0:
            for file, at, size in self._parts(physical.offset, physical.nbytes):
                pages.punch(file, at, size)
            self._space.give(physical.offset, physical.nbytes)
