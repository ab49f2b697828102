# SPDX-License-Identifier: Apache-2.0
"""Virtual memory management: physical memory, address ranges, mappings, and symmetric buffers made of them.

The driver has physical memory (`PhysicalMemory`), reserved addresses (`AddressRange`), and mappings of memory at
addresses (`Mapping`), with access set for each device. `PhysicalMemory.export` returns a file descriptor of the memory.
In another process of the host `ImportedMemory` makes a handle from this descriptor. The driver frees physical memory
when no handle and no mapping of it is left in any process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import dtypes
from ..errors import ArgumentError, counted, require_integer
from .device import Device
from .driver import Driver, enum_value
from .lifetime import Owned, flush

if TYPE_CHECKING:
    from ..dtypes import DTypeLike
    from .array import Array, ShapeLike

_PINNED_ALLOCATION = "CU_MEM_ALLOCATION_TYPE_PINNED"


class Undo:
    """A list of functions that undo steps: `with Undo() as undo: ...; undo.append(f, *args); ...; undo.commit()`.

    If the block ends without commit, all functions are called in reverse order. If the block raised an error, that
    error is raised, with a note if a function failed. Otherwise the first failure of a function is raised.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def append(self, step: Callable[..., Any], *args: Any) -> None:
        self._steps.append((step, args))

    def commit(self) -> None:
        self._steps.clear()

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        failure: Exception | None = None
        while self._steps:
            step, args = self._steps.pop()
            try:
                step(*args)
            except Exception as second:
                failure = failure or second
        if failure is not None and error is None:
            raise failure
        if failure is not None and error is not None:
            error.add_note(f"Undoing the earlier steps failed too: {failure}")


def _location(driver: Driver, device: Device, into: Any) -> None:
    into.type = driver.types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    into.id = device.index


def access_descriptors(driver: Driver, devices: Iterable[Device]) -> list[Any]:
    """CUmemAccessDesc entries that give `devices` read and write access."""
    descriptors = []
    for device in devices:
        descriptor = driver.types.CUmemAccessDesc()
        _location(driver, device, descriptor.location)
        descriptor.flags = driver.types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        descriptors.append(descriptor)
    return descriptors


def allocation_properties(device: Device) -> Any:
    """CUmemAllocationProp of pinned memory on `device`, exportable as a file descriptor if the device
    supports that."""
    types = device.driver.types
    properties = types.CUmemAllocationProp()
    properties.type = enum_value(types, "CUmemAllocationType", _PINNED_ALLOCATION)
    _location(device.driver, device, properties.location)
    if device.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        properties.requestedHandleTypes = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def granularity(device: Device) -> int:
    """The granularity of the device's mappings in bytes: their sizes and offsets must be multiples of it."""
    flags = device.driver.types.CUmemAllocationGranularity_flags
    return int(
        device.driver.cuMemGetAllocationGranularity(
            allocation_properties(device), flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        )
    )


def round_up(nbytes: int, unit: int) -> int:
    return (nbytes + unit - 1) // unit * unit


def _release(driver: Driver, handle: Any) -> None:
    driver.cuMemRelease(handle)


def _free_range(driver: Driver, address: int, nbytes: int) -> None:
    driver.cuMemAddressFree(address, nbytes)


def _unmap(driver: Driver, address: int, nbytes: int) -> None:
    driver.cuMemUnmap(address, nbytes)


class PhysicalMemory(Owned):
    """`nbytes` of undefined memory on `device`, a multiple of `granularity(device)`, without an address."""

    def __init__(self, device: Device, nbytes: int) -> None:
        unit = granularity(device)
        if nbytes <= 0 or nbytes % unit:
            raise ArgumentError("nbytes", nbytes, f"a positive multiple of {unit}")
        self.device, self.nbytes = device, nbytes
        self.handle = device.driver.cuMemCreate(nbytes, allocation_properties(device), 0)
        self._owns(device.driver, _release, self.handle)

    def export(self) -> int:
        """A new file descriptor of the memory, for another process of this host. The caller owns and closes it.

        Raises DriverError if the device does not support file descriptors of memory.
        """
        self._check_open()
        return int(self.device.driver.cuMemExportToShareableHandle(self.handle, descriptors_of(self.device.driver), 0))


