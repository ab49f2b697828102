# SPDX-License-Identifier: Apache-2.0
"""Virtual memory management: physical memory, reserved addresses, mappings and their access rights."""

from __future__ import annotations

from typing import Any, cast

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.memory import multicast
from ..machine.memory.allocation import Allocation
from ..machine.objects import Handle, Memory, Multicast
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..space.pages import WindowError
from .entry import check, entry, present
from .pool import access_list, exportable, located_device

GRANULARITY = 2 << 20
_T = T.CUmemAllocationHandleType
_DESCRIPTOR = _T.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def memory_of(proc: Process, value: Any) -> tuple[Handle, Memory]:
    """The handle with the value `value`, and its physical memory. Raises Failure if it is no handle of physical
    memory.
    """
    handle = proc.get(value, Handle, R.CUDA_ERROR_INVALID_VALUE)
    check(isinstance(handle.item, Memory))
    return handle, cast(Memory, handle.item)


@entry(1)
def cuMemGetAllocationGranularity(proc: Process, prop: Any, option: Any) -> int:
    check(prop is not None)
    located_device(proc, prop.location)
    return GRANULARITY


@entry(1, unsafe=True)
def cuMemCreate(proc: Process, size: int, prop: Any, flags: int) -> Any:
    check(prop is not None)
    check(prop.type == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
    types, device = exportable(int(prop.requestedHandleTypes)), located_device(proc, prop.location)
    check(flags == 0 and size > 0 and size % GRANULARITY == 0)
    proc.memory.charge(device, size)
    try:
        physical = proc.machine.window.mappings.physical.create(size, device.index)
    except WindowError as error:
        device.used -= size
        raise proc.memory.full(device, size, str(error)) from None
    return T.CUmemGenericAllocationHandle(proc.open_handle(Memory(size, types, device, physical)).handle)


@entry(unsafe=True)
def cuMemRelease(proc: Process, handle: Any) -> None:
    """Releases a handle. Memory stays while it is mapped or bound, a multicast object while it is mapped."""
    found = proc.get(handle, Handle, R.CUDA_ERROR_INVALID_VALUE)
    found.references -= 1
    if found.references == 0:
        proc.remove(found)
        proc.machine.mappables.let_go(found.item)


@entry(1, unsafe=True)
def cuMemAddressReserve(proc: Process, size: int, alignment: int, addr: Any, flags: int) -> Any:
    """Reserves addresses. A requested fixed address is ignored."""
    check(flags == 0 and size > 0 and size % GRANULARITY == 0)
    check(alignment >= 0 and alignment & (alignment - 1) == 0)
    try:
        return T.CUdeviceptr(proc.memory.reserve(size, max(alignment, GRANULARITY)))
    except WindowError as error:
        text = f"{size} bytes of addresses were requested; {error}: set DRVFUSE_EMU_WINDOW_GIB to a larger number"
        raise Failure(R.CUDA_ERROR_OUT_OF_MEMORY, Report("out_of_memory", text)) from None


@entry(unsafe=True)
def cuMemAddressFree(proc: Process, ptr: Any, size: int) -> None:
    try:
        proc.memory.free_reservation(ptr, size)
    except ValueError:
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None


@entry(unsafe=True)
def cuMemMap(proc: Process, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
    """Maps memory or a multicast object. No device may access the range before cuMemSetAccess. For a multicast object
    the call waits until all `numDevices` devices were added to the object.
    """
    found = proc.get(handle, Handle, R.CUDA_ERROR_INVALID_VALUE)
    address = ptr
    check(flags == 0 and offset == 0 and size > 0 and size % GRANULARITY == 0 and address % GRANULARITY == 0)
    check(size <= found.item.nbytes)
    if isinstance(found.item, Multicast):
        multicast.await_team(proc, found, found.item, "cuMemMap")
    try:
        proc.memory.map(address, size, found)
    except ValueError:
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None


def _mapped(proc: Process, ptr: Any, size: int) -> list[Allocation]:
    """The mappings in a range. Raises Failure unless the range begins and ends with a mapping."""
    address = ptr
    mapped = proc.memory.within(address, size)
    check(mapped and all(a.mapped is not None for a in mapped))
    check(mapped[0].base == address and mapped[-1].base + mapped[-1].nbytes == address + size)
    return mapped


@entry(unsafe=True)
def cuMemUnmap(proc: Process, ptr: Any, size: int) -> None:
    """Unmaps at once. Work that still uses the range faults."""
    for mapping in _mapped(proc, ptr, size):
        proc.memory.unmap(mapping)


@entry(unsafe=True)
def cuMemSetAccess(proc: Process, ptr: Any, size: int, desc: Any, count: int) -> None:
    """Sets access rights. Only devices that were added to a multicast object can have access to its addresses; for
    other devices the result is CUDA_ERROR_ILLEGAL_STATE.
    """
    mapped = _mapped(proc, ptr, size)
    check(sum(a.nbytes for a in mapped) == size)
    access = access_list(proc, desc, count)
    for device, flags in access:
        for allocation in mapped:
            if allocation.multicast is not None:
                check(flags == 0 or device in allocation.multicast.devices, R.CUDA_ERROR_ILLEGAL_STATE)
                continue
            owner = allocation.device
            assert owner is not None
            check(device is owner or flags == 0 or proc.machine.can_reach(device, owner), R.CUDA_ERROR_INVALID_DEVICE)
    for allocation in mapped:
        allocation.access.update((device.index, flags) for device, flags in access)
        proc.memory.refresh(allocation)


@entry(1)
def cuMemGetAccess(proc: Process, location: Any, ptr: Any) -> int:
    device = located_device(proc, location)
    allocation = present(proc.memory.find(ptr))
    check(allocation.mapped is not None)
    return allocation.access.get(device.index, 0)


@entry(1)
def cuMemRetainAllocationHandle(proc: Process, addr: Any) -> Any:
    found = present(present(proc.memory.find(addr)).handle)
    if found.references == 0:
        proc.add(found)
        proc.machine.mappables.hold(found.item)
    found.references += 1
    return T.CUmemGenericAllocationHandle(found.handle)


@entry(1)
def cuMemGetAllocationPropertiesFromHandle(proc: Process, handle: Any) -> Any:
    prop = T.CUmemAllocationProp()
    prop.type = T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = T.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory = memory_of(proc, handle)[1]
    prop.location.id = memory.device.index
    prop.requestedHandleTypes = _T(memory.handle_types)
    return prop


@entry(1)
def cuMemExportToShareableHandle(proc: Process, handle: Any, handleType: Any, flags: int) -> int:
    """Returns a new file descriptor of this operating-system process, which the caller closes. The descriptor keeps the
    memory alive.
    """
    item = proc.get(handle, Handle, R.CUDA_ERROR_INVALID_VALUE).item
    check(flags == 0)
    check(handleType == _DESCRIPTOR and item.handle_types == _DESCRIPTOR, R.CUDA_ERROR_NOT_SUPPORTED)
    return proc.machine.mappables.descriptors.export(item)


@entry(1)
def cuMemImportFromShareableHandle(proc: Process, osHandle: Any, shHandleType: Any) -> Any:
    """Returns a new handle of memory or of a multicast object that a process of the machine has exported. The caller
    still owns the descriptor.
    """
    check(shHandleType != _T.CU_MEM_HANDLE_TYPE_FABRIC, R.CUDA_ERROR_NOT_PERMITTED)
    check(shHandleType == _DESCRIPTOR, R.CUDA_ERROR_NOT_SUPPORTED)
    descriptor = osHandle
    item = proc.machine.mappables.descriptors.find(descriptor)
    if not isinstance(item, Memory | Multicast):
        text = (
            f"{descriptor} is not a descriptor of memory or of a multicast object that was exported on this machine; "
            "processes share a machine by DRVFUSE_EMU_MACHINE, or if `drvfuse run --driver emu` starts them"
        )
        raise Failure(R.CUDA_ERROR_INVALID_VALUE, Report("descriptor", text))
    return T.CUmemGenericAllocationHandle(proc.open_handle(item).handle)
