# SPDX-License-Identifier: Apache-2.0
"""Memory of one process. The way in which memory was allocated decides which devices may access it:

cuMemAlloc, module variables   the memory's device, and the devices whose contexts were given peer access to the context
                               that the memory belongs to
pinned and managed memory      every device
pools                          the memory's device, and the devices in the pool's access list
allocation nodes of graphs     the memory's device, and the devices in the node's access list
cuMemMap                       only devices that were given access at that address (the memory's own device too);
                               the addresses of a multicast object have no device and no memory of their own
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ....errors import ArgumentError, counted
from ...abi import Kind
from ...bindings import R
from ...findings.reports import Report
from ...space.pages import WindowError
from ..objects import Context, Device, Handle, Memory, Multicast, Pool
from ..process.failure import Failure
from . import exhausted
from .allocation import Allocation
from .exports import Export
from .host_files import FilePart
from .managed import Advice

if TYPE_CHECKING:
    from ..process.process import Process

READ, READ_WRITE = 1, 3  # CUmemAccess_flags


class ProcessMemory:
    """The live allocations of a process, by address, and its reserved addresses."""

    def __init__(self, process: Process) -> None:
        self._process, self._window = process, process.machine.window
        self._reserved: dict[int, int] = {}
        self._starts: list[int] = []
        self._live: dict[int, Allocation] = {}

    # Look-ups by address ---------------------------------------------------------------------------------------------

    def find(self, address: int) -> Allocation | None:
        """The live allocation that holds an address."""
        i = bisect.bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        allocation = self._live[self._starts[i]]
        return allocation if address < allocation.base + allocation.nbytes else None

    def at(self, address: int) -> Allocation | None:
        """The live allocation that starts at an address."""
        return self._live.get(address)

    def owned(self, context: Context) -> list[Allocation]:
        """The allocations that are freed when the context is destroyed."""
        return [a for a in self._live.values() if a.context is context and a.host is None]

    def registered(self) -> list[int]:
        """The host addresses of registered memory."""
        return [a.base for a in self._live.values() if a.registered]

    def uncovered(self, address: int, nbytes: int) -> int | None:
        """The address of the first byte of a range that is not live memory of the window, or None. The range may span
        adjacent mappings.
        """
        end = address + nbytes
        while address < end:
            allocation = self.find(address)
            if allocation is None or allocation.registered:
                return address
            address = allocation.base + allocation.nbytes
        return None

    def within(self, start: int, nbytes: int) -> list[Allocation]:
        """The live allocations that overlap a range, in the order of their addresses."""
        i = max(bisect.bisect_right(self._starts, start) - 1, 0)
        found = []
        for base in self._starts[i:]:
            if base >= start + nbytes:
                break
            if base + self._live[base].nbytes > start:
                found.append(self._live[base])
        return found

    # All allocations -------------------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """The numbers of live allocations and mappings, by kind."""
        mappings = sum(a.mapped is not None for a in self._live.values())
        return {
            "allocations": sum(a.mapped is None and a.host is None and a.origin is None for a in self._live.values()),
            "mappings": mappings,
            "reservations": len(self._reserved),
        }

    def allocations(self) -> Iterable[Allocation]:
        """The live allocations, in the order in which they were made."""
        return self._live.values()

    # Allocating and freeing ------------------------------------------------------------------------------------------

    def add(self, allocation: Allocation) -> Allocation:
        self._live[allocation.base] = allocation
        bisect.insort(self._starts, allocation.base)
        return allocation

    def drop(self, allocation: Allocation) -> None:
        del self._live[allocation.base]
        self._starts.pop(bisect.bisect_left(self._starts, allocation.base))

    def charge(self, device: Device, nbytes: int) -> None:
        """Count `nbytes` of device memory as used. Raises Failure if the device has less left."""
        self._process.machine.mappables.descriptors.sweep()
        if device.used + nbytes > device.total:
            raise self.full(device, nbytes, f"{device.total - device.used} of {device.total} bytes are left")
        device.used += nbytes

    def full(self, device: Device | None, nbytes: int, why: str) -> Failure:
        """The Failure to raise when device memory or, if `device` is None, pinned memory cannot be allocated. `why`
        ends the first sentence of its report.
        """
        return exhausted.failure(self._process.machine, device, nbytes, why)

    def require(self, what: str, address: int, nbytes: int, user: Context, *, direct: bool = False) -> None:
        """Raise Failure unless the whole range is live memory in the window and the device of the context `user` may
        access it.

        For memory of cuMemAlloc, the device needs access only with `direct`; without `direct`, the driver copies
        through the host. `what` begins the sentence of the Failure's report.
        """
        what = f"{what} {counted(nbytes, 'byte')} at 0x{address:x}"
        missing = self.uncovered(address, nbytes)
        if missing is not None:
            raise self.stray(what, missing)
        device = user.device.index
        for a in self.within(address, nbytes):
            if a.multicast is not None:
                text = f"{what}, which are addresses of a multicast object: only multimem instructions may use them"
                raise Failure(R.CUDA_ERROR_INVALID_VALUE, Report("multicast", text, device=device, address=address))
            plain = a.pool is None and a.memory is None and a.graph is None
            if a.device is not None and (direct or not plain) and not self.masks(a)[0] >> device & 1:
                text = f"{what}, to which device {device} was given no access"
                raise Failure(R.CUDA_ERROR_INVALID_VALUE, Report("no_access", text, device=device, address=address))

    def stray(self, what: str, address: int) -> Failure:
        """The failure of a call with an address that is not allocated or was freed."""
        window = self._window
        kind = "use_after_free" if window.index.freed(address) else "out_of_bounds"
        text = f"{what}: 0x{address:x} is {window.index.nearest(address)}"
        return Failure(R.CUDA_ERROR_INVALID_VALUE, Report(kind, text, address=address))

    def alloc(self, context: Context, nbytes: int, *, kind: Kind = Kind.DEVICE) -> Allocation:
        """Allocate memory for cuMemAlloc, or for the variables of a module."""
        device = context.device
        mask = self.reaching(context)
        return self.add(Allocation(self._take(device, nbytes, mask, kind), nbytes, device, context=context))

    def pool_alloc(self, pool: Pool, nbytes: int) -> Allocation:
        if pool.maximum and pool.used + nbytes > pool.maximum:
            why = f"their pool has {pool.maximum - pool.used} of at most {pool.maximum} bytes left"
            raise self.full(pool.device, nbytes, why)
        base = self._take(pool.device, nbytes, 0, Kind.DEVICE)
        allocation = self.add(Allocation(base, nbytes, pool.device, pool=pool))
        pool.live.add(base)
        pool.used += nbytes
        pool.used_high = max(pool.used_high, pool.used)
        self.refresh(allocation)
        return allocation

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve addresses for mappings. Raises WindowError if there are none left."""
        address = self._window.mappings.reserve(nbytes, alignment)
        self._reserved[address] = nbytes
        return address

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Give back what `reserve` returned. Raises ArgumentError for other ranges, and if something is mapped
        there.
        """
        if address not in self._reserved:
            raise ArgumentError("address", f"0x{address:x}", "a reservation of this process")
        self._window.mappings.free_reservation(address, nbytes)
        del self._reserved[address]

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        """Map the first bytes of memory or of a multicast object inside a reservation. Raises ArgumentError for any
        other address.
        """
        if not any(a <= address and address + nbytes <= a + n for a, n in self._reserved.items()):
            raise ArgumentError(
                "address", f"0x{address:x}", f"the start of {nbytes} bytes inside one reservation of this process"
            )
        item, table = handle.item, self._process.table
        if isinstance(item, Multicast):
            self._window.mappings.map_multicast(address, nbytes, item.members, table)
            self.add(Allocation(address, nbytes, None, handle=handle))
        elif isinstance(item, Memory):
            self._window.mappings.map(address, nbytes, item.physical, table=table)
            self.add(Allocation(address, nbytes, item.device, handle=handle))
        self._process.machine.mappables.hold(item)

    def unmap(self, mapping: Allocation) -> None:
        """Undo one `map`."""
        assert mapping.mapped is not None
        self._window.mappings.unmap(mapping.base, mapping.nbytes)
        self.drop(mapping)
        self._process.machine.mappables.let_go(mapping.mapped)

    def clear(self) -> None:
        """Free all memory and all reservations. Called when the process ends."""
        for allocation in list(self._live.values()):
            if allocation.mapped is not None:
                self.unmap(allocation)
            elif allocation.host is None:
                self.free(allocation)
        for address, nbytes in list(self._reserved.items()):
            self.free_reservation(address, nbytes)

    def give_back(self, allocation: Allocation) -> None:
        """Free an allocation of a pool, or unmap an allocation of a graph. The graph keeps the address."""
        if allocation.pool is not None:
            self.free(allocation)
            allocation.pool.live.discard(allocation.base)
        elif self._window.index.covers(allocation.base, 1):
            self._window.vacate(allocation.base)

    def host_alloc(self, context: Context, nbytes: int, flags: int) -> Allocation:
        """Allocate pinned memory, which every device may access."""
        try:
            base = self._window.host_alloc(nbytes, self._process.table)
        except WindowError as error:
            raise self.full(None, nbytes, f"{error}: set DRVFUSE_EMU_WINDOW_GIB to a larger number") from None
        return self.add(Allocation(base, nbytes, None, context=context, host_flags=flags))

    def managed_alloc(self, context: Context, nbytes: int) -> Allocation:
        """Managed memory: host memory that every device may access at the same address."""
        allocation = self.host_alloc(context, nbytes, 0)
        allocation.host_flags, allocation.managed = None, Advice()
        return allocation

    def register(self, context: Context, address: int, nbytes: int, flags: int, file: FilePart | None) -> None:
        """Register host memory (cuMemHostRegister). If `file`, the part of a file that the memory maps, is given,
        devices can access the memory, at other addresses than the host. This object takes over the descriptor of the
        file.
        """
        memory = Allocation(address, nbytes, None, context=context, host_flags=flags, registered=True)
        if file is not None:
            memory.descriptor = file.descriptor
            try:
                base = self._window.map_host(nbytes, *file, self._process.table)
            except WindowError as error:
                os.close(file.descriptor)
                raise self.full(None, nbytes, f"{error}: set DRVFUSE_EMU_WINDOW_GIB to a larger number") from None
            memory.alias = Allocation(base, nbytes, None, context=context, host_flags=flags, host=address)
            self.add(memory.alias)
        self.add(memory)

    def on_device(self, address: int) -> int:
        """The address by which devices access a byte. For registered memory, it differs from the host's address."""
        found = self.find(address)
        return address if found is None or found.alias is None else found.alias.base + address - found.base

    def shared(self, allocation: Allocation) -> Export:
        """The Export by which other processes can open an allocation."""
        if allocation.export is None:
            allocation.export = Export(self, allocation)
        return allocation.export

    def open(self, export: Export, *, context: Context | None = None, pool: Pool | None = None) -> Allocation:
        """Open memory of another process, which has the same address here. It may be opened several times."""
        owned = export.allocation
        view = self.at(owned.base)
        if view is None:
            view = self.add(Allocation(owned.base, owned.nbytes, owned.device, context, pool, origin=export))
            export.views.append((self, view))
            if pool is not None:
                pool.live.add(view.base)
            self.refresh(view)
        view.opens += 1
        return view

    def close(self, view: Allocation) -> None:
        """Undo one `open` of memory of another process."""
        view.opens -= 1
        if view.opens == 0:
            self._leave(view)

    def _leave(self, view: Allocation) -> None:
        assert view.origin is not None
        if self.at(view.base) is not view:  # its owner has freed the memory
            return
        view.origin.views.remove((self, view))
        self.drop(view)
        if view.pool is not None:
            view.pool.live.discard(view.base)
        self._window.set_access(view.base, view.nbytes, 0, 0, self._process.table)

    def free(self, allocation: Allocation) -> None:
        """Free an allocation. Later accesses fault. Memory of another process is only closed."""
        if allocation.origin is not None:
            self._leave(allocation)
            return
        for memory, view in list(allocation.export.views) if allocation.export is not None else ():
            memory._leave(view)
        self.drop(allocation)
        if allocation.registered:
            if allocation.alias is not None:
                self.drop(allocation.alias)
                self._window.unmap_host(allocation.alias.base)
            if allocation.descriptor is not None:
                os.close(allocation.descriptor)
            return
        if allocation.graph is not None:
            self.give_back(allocation)
            self._window.give_back(allocation.base, allocation.nbytes)
            return
        self._window.free(allocation.base)
        if allocation.device is not None:
            allocation.device.used -= allocation.nbytes
        if allocation.pool is not None:
            allocation.pool.used -= allocation.nbytes

    def _take(self, device: Device, nbytes: int, mask: int, kind: Kind) -> int:
        self.charge(device, nbytes)
        zeroed = kind is Kind.GLOBALS  # variables without an initial value are zero
        table = self._process.table
        try:
            return self._window.alloc(nbytes, device.index, mask, mask, kind=kind, initialised=zeroed, table=table)
        except WindowError as error:
            device.used -= nbytes
            raise self.full(device, nbytes, f"{error}: set DRVFUSE_EMU_WINDOW_GIB to a larger number") from None

    # Access ----------------------------------------------------------------------------------------------------------

    def reaching(self, owner: Context) -> int:
        """The devices that may access what `owner` has allocated with cuMemAlloc: bit d is set for device d."""
        contexts = [c for c in self._process.handles.values() if isinstance(c, Context) and owner in c.peers]
        return sum({1 << context.device.index for context in (owner, *contexts)})

    def masks(self, allocation: Allocation) -> tuple[int, int]:
        """Two bit masks: the devices that may read an allocation of device memory, and those that may write it."""
        access = allocation.access
        shared = allocation.pool or allocation.graph
        if shared is not None:
            assert allocation.device is not None
            access = {**shared.access, allocation.device.index: READ_WRITE}
        elif allocation.mapped is None:
            assert allocation.context is not None
            reaching = self.reaching(allocation.context)
            return reaching, reaching
        read = sum(1 << d for d, flags in access.items() if flags & READ)
        return read, sum(1 << d for d, flags in access.items() if flags == READ_WRITE)

    def refresh(self, allocation: Allocation) -> None:
        """Write to the window which devices may now read and write an allocation (`masks`)."""
        if allocation.device is not None or allocation.multicast is not None:
            masks = self.masks(allocation)
            self._window.set_access(allocation.base, allocation.nbytes, *masks, self._process.table)

    def refresh_context(self, owner: Context) -> None:
        """Do what `refresh` does for all allocations of the context `owner`. Called when another context has gained or
        lost peer access to it.
        """
        for allocation in self.owned(owner):
            self.refresh(allocation)

    def refresh_pool(self, pool: Pool) -> None:
        for base in pool.live:
            self.refresh(self._live[base])