class ImportedMemory(Owned):
    """`nbytes` of memory of another process, imported for `device` from a descriptor that the other process exported.

    The caller keeps the descriptor, and may close it. The memory exists while this object or a mapping of it is open.
    """

    def __init__(self, device: Device, descriptor: int, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.handle = device.driver.cuMemImportFromShareableHandle(descriptor, descriptors_of(device.driver))
        self._owns(device.driver, _release, self.handle)


def descriptors_of(driver: Driver) -> Any:
    """The kind of handle that passes between processes as a file descriptor."""
    return driver.types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class AddressRange(Owned):
    """`nbytes` of reserved addresses, which have no memory until it is mapped there. Close mappings before the
    range.
    """

    def __init__(self, driver: Driver, nbytes: int, alignment: int = 0) -> None:
        self.driver, self.nbytes = driver, nbytes
        self.ptr = int(driver.cuMemAddressReserve(nbytes, alignment, 0, 0))
        self._owns(driver, _free_range, self.ptr, nbytes)


class Mapping(Owned):
    """All of `memory` mapped at `range.ptr + offset`, readable and writable by `devices`. Keeps `range` and
    `memory` alive."""

    def __init__(
        self,
        range: AddressRange,
        memory: PhysicalMemory | ImportedMemory,
        devices: Sequence[Device],
        offset: int = 0,
    ) -> None:
        range._check_open()
        memory._check_open()
        if not 0 <= offset <= range.nbytes - memory.nbytes:
            raise ArgumentError("offset", offset, f"0 to {range.nbytes - memory.nbytes}")
        driver = range.driver
        self.range, self.memory, self.ptr = range, memory, range.ptr + offset
        driver.cuMemMap(self.ptr, memory.nbytes, 0, memory.handle, 0)
        self._owns(driver, _unmap, self.ptr, memory.nbytes)
        try:
            descriptors = access_descriptors(driver, devices)
            driver.cuMemSetAccess(self.ptr, memory.nbytes, descriptors, len(descriptors))
        except BaseException:
            self.close()
            raise


class MappedMemory(Owned):
    """`nbytes` of memory on `device`, mapped at `ptr`. Those of `users` that have peer access can read and write it."""

    memory: PhysicalMemory | ImportedMemory

    def __init__(self, device: Device, nbytes: int, users: Iterable[Device]) -> None:
        readers = [user for user in {d.index: d for d in users}.values() if user.can_access_peer(device)]
        self._map(PhysicalMemory(device, nbytes), readers)

    @classmethod
    def imported(cls, device: Device, descriptor: int, nbytes: int) -> MappedMemory:
        """The memory of another process (`ImportedMemory`), mapped for `device` of this process."""
        self = cls.__new__(cls)
        self._map(ImportedMemory(device, descriptor, nbytes), [device])
        return self

    def _map(self, memory: PhysicalMemory | ImportedMemory, users: Sequence[Device]) -> None:
        """Map `memory` and take ownership of it."""
        driver = memory.device.driver
        with Undo() as undo:
            undo.append(memory.close)
            addresses = AddressRange(driver, memory.nbytes)
            undo.append(addresses.close)
            mapping = Mapping(addresses, memory, users)
            undo.commit()
        self.memory, self.device, self.nbytes, self.ptr = memory, memory.device, memory.nbytes, mapping.ptr
        self._owns(driver, _close_mapping, mapping)


def _close_mapping(driver: Driver, mapping: Mapping) -> None:
    with Undo() as undo:
        undo.append(mapping.memory.close)
        undo.append(mapping.range.close)
        undo.append(mapping.close)


def check_buffer(devices: Sequence[Device], nbytes: int) -> None:
    """Raise ArgumentError unless a symmetric buffer of `nbytes` on `devices` is possible."""
    if not devices:
        raise ArgumentError("devices", "empty", "at least one device")
    if any(device.driver is not devices[0].driver for device in devices):
        raise ArgumentError("devices", "devices of several drivers", "devices of one driver")
    require_integer("nbytes", nbytes, "a number of bytes, positive", 1, (1 << 62) - 1)


class SymmetricBuffer(Owned):
    """Memory of equal size on every device: the part at `ptrs[i]` is on `devices[i]`, and all devices with peer access
    can read and write it.

    In a group with ranks in other processes `ptrs` has the parts of all ranks, by rank, but `devices` has only the
    devices of this process.

    `nbytes` is the requested size, rounded up to the granularity. Each part has one address, which all devices use.
    Contents are undefined at first. No kernel may use the memory when the buffer is closed.

    `multicast_ptr` is None unless `Group.symmetric(nbytes, multicast=True)` has made the buffer. Then it is one address
    of byte 0 of every part, valid on every device. Only `multimem` instructions may use it.
    """

    def __init__(self, devices: Sequence[Device], nbytes: int) -> None:
        check_buffer(devices, nbytes)
        size = round_up(nbytes, max(granularity(device) for device in devices))
        flush(devices[0].driver)
        with Undo() as undo:
            parts = []
            for device in devices:
                parts.append(MappedMemory(device, size, devices))
                undo.append(parts[-1].close)
            undo.commit()
        self._take(parts, range(len(parts)))

    @classmethod
    def of(
        cls,
        parts: Sequence[MappedMemory],
        own: Sequence[int],
        multicast: Owned | None = None,
        multicast_ptr: int | None = None,
    ) -> SymmetricBuffer:
        """A buffer of `parts`, one for each rank. It owns the parts, and `multicast`, the object that is mapped at
        `multicast_ptr`.

        The parts of the ranks `own` are on devices of this process."""
        self = cls.__new__(cls)
        self._take(parts, own, *([multicast] if multicast is not None else []))
        self._multicast_ptr = multicast_ptr
        return self

    def _take(self, parts: Sequence[MappedMemory], own: Sequence[int], *users: Owned) -> None:
        """Take ownership of `parts`, one for each rank, and of `users`: objects that use the parts and are closed
        before them. The parts of the ranks `own` are on devices of this process.
        """
        self._own = tuple(own)
        self.devices = tuple(parts[rank].device for rank in own)
        self.nbytes = parts[0].nbytes
        self._ptrs = tuple(part.ptr for part in parts)
        self._multicast_ptr: int | None = None
        self._owns(self.devices[0].driver, _close_all, (*parts, *users))
        with self.devices[0].driver.lock:
            self.devices[0].driver.part(_Buffers).known.add(self)

    @property
    def ptrs(self) -> tuple[int, ...]:
        """The address of each device's part."""
        self._check_open()
        return self._ptrs

    @property
    def multicast_ptr(self) -> int | None:
        """The multicast address of the parts; None if the buffer has no multicast."""
        self._check_open()
        return self._multicast_ptr

    def arrays(self, shape: ShapeLike, dtype: DTypeLike, offset: int = 0) -> list[Array]:
        """Return an array on each device of this process, at `offset` of that device's part of the buffer.

        `offset` is in bytes and a multiple of the element's size. Each array belongs to its device's own stream. The
        arrays keep the buffer alive; when the buffer is closed, any use of them raises ClosedError. Raises
        ArgumentError if an array does not fit into its part.
        """
        from .array import check_shape, element_count, view

        self._check_open()
        dimensions, element = check_shape(shape), dtypes.get(dtype)
        nbytes = element_count(dimensions) * element.itemsize
        require_integer("offset", offset, "a number of bytes")
        if offset < 0 or offset % element.itemsize:
            raise ArgumentError("offset", offset, f"a multiple of {element.itemsize}, the size of {element}, from 0 on")
        if offset + nbytes > self.nbytes:
            raise ArgumentError(
                "shape",
                f"{counted(nbytes, 'byte')} from byte {offset} on",
                f"inside the buffer, which has {counted(self.nbytes, 'byte')}",
            )
        places = zip(self._own, self.devices, strict=True)
        return [view(self.ptrs[rank] + offset, dimensions, element, device, owner=self) for rank, device in places]

    def __repr__(self) -> str:
        on = {rank: f" on device {device.index}" for rank, device in zip(self._own, self.devices, strict=True)}
        places = ", ".join(f"{ptr:#x}{on.get(rank, ' of another process')}" for rank, ptr in enumerate(self._ptrs))
        return f"<SymmetricBuffer of {self.nbytes} bytes: {'closed' if self.closed else places}>"


class _Buffers:
    """The symmetric buffers of a driver, guarded by `driver.lock`."""

    def __init__(self, driver: Driver) -> None:
        self.known: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()


def buffer_at(driver: Driver, ptr: int) -> SymmetricBuffer | None:
    """The open symmetric buffer of this process that holds the byte at `ptr`, or None. Makes no driver call."""
    with driver.lock:
        known = list(driver.part(_Buffers).known)
    for buffer in known:
        if not buffer.closed and any(0 <= ptr - start < buffer.nbytes for start in buffer._ptrs):
            return buffer
    return None


def _close_all(driver: Driver, owned: Sequence[Owned]) -> None:
    """Close everything, the last first."""
    with Undo() as undo:
        for item in owned:
            undo.append(item.close)
