# SPDX-License-Identifier: Apache-2.0
"""The memory of the emulated machine: reserved addresses of this process, so that a device pointer is the host pointer.

Three parallel areas, all reserved without memory behind them (only touched pages cost anything):

    data     WINDOW_BASE ...                what kernels and copies read and write
    shadow   data address + SHADOW_OFFSET   one byte per byte: addressable, initialised
    access   one u32 per 64 KiB granule     devices that may read (bits 0-7), write (8-15); owner (16-23), kind (24-31)
    cells    one u32 per line of 16 bytes   state of the race detector; only if asked for

Further processes have access words of their own (`access`), elsewhere: an address belongs to one process, and to the
others it is memory that no device may access.

Plain allocations (`alloc`, `host_alloc`, `scratch`) are anonymous memory, each in granules of its own with a gap behind
it, and addressable exactly up to the size asked for. Physical allocations (`create`) are ranges of two sparse memory
files, one for data and one for shadow, so that every address they are mapped at sees one memory and one state of
initialisation; what may be accessed is a property of the address.

A freed address faults, and is given out again only when no fresh address space is left. Nothing here is thread-safe:
the caller holds the machine's lock.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...errors import ArgumentError
from .. import abi
from ..abi import KIND_FULL, KIND_INITIALISED, Kind
from . import pages
from .access import AccessTable
from .members import Members, Teams
from .pages import Ranges, WindowError, round_up

GRANULE = 1 << abi.GRANULE_SHIFT
_LARGEST_GAP = 16 << 20
_NEAR_NULL = 1 << 16
_REMEMBERED = 4096  # freed allocations that are remembered for messages about faults
_ALIGNMENT = 256

log = logging.getLogger("drvfuse")


_OWNERS = {Kind.SHARED: abi.OWNER_SHARED, Kind.LOCAL: abi.OWNER_LOCAL, Kind.PARAM: abi.OWNER_LOCAL}


@dataclass(frozen=True)
class Allocation:
    """A live or freed range: `[address, address + nbytes)`. `lent`: the engine hands it out in pieces (`scratch`),
    so it is nobody's allocation. `table` is that of the process whose address it is.
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


def _with_gap(nbytes: int) -> int:
    """The size of the addresses that a plain allocation takes: its granules, and an unused gap behind them."""
    span = round_up(nbytes, GRANULE)
    return span + min(max(GRANULE, span), _LARGEST_GAP)


def nearby(address: int, start: int, nbytes: int) -> str:
    """Where an address lies relative to a range, in words that go before the name of the range."""
    if address < start:
        return f"{start - address} bytes in front of"
    if address < start + nbytes:
        return f"{address - start} bytes into"
    return f"{address - start - nbytes} bytes behind the end of"


@dataclass
class Physical:
    """Memory without an address. Its pages go when it was released and the last mapping is gone."""

    nbytes: int
    device: int | None
    offset: int
    mappings: int = 0
    released: bool = False


@dataclass
class _Mapping:
    """Memory, from a byte of it on, or the members of a multicast object."""

    nbytes: int
    physical: Physical | None
    table: AccessTable
    offset: int = 0
    members: Members | None = None

    @property
    def device(self) -> int | None:
        return None if self.physical is None else self.physical.device

    @property
    def kind(self) -> Kind:
        return Kind.MULTICAST if self.physical is None else Kind.MAPPED


