# SPDX-License-Identifier: Apache-2.0
"""The memory of an emulated machine: reserved addresses of this process, so that a device pointer is a host pointer.

A window has four parallel areas. They are only reserved: a page takes memory when it is touched first.

    data     WINDOW_BASE ...                what kernels and copies read and write
    shadow   data address + SHADOW_OFFSET   one byte for each byte of data: whether it is addressable, and initialised
    access   one u32 per 64 KiB granule     devices that may read (bits 0-7), write (8-15); owner (16-23), kind (24-31)
    cells    one u32 per line of 16 bytes   state of the race detector; only with a race detector

Further processes have access words of their own at other addresses (`access.py`). An address belongs to one process,
and no device may access it for another process.

Plain allocations (`alloc`, `host_alloc`, `scratch`) are anonymous memory. Each has granules of its own, with an
unused gap after them, and exactly the bytes that were asked for are addressable. Physical allocations (`mappings`,
`physical.py`) can be mapped at several addresses.

A freed address faults, and is given out again only when no fresh addresses are left. Nothing here is thread-safe: the
caller holds the machine's lock.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np

from ...errors import ArgumentError
from .. import abi
from ..abi import KIND_FULL, KIND_INITIALISED, Kind
from . import pages
from .access import AccessTable, AccessTables
from .allocation import Allocation
from .index import Index
from .mappings import Mappings
from .pages import GRANULE, Ranges, round_up
from .physical import PhysicalMemory

_LARGEST_GAP = 16 << 20  # bytes
_ALIGNMENT = 256  # bytes

log = logging.getLogger("drvfuse")


def _with_gap(nbytes: int) -> int:
    """The number of addresses that a plain allocation of `nbytes` takes: its granules, and an unused gap after them."""
    span = round_up(nbytes, GRANULE)
    return span + min(max(GRANULE, span), _LARGEST_GAP)


class Window:
    """`gib` GiB of reserved addresses, `[base, end)`, and what lies there.

    If the process may not reserve `gib` GiB (`ulimit -v`, strict overcommit), half of that is tried, then a quarter and
    so on, down to 256 MiB, and a warning is logged. Raises WindowError if 256 MiB cannot be reserved either. Several
    windows can be open in one process. A window that is dropped without `close` is unmapped when no view of it is left.

    Without `check_initialised` all memory counts as initialised from the start. With `cells`, there are cells for a
    race detector. The detector sets the attribute `forget` to a function (address, nbytes), which the window calls for
    memory that is freed. With `shares_host`, each piece of pinned memory is a file in memory, which other processes
    can map at the same addresses. Such a window takes the last free addresses, which those processes are least likely
    to use themselves.

    `mappings` has the reserved addresses and what is mapped there, `index` says what lies at an address.
    """

    def __init__(
        self,
        gib: int = abi.WINDOW_GIB,
        *,
        check_initialised: bool = True,
        cells: bool = False,
        shares_host: bool = False,
    ) -> None:
        if not 1 <= gib <= abi.SHADOW_OFFSET >> 30:
            raise ArgumentError("gib", gib, f"between 1 and {abi.SHADOW_OFFSET >> 30}")
        asked = gib << 30
        self.base, self.nbytes = pages.reserve(asked, cells, last=shares_host)
        if self.nbytes < asked:
            log.warning(
                "the emulated driver asked for %d GiB of address space and got %d MiB: the process's limit is too low "
                "(ulimit -v, vm.overcommit_memory). Allocations beyond it will fail; DRVFUSE_EMU_WINDOW_GIB sets it.",
                gib,
                self.nbytes >> 20,
            )
        self.end = self.base + self.nbytes
        self.shares_host, self.cells = shares_host, cells
        self.forget: Callable[[int, int], None] = lambda address, nbytes: None
        self._check_initialised = check_initialised
        self._addresses = Ranges(self.base + GRANULE, self.end, f"a window of {self.nbytes >> 20} MiB")
        self._tables = AccessTables(self.base, self.nbytes)
        self.index = Index(self.base, self.end)
        physical = PhysicalMemory(cells)
        self.mappings = Mappings(self._addresses, self._tables, self.index, physical, check_initialised)
        self._host_files: dict[int, int] = {}
        self._close_host_files = weakref.finalize(self, _close_all, self._host_files)
        self._close_host_files.atexit = False
        self._release = weakref.finalize(self, pages.unmap, self.base, self.nbytes, cells, *physical.files)
        self._release.atexit = False

    def close(self) -> None:
        """Give the addresses back. Every pointer into the window is invalid afterwards. Idempotent."""
        self._close_host_files()
        self._release()

    def contains(self, address: int, nbytes: int = 1) -> bool:
        """True if the range lies in the window, allocated or not."""
        return self.base <= address and address + nbytes <= self.end

    # Access ----------------------------------------------------------------------------------------------------------

    @property
    def table(self) -> AccessTable:
        """The access words of the first process."""
        return self._tables.first

    def open_table(self, name: str) -> AccessTable:
        """Make the table of access words of one more process, and return it."""
        table = self._tables.open(name, self._addresses.next)
        for lent in self.index.lent():
            table.permit(lent.address, lent.nbytes, *self.access(lent.address))
        return table

    def close_table(self, table: AccessTable) -> None:
        """Close a table of `open_table`. All memory of its process must have been freed."""
        self._tables.close(table)

    def set_access(
        self, address: int, nbytes: int, read_mask: int, write_mask: int, table: AccessTable | None = None
    ) -> None:
        """Set the devices that may read and write the granules of a range, which is mapped or allocated.

        The masks have one bit per device, and replace those that were set before. They hold for the process whose
        access words `table` has, by default the first process.
        """
        (table or self.table).permit(address, nbytes, read_mask, write_mask)

    def access(self, address: int, table: AccessTable | None = None) -> tuple[int, int]:
        """The masks of the devices that may read and write an address; (0, 0) if there is no memory."""
        if not self.contains(address):
            return 0, 0
        word = int((table or self.table).words(address, 1)[0])
        return word & 0xFF, word >> 8 & 0xFF

    # Plain allocations -----------------------------------------------------------------------------------------------

    def alloc(
        self,
        nbytes: int,
        device: int | None,
        read_mask: int,
        write_mask: int,
        *,
        kind: Kind = Kind.DEVICE,
        alignment: int = _ALIGNMENT,
        initialised: bool = False,
        table: AccessTable | None = None,
    ) -> int:
        """Allocate zeroed memory with exactly `nbytes` addressable bytes, and return its address. The bytes count as
        uninitialised unless `initialised`. For the masks and `table`, see `set_access`.
        """
        address = self.hold(nbytes, alignment)
        self.occupy(address, nbytes, device, read_mask, write_mask, kind=kind, initialised=initialised, table=table)
        return address

    def hold(self, nbytes: int, alignment: int = _ALIGNMENT) -> int:
        """Take addresses for a plain allocation of `nbytes`, and return the first. `occupy` puts an allocation at this
        address, `vacate` removes the allocation, and `give_back` gives the addresses back.
        """
        if nbytes <= 0:
            raise ArgumentError("nbytes", nbytes, "positive")
        return self._addresses.take(_with_gap(nbytes), max(alignment, GRANULE), nbytes)

    def occupy(
        self,
        address: int,
        nbytes: int,
        device: int | None,
        read_mask: int,
        write_mask: int,
        *,
        kind: Kind = Kind.DEVICE,
        initialised: bool = False,
        table: AccessTable | None = None,
    ) -> None:
        """Put an allocation at an address that `hold` has returned, where no allocation may be at present. For the
        other arguments, see `alloc`.
        """
        table = table or self.table
        self._place(Allocation(address, nbytes, device, kind, table=table), initialised)
        table.permit(address, round_up(nbytes, GRANULE), read_mask, write_mask)

    def scratch(self, nbytes: int, kind: Kind) -> int:
        """Allocate memory that the native engine divides into pieces (shared memory, local memory, parameters) and
        lends to kernels of all processes, and return its address. All of it is addressable.
        """
        size = round_up(nbytes, GRANULE)
        address = self.hold(size)
        self._place(Allocation(address, size, None, kind, lent=True), False)
        self._tables.permit(address, size, 0xFF, 0 if kind is Kind.PARAM else 0xFF)
        return address

    def free(self, address: int) -> None:
        """Free what `alloc`, `host_alloc` or `scratch` returned. From now on, accesses to it are faults."""
        self.give_back(address, self.vacate(address))

    def vacate(self, address: int) -> int:
        """Free an allocation and return how many bytes it had. Its addresses stay taken: `occupy` may put another
        allocation there.
        """
        allocation = self.index.remove(address)
        if allocation is None:
            raise ArgumentError("address", f"0x{address:x}", "the address of a live allocation")
        span = round_up(allocation.nbytes, GRANULE)
        self.forget(address, span)
        file = self._host_files.pop(address, None)
        if file is not None:
            pages.map_empty(address, span)
            os.close(file)
        pages.drop(address, span)
        pages.drop(address + abi.SHADOW_OFFSET, span)
        if allocation.lent:
            self._tables.describe(address, span, None, Kind.NONE)
        else:
            self._tables.describe(address, span, allocation.device, Kind.FREED)
            self.index.remember(allocation)
        return allocation.nbytes

    def give_back(self, address: int, nbytes: int) -> None:
        """Give back the addresses that `hold` took for `nbytes`. No allocation may be there at present."""
        self._addresses.give(address, _with_gap(nbytes))

    def _place(self, allocation: Allocation, initialised: bool) -> None:
        """Enter a plain allocation in the access words, the shadow and the index, with access for no device."""
        address, nbytes = allocation.address, allocation.nbytes
        kind = allocation.kind | (KIND_INITIALISED if initialised or not self._check_initialised else 0)
        whole = nbytes & ~(GRANULE - 1)
        self._tables.describe(address, round_up(nbytes, GRANULE), allocation.device, kind)
        self._tables.describe(address, whole, allocation.device, kind | KIND_FULL)
        if whole < nbytes:
            ctypes.memset(address + whole + abi.SHADOW_OFFSET, abi.SHADOW_ADDRESSABLE, nbytes - whole)
        self.index.add(allocation)

    # Memory of the host ----------------------------------------------------------------------------------------------

    def host_alloc(self, nbytes: int, table: AccessTable | None = None) -> int:
        """Allocate pinned host memory, and return its address. Every device of its process may access it, and it counts
        as initialised.
        """
        address = self.alloc(nbytes, None, 0xFF, 0xFF, kind=Kind.HOST, initialised=True, table=table)
        if self.shares_host:
            self._host_files[address] = file = os.memfd_create("drvfuse-pinned", os.MFD_CLOEXEC)
            span = round_up(nbytes, mmap.PAGESIZE)
            os.ftruncate(file, span)
            pages.map_file(address, span, file, 0)
        return address

    def host_file(self, address: int) -> int:
        """The file descriptor of the pinned memory that begins at an address (`shares_host`). The window closes it."""
        return self._host_files[address]

    def map_host(self, nbytes: int, file: int, offset: int, table: AccessTable | None = None) -> int:
        """Map `nbytes` of an open file, from its byte `offset` on, and return the address. The host has mapped the
        file, too. Every device of the process may access the memory, which counts as initialised.
        """
        inset = offset % mmap.PAGESIZE
        span = round_up(inset + nbytes, GRANULE)
        start = self._addresses.take(span + GRANULE, GRANULE, nbytes)
        address, end = start + inset, start + inset + nbytes
        pages.map_file(start, round_up(inset + nbytes, mmap.PAGESIZE), file, offset - inset)
        self._tables.describe(start, span, None, Kind.HOST | KIND_INITIALISED)
        first, last = round_up(address, GRANULE), end & ~(GRANULE - 1)
        if first < last:
            self._tables.describe(first, last - first, None, Kind.HOST | KIND_INITIALISED | KIND_FULL)
        # In a granule of which only a part is mapped, the shadow says which bytes are addressable.
        for low, high in (
            (address, min(first, end)),
            (max(last, first), end),
        ):
            if low < high:
                ctypes.memset(low + abi.SHADOW_OFFSET, abi.SHADOW_ADDRESSABLE, high - low)
        table = table or self.table
        table.permit(start, span, 0xFF, 0xFF)
        self.index.add(Allocation(address, nbytes, None, Kind.HOST, table=table))
        return address

    def unmap_host(self, address: int) -> None:
        """Unmap what `map_host` returned. The file stays as it is."""
        gone = self.index.remove(address)
        assert gone is not None
        start = address & ~(GRANULE - 1)
        span = round_up(address + gone.nbytes - start, GRANULE)
        self.forget(start, span)
        for area in (start, start + abi.SHADOW_OFFSET):
            pages.map_empty(area, span)
        self._tables.describe(start, span, None, Kind.FREED)
        self.index.remember(gone)
        self._addresses.give(start, span + GRANULE)

    # Contents --------------------------------------------------------------------------------------------------------

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes of a range as a writable uint8 array, which keeps the window open. Writes to it do not mark the
        bytes as initialised.
        """
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.window = self  # type: ignore[attr-defined]
        return np.ctypeslib.as_array(memory)

    def mark_initialised(self, address: int, nbytes: int) -> None:
        """Mark the bytes of an allocated range as initialised, after the host has written them."""
        ctypes.memset(address + abi.SHADOW_OFFSET, abi.SHADOW_ADDRESSABLE | abi.SHADOW_INITIALISED, nbytes)

    def uninitialised(self, address: int, nbytes: int) -> int | None:
        """The address of the first byte of a range that was never written; None if all were."""
        if (self.table.words(address, nbytes) >> np.uint32(24) & np.uint32(KIND_INITIALISED)).all():
            return None
        missing = self.view(address + abi.SHADOW_OFFSET, nbytes) & abi.SHADOW_INITIALISED == 0
        first = int(missing.argmax())
        return address + first if missing[first] else None

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy device or host memory; the ranges may overlap. Afterwards, a byte of the destination counts as
        initialised if the byte of the source does.

        The caller has checked both ranges (`Index.covers`). An address outside the window is ordinary host memory, all
        of which counts as initialised.
        """
        ctypes.memmove(destination, source, nbytes)
        if not self.contains(destination, nbytes):
            return
        if not self.contains(source, nbytes) or self.uninitialised(source, nbytes) is None:
            self.mark_initialised(destination, nbytes)
        else:
            ctypes.memmove(destination + abi.SHADOW_OFFSET, source + abi.SHADOW_OFFSET, nbytes)
            self.view(destination + abi.SHADOW_OFFSET, nbytes)[:] |= abi.SHADOW_ADDRESSABLE


def _close_all(files: dict[int, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()