class Window:
    """Reserves `gib` GiB of addresses (and as much again for the shadow).

    Where the process may not reserve so much (`ulimit -v`, strict overcommit), takes half, and half again, down to
    256 MiB, and says so in the log. Raises WindowError where that fails too. Several windows can be open in one
    process. It spans `[base, end)`. One that is dropped without `close` goes when no view of it is left.
    Without `check_initialised` all memory counts as written from the start. With `cells`, the race detector sets
    `forget(address, nbytes)`, which is called for memory that is freed. With `shares_host`, each piece of pinned memory
    is a file in memory, which other processes can map; such a window takes the last addresses that are free, where
    those of other processes hardly are.
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
        self._check_initialised, self.shares_host = check_initialised, shares_host
        self.cells = cells
        self.forget: Callable[[int, int], None] = lambda address, nbytes: None
        self.table = AccessTable(self.base, self.nbytes, pages.access_address(self.base))
        self._tables = [self.table]
        self._addresses = Ranges(self.base + GRANULE, self.end)
        self._data_fd = os.memfd_create("drvfuse-data", os.MFD_CLOEXEC)
        self._shadow_fd = os.memfd_create("drvfuse-shadow", os.MFD_CLOEXEC)
        files = [self._data_fd, self._shadow_fd]
        if cells:
            self._cell_fd = os.memfd_create("drvfuse-cells", os.MFD_CLOEXEC)
            files.append(self._cell_fd)
        self._file = Ranges(0, 1 << 42)
        self._file_size = 0
        self._live: dict[int, Allocation] = {}
        self._starts: list[int] = []  # sorted keys of _live
        self._freed: OrderedDict[int, Allocation] = OrderedDict()
        self._reservations: dict[int, int] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._mapping_starts: list[int] = []
        self.teams = Teams()
        self._aliases: dict[int, Allocation] = {}
        self._host_files: dict[int, int] = {}
        self._close_host_files = weakref.finalize(self, _close_all, self._host_files)
        self._close_host_files.atexit = False
        self._release = weakref.finalize(self, pages.unmap, self.base, self.nbytes, cells, *files)
        self._release.atexit = False

    def close(self) -> None:
        """Give the addresses back. Every pointer into the window is dead afterwards. Idempotent."""
        self._close_host_files()
        self._release()

    def contains(self, address: int, nbytes: int = 1) -> bool:
        """True if the range lies in the window, allocated or not."""
        return self.base <= address and address + nbytes <= self.end

    def open_table(self, name: str) -> AccessTable:
        """The access words of one more process."""
        table = AccessTable(self.base, self.nbytes, name=name)
        table.take_over(self.table, self._addresses.next)
        for lent in (a for a in self._live.values() if a.lent):
            table.permit(lent.address, lent.nbytes, *self.access(lent.address))
        self._tables.append(table)
        return table

    def close_table(self, table: AccessTable) -> None:
        """Close a table of `open_table`. Everything of that process was freed."""
        self._tables.remove(table)

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
        """Zeroed memory of exactly `nbytes` addressable bytes, uninitialised unless asked. Masks: one bit a device, for
        the process of `table` (the window's first one where it is None).
        """
        address = self.hold(nbytes, alignment)
        self.occupy(address, nbytes, device, read_mask, write_mask, kind=kind, initialised=initialised, table=table)
        return address

    def hold(self, nbytes: int, alignment: int = _ALIGNMENT) -> int:
        """The address of room for a plain allocation, with nothing there yet (`occupy`, `vacate`, `give_back`)."""
        if nbytes <= 0:
            raise ArgumentError("nbytes", nbytes, "positive")
        address = self._addresses.take(_with_gap(nbytes), max(alignment, GRANULE))
        if address is None:
            raise WindowError(f"no room for {nbytes} bytes in a window of {self.nbytes >> 20} MiB")
        return address

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
        """Put an allocation, as `alloc` makes them, where `hold` found room for it and nothing is now."""
        span = round_up(nbytes, GRANULE)
        bits = KIND_INITIALISED if initialised or not self._check_initialised else 0
        whole = nbytes & ~(GRANULE - 1)
        table = table or self.table
        self._describe(address, span, device, kind | bits)
        self._describe(address, whole, device, kind | bits | KIND_FULL)
        table.permit(address, span, read_mask, write_mask)
        if whole < nbytes:
            ctypes.memset(address + whole + abi.SHADOW_OFFSET, abi.SHADOW_ADDRESSABLE, nbytes - whole)
        self._live[address] = Allocation(address, nbytes, device, kind, table=table)
        bisect.insort(self._starts, address)

    def host_alloc(self, nbytes: int, table: AccessTable | None = None) -> int:
        """Pinned host memory that every device of its process may access; it counts as initialised."""
        address = self.alloc(nbytes, None, 0xFF, 0xFF, kind=Kind.HOST, initialised=True, table=table)
        if self.shares_host:
            self._host_files[address] = file = os.memfd_create("drvfuse-pinned", os.MFD_CLOEXEC)
            span = round_up(nbytes, mmap.PAGESIZE)
            os.ftruncate(file, span)
            pages.map_file(address, span, file, 0)
        return address

    def host_file(self, address: int) -> int:
        """A descriptor of the pinned memory that begins at an address; it stays the window's (`shares_host`)."""
        return self._host_files[address]

    def map_host(self, nbytes: int, file: int, offset: int, table: AccessTable | None = None) -> int:
        """An address of part of an open file that the host has mapped too: pinned memory that every device of its
        process may access, and that counts as initialised.
        """
        inset = offset % mmap.PAGESIZE
        span = round_up(inset + nbytes, GRANULE)
        start = self._addresses.take(span + GRANULE, GRANULE)
        if start is None:
            raise WindowError(f"no room for {nbytes} bytes in a window of {self.nbytes >> 20} MiB")
        address, end = start + inset, start + inset + nbytes
        pages.map_file(start, round_up(inset + nbytes, mmap.PAGESIZE), file, offset - inset)
        self._describe(start, span, None, Kind.HOST | KIND_INITIALISED)
        first, last = round_up(address, GRANULE), end & ~(GRANULE - 1)
        if first < last:
            self._describe(first, last - first, None, Kind.HOST | KIND_INITIALISED | KIND_FULL)
        for at, until in ((address, min(first, end)), (max(last, first), end)):
            if at < until:
                ctypes.memset(at + abi.SHADOW_OFFSET, abi.SHADOW_ADDRESSABLE, until - at)
        table = table or self.table
        table.permit(start, span, 0xFF, 0xFF)
        self._live[address] = Allocation(address, nbytes, None, Kind.HOST, table=table)
        bisect.insort(self._starts, address)
        return address

    def unmap_host(self, address: int) -> None:
        """Give back what `map_host` returned; the file stays as it is."""
        gone = self._live.pop(address)
        self._starts.pop(bisect.bisect_left(self._starts, address))
        start = address & ~(GRANULE - 1)
        span = round_up(address + gone.nbytes - start, GRANULE)
        self.forget(start, span)
        for area in (start, start + abi.SHADOW_OFFSET):
            pages.map_empty(area, span)
        self._describe(start, span, None, Kind.FREED)
        self._remember(gone)
        self._addresses.give(start, span + GRANULE)

    def scratch(self, nbytes: int, kind: Kind) -> int:
        """Memory that the engine hands out itself in pieces (shared, local, parameters), to kernels of all processes:
        addressable throughout.
        """
        size, masks = round_up(nbytes, GRANULE), (0xFF, 0 if kind is Kind.PARAM else 0xFF)
        address = self.alloc(size, None, *masks, kind=kind)
        for table in self._tables:
            table.permit(address, size, *masks)
        self._live[address] = replace(self._live[address], lent=True, table=None)
        return address

    def free(self, address: int) -> None:
        """Free what `alloc`, `host_alloc` or `scratch` returned; its pages go, and accesses fault from now on."""
        self.give_back(address, self.vacate(address))

    def vacate(self, address: int) -> int:
        """As `free`, but the address is not given out again: `occupy` may put memory there.

        How many bytes there were.
        """
        allocation = self._live.pop(address, None)
        if allocation is None:
            raise ArgumentError("address", f"0x{address:x}", "the address of a live allocation")
        self._starts.pop(bisect.bisect_left(self._starts, address))
        span = round_up(allocation.nbytes, GRANULE)
        self.forget(address, span)
        file = self._host_files.pop(address, None)
        if file is not None:
            pages.map_empty(address, span)
            os.close(file)
        pages.drop(address, span)
        pages.drop(address + abi.SHADOW_OFFSET, span)
        if allocation.lent:
            self._describe(address, span, None, Kind.NONE)
        else:
            self._describe(address, span, allocation.device, Kind.FREED)
            self._remember(allocation)
        return allocation.nbytes

    def give_back(self, address: int, nbytes: int) -> None:
        """Give back the room that `hold` found for so many bytes, where nothing is now."""
        self._addresses.give(address, _with_gap(nbytes))

    # Physical memory and mappings ------------------------------------------------------------------------------------

    def create(self, nbytes: int, device: int | None) -> Physical:
        """Physical memory of `nbytes` (a multiple of the granule), reachable through `map` only."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise ArgumentError("nbytes", nbytes, f"a positive multiple of {GRANULE}")
        offset = self._file.take(nbytes, GRANULE)
        if offset is None:
            raise WindowError(f"no room for {nbytes} bytes of physical memory")
        if offset + nbytes > self._file_size:
            self._file_size = offset + nbytes
            os.ftruncate(self._data_fd, self._file_size)
            os.ftruncate(self._shadow_fd, self._file_size)
            if self.cells:
                os.ftruncate(self._cell_fd, self._file_size >> abi.LINE_SHIFT << 2)
        return Physical(nbytes, device, offset)

    def release(self, physical: Physical) -> None:
        """Drop the handle; the memory stays while it is mapped."""
        if physical.released:
            raise ArgumentError("physical", "released already", "a live physical allocation")
        physical.released = True
        self._drop(physical)

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        """Addresses with nothing behind them, in multiples of the granule."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise ArgumentError("nbytes", nbytes, f"a positive multiple of {GRANULE}")
        address = self._addresses.take(nbytes + GRANULE, max(alignment, GRANULE))
        if address is None:
            raise WindowError(f"no room to reserve {nbytes} bytes in a window of {self.nbytes >> 20} MiB")
        self._reservations[address] = nbytes
        return address

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Give back what `reserve` returned; nothing may be mapped there any more."""
        if self._reservations.get(address) != nbytes:
            raise ArgumentError("address", f"0x{address:x} with {nbytes} bytes", "a reservation, with its size")
        if next(self._mapped(address, nbytes), None):
            raise ArgumentError("address", f"0x{address:x}", "a reservation with nothing mapped")
        del self._reservations[address]
        self._addresses.give(address, nbytes + GRANULE)

    def map(
        self, address: int, nbytes: int, physical: Physical, offset: int = 0, table: AccessTable | None = None
    ) -> None:
        """Map part of a physical allocation inside a reservation. No device may access it before `set_access`."""
        if nbytes <= 0 or nbytes % GRANULE or offset % GRANULE or offset + nbytes > physical.nbytes:
            raise ArgumentError(
                "nbytes, offset", (nbytes, offset), f"multiples of {GRANULE} inside the physical allocation"
            )
        self._require_vacant(address, nbytes)
        self._put(address, nbytes, physical, offset)
        self._mappings[address] = _Mapping(nbytes, physical, table or self.table, offset)
        bisect.insort(self._mapping_starts, address)

    def map_multicast(self, address: int, nbytes: int, members: Members, table: AccessTable | None = None) -> None:
        """Map the first bytes of a multicast object inside a reservation. There is no memory at these addresses: what
        is done there is done to the members.
        """
        self._require_vacant(address, nbytes)
        self._mappings[address] = _Mapping(nbytes, None, table or self.table, members=members)
        bisect.insort(self._mapping_starts, address)
        self.teams.add(address, nbytes, members)
        self._describe(address, nbytes, None, Kind.MULTICAST | KIND_FULL)

    def alias(self, nbytes: int, physical: Physical, offset: int) -> int:
        """An address of part of a physical allocation for the runtime alone: no mapping of the user's, no device may
        access it.
        """
        address = self._addresses.take(nbytes + GRANULE, GRANULE)
        if address is None:
            raise WindowError(f"no room for {nbytes} bytes in a window of {self.nbytes >> 20} MiB")
        self._put(address, nbytes, physical, offset)
        self._aliases[address] = Allocation(address, nbytes, physical.device, Kind.MAPPED)
        return address

    def drop_alias(self, address: int, nbytes: int, physical: Physical) -> None:
        """Give back what `alias` returned."""
        self._take_away(address, nbytes, physical)
        self._describe(address, nbytes, None, Kind.FREED)
        del self._aliases[address]
        self._addresses.give(address, nbytes + GRANULE)

    def _require_vacant(self, address: int, nbytes: int) -> None:
        if not any(a <= address and address + nbytes <= a + n for a, n in self._reservations.items()):
            raise ArgumentError("address", f"0x{address:x}", "inside one reservation, with all of its bytes")
        if any(True for _ in self._mapped(address, nbytes)):
            raise ArgumentError("address", f"0x{address:x}", "a range with nothing mapped")

    def _put(self, address: int, nbytes: int, physical: Physical, offset: int) -> None:
        pages.map_file(address, nbytes, self._data_fd, physical.offset + offset)
        pages.map_file(address + abi.SHADOW_OFFSET, nbytes, self._shadow_fd, physical.offset + offset)
        if self.cells:
            at, size = (physical.offset + offset) >> abi.LINE_SHIFT << 2, nbytes >> abi.LINE_SHIFT << 2
            pages.map_file(pages.cell_address(address), size, self._cell_fd, at)
        physical.mappings += 1
        bits = 0 if self._check_initialised else KIND_INITIALISED
        self._describe(address, nbytes, physical.device, Kind.MAPPED | KIND_FULL | bits)

    def _take_away(self, address: int, nbytes: int, physical: Physical) -> None:
        for area in (address, address + abi.SHADOW_OFFSET):
            pages.map_empty(area, nbytes)
        if self.cells:
            pages.map_empty(pages.cell_address(address), nbytes >> abi.LINE_SHIFT << 2)
        physical.mappings -= 1
        self._drop(physical)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap every mapping that lies in the range; one that lies in it only partly is refused."""
        inside = list(self._mapped(address, nbytes))
        if not inside or any(a < address or a + m.nbytes > address + nbytes for a, m in inside):
            raise ArgumentError("address", f"0x{address:x} with {nbytes} bytes", "a range of whole mappings")
        for start, mapping in inside:
            if mapping.physical is not None:
                self._take_away(start, mapping.nbytes, mapping.physical)
            else:
                self.teams.remove(start)
            self._describe(start, mapping.nbytes, mapping.device, Kind.FREED)
            del self._mappings[start]
            self._mapping_starts.remove(start)
            self._remember(Allocation(start, mapping.nbytes, mapping.device, mapping.kind, table=mapping.table))

    @property
    def reserved(self) -> dict[int, int]:
        """The reservations: address -> bytes."""
        return dict(self._reservations)

    def set_access(
        self, address: int, nbytes: int, read_mask: int, write_mask: int, table: AccessTable | None = None
    ) -> None:
        """Set the devices that may read and write the granules of a range, mapped or allocated; replaces the former
        masks.
        """
        (table or self.table).permit(address, nbytes, read_mask, write_mask)

    def access(self, address: int, table: AccessTable | None = None) -> tuple[int, int]:
        """(read mask, write mask) at an address; (0, 0) outside of anything."""
        if not self.contains(address):
            return 0, 0
        word = int((table or self.table).words(address, 1)[0])
        return word & 0xFF, word >> 8 & 0xFF

    # The host's view -------------------------------------------------------------------------------------------------

    def find(self, address: int) -> Allocation | None:
        """The allocation or mapping that holds an address."""
        for starts, live in ((self._starts, self._live), (self._mapping_starts, self._mappings)):
            i = bisect.bisect_right(starts, address) - 1
            if i >= 0:
                item = live[starts[i]]
                if address < starts[i] + item.nbytes:
                    if isinstance(item, Allocation):
                        return item
                    return Allocation(starts[i], item.nbytes, item.device, item.kind, table=item.table)
        return None

    def freed(self, address: int) -> Allocation | None:
        """The freed allocation that held an address, if it is still remembered."""
        if self.find(address) is None:
            for gone in reversed(self._freed.values()):
                if gone.address <= address < gone.address + gone.nbytes:
                    return gone
        return None

    def physical(self, address: int) -> Physical | None:
        """The physical allocation mapped at an address."""
        found = next(self._mapped(address, 1), None)
        return found[1].physical if found else None

    def same(self, address: int) -> list[int]:
        """All addresses at which the byte at an address is mapped, beginning with that one."""
        found = next(self._mapped(address, 1), None)
        if found is None or found[1].physical is None:
            return [address]
        start, mapping = found
        at = mapping.offset + address - start
        places = [
            other + at - m.offset
            for other, m in self._mappings.items()
            if m.physical is mapping.physical and 0 <= at - m.offset < m.nbytes
        ]
        return [address, *(place for place in places if place != address)]

    def covers(self, address: int, nbytes: int) -> bool:
        """True if every byte of the range is allocated or mapped memory (over neighbouring mappings too)."""
        end = address + nbytes
        while address < end:
            allocation = self.find(address)
            if allocation is None or allocation.kind is Kind.MULTICAST:
                return False
            address = allocation.address + allocation.nbytes
        return True

    def nearest(self, address: int) -> str:
        """The allocation that an address lies in or near, in words, for messages about faults. Memory that the engine
        lends to blocks and threads does not count.
        """
        for bound in self._aliases.values():
            if bound.address <= address < bound.address + bound.nbytes:
                at = f"{address - bound.address} bytes into {bound.nbytes} bytes of device {bound.device}"
                return f"{at}, which are bound to a multicast object"
        holder, gone = self.find(address), self.freed(address)
        if holder is not None and not holder.lent:
            return f"{nearby(address, holder.address, holder.nbytes)} {holder}"
        if gone is not None:
            return f"{nearby(address, gone.address, gone.nbytes)} {gone}, which was freed"
        if address < _NEAR_NULL:
            return "outside of device memory: a null pointer, or close to one"
        known = [a for a in self._live.values() if not a.lent] + [
            Allocation(a, m.nbytes, m.device, m.kind, table=m.table) for a, m in self._mappings.items()
        ]
        if not known:
            return "no device memory: nothing is allocated"
        near = min(known, key=lambda a: max(a.address - address, address - (a.address + a.nbytes) + 1))
        if not self.contains(address):
            return "outside of device memory, as is memory of the host that the driver does not know"
        return f"{nearby(address, near.address, near.nbytes)} {near}"

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes themselves, as a writable uint8 array. Writing through it does not mark them initialised."""
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.window = self  # type: ignore[attr-defined]
        return np.ctypeslib.as_array(memory)

    def mark_initialised(self, address: int, nbytes: int) -> None:
        """Mark a range as written by the host. All of it is allocated."""
        ctypes.memset(address + abi.SHADOW_OFFSET, abi.SHADOW_ADDRESSABLE | abi.SHADOW_INITIALISED, nbytes)

    def uninitialised(self, address: int, nbytes: int) -> int | None:
        """The first byte of the range that was never written, or None."""
        if (self.table.words(address, nbytes) >> np.uint32(24) & np.uint32(KIND_INITIALISED)).all():
            return None
        missing = self.view(address + abi.SHADOW_OFFSET, nbytes) & abi.SHADOW_INITIALISED == 0
        first = int(missing.argmax())
        return address + first if missing[first] else None

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """memmove of device or host memory; what was initialised at the source is so at the destination.

        The caller has checked both ranges (`covers`). An address outside the window is ordinary host memory.
        """
        ctypes.memmove(destination, source, nbytes)
        if not self.contains(destination, nbytes):
            return
        if not self.contains(source, nbytes) or self.uninitialised(source, nbytes) is None:
            self.mark_initialised(destination, nbytes)
        else:
            ctypes.memmove(destination + abi.SHADOW_OFFSET, source + abi.SHADOW_OFFSET, nbytes)
            self.view(destination + abi.SHADOW_OFFSET, nbytes)[:] |= abi.SHADOW_ADDRESSABLE

    def _describe(self, address: int, nbytes: int, device: int | None, kind: int) -> None:
        """Set owner and kind of a range in all tables, with access for no device."""
        if nbytes:
            owner = _OWNERS.get(Kind(kind & 0x3F), abi.OWNER_HOST) if device is None else device
            for table in self._tables:
                table.describe(address, nbytes, owner << 16 | kind << 24)

    def _mapped(self, address: int, nbytes: int) -> Iterator[tuple[int, _Mapping]]:
        i = max(bisect.bisect_right(self._mapping_starts, address) - 1, 0)
        for start in self._mapping_starts[i:]:
            mapping = self._mappings[start]
            if start >= address + nbytes:
                return
            if start + mapping.nbytes > address:
                yield start, mapping

    def _drop(self, physical: Physical) -> None:
        if physical.released and physical.mappings == 0:
            for fd in (self._data_fd, self._shadow_fd):
                pages.punch(fd, physical.offset, physical.nbytes)
            if self.cells:
                at, size = physical.offset >> abi.LINE_SHIFT << 2, physical.nbytes >> abi.LINE_SHIFT << 2
                pages.punch(self._cell_fd, at, size)
            self._file.give(physical.offset, physical.nbytes)

    def _remember(self, allocation: Allocation) -> None:
        self._freed.pop(allocation.address, None)
        self._freed[allocation.address] = allocation
        if len(self._freed) > _REMEMBERED:
            self._freed.popitem(last=False)


def _close_all(files: dict[int, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()
