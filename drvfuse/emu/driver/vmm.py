# SPDX-License-Identifier: Apache-2.0
"""Virtual memory: physical memory, addresses, mappings and their access."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine import multicast
from ..machine.failure import Failure
from ..machine.machine import Machine
from ..machine.memory import Allocation
from ..machine.objects import Mappable, Memory, Multicast
from ..space.window import WindowError
from .entry import check, entry, is_enum, number, present
from .pool import access_list, located_device

GRANULARITY = 2 << 20


def _memory(m: Machine, handle: Any) -> Memory:
    return m.get(handle, Memory, R.CUDA_ERROR_INVALID_VALUE)


def _device(m: Machine, prop: Any) -> Any:
    """The device of a CUmemAllocationProp that can be emulated."""
    check(prop is not None)
    check(prop.type == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
    none = T.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    check(prop.requestedHandleTypes == none, R.CUDA_ERROR_NOT_SUPPORTED)
    return located_device(m, prop.location)


@entry(1)
def cuMemGetAllocationGranularity(m: Machine, prop: Any, option: Any) -> int:
    is_enum(option, T.CUmemAllocationGranularity_flags, "option")
    check(prop is not None)
    located_device(m, prop.location)
    return GRANULARITY


@entry(1, unsafe=True)
def cuMemCreate(m: Machine, size: int, prop: Any, flags: int) -> Any:
    device = _device(m, prop)
    check(flags == 0 and size > 0 and size % GRANULARITY == 0)
    m.memory.charge(device, size)
    try:
        physical = m.window.create(size, device.index)
    except WindowError as error:
        device.used -= size
        raise m.memory.full(device, size, str(error)) from None
    return T.CUmemGenericAllocationHandle(m.add(Memory(size, device, physical)).handle)


@entry(unsafe=True)
def cuMemRelease(m: Machine, handle: Any) -> None:
    """Memory stays while it is mapped or bound, a multicast object while it is mapped."""
    item = m.get(handle, Mappable, R.CUDA_ERROR_INVALID_VALUE)
    item.references -= 1
    if item.references == 0:
        m.remove(item)
    multicast.drop(m, item)


@entry(1, unsafe=True)
def cuMemAddressReserve(m: Machine, size: int, alignment: int, addr: Any, flags: int) -> Any:
    """A fixed address is a wish that is not granted."""
    check(flags == 0 and size > 0 and size % GRANULARITY == 0)
    check(alignment >= 0 and alignment & (alignment - 1) == 0)
    try:
        return T.CUdeviceptr(m.window.reserve(size, max(alignment, GRANULARITY)))
    except WindowError as error:
        text = f"{size} bytes of addresses were asked for; {error} (DRVFUSE_EMU_WINDOW_GIB)"
        raise Failure(R.CUDA_ERROR_OUT_OF_MEMORY, Report("out_of_memory", text)) from None


@entry(unsafe=True)
def cuMemAddressFree(m: Machine, ptr: Any, size: int) -> None:
    try:
        m.window.free_reservation(number(ptr), size)
    except ValueError:
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None


@entry(unsafe=True)
def cuMemMap(m: Machine, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
    """No device may access the range before cuMemSetAccess. It waits for the team of a multicast object."""
    item = m.get(handle, Mappable, R.CUDA_ERROR_INVALID_VALUE)
    address = number(ptr)
    check(flags == 0 and offset == 0 and size > 0 and size % GRANULARITY == 0 and address % GRANULARITY == 0)
    check(size <= item.nbytes)
    try:
        if isinstance(item, Multicast):
            multicast.await_team(m, item, "cuMemMap")
            m.window.map_multicast(address, size, item.members)
            m.memory.add(Allocation(address, size, None, multicast=item))
        elif isinstance(item, Memory):
            m.window.map(address, size, item.physical, offset)
            m.memory.add(Allocation(address, size, item.device, memory=item))
    except ValueError:
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None
    item.holds += 1


def _mapped(m: Machine, ptr: Any, size: int) -> tuple[int, list[Allocation]]:
    """(address, mappings) of a range that begins and ends with a mapping."""
    address = number(ptr)
    mapped = m.memory.within(address, size)
    check(mapped and all(a.mapped is not None for a in mapped))
    check(mapped[0].base == address and mapped[-1].base + mapped[-1].nbytes == address + size)
    return address, mapped


@entry(unsafe=True)
def cuMemUnmap(m: Machine, ptr: Any, size: int) -> None:
    """Waits for nothing: work that still uses the range faults."""
    address, mapped = _mapped(m, ptr, size)
    m.window.unmap(address, size)
    for allocation in mapped:
        m.memory.drop(allocation)
        assert allocation.mapped is not None
        allocation.mapped.holds -= 1
        multicast.drop(m, allocation.mapped)


@entry(unsafe=True)
def cuMemSetAccess(m: Machine, ptr: Any, size: int, desc: Any, count: int) -> None:
    """Of a multicast object only the devices of its team can have access: ILLEGAL_STATE for others."""
    _, mapped = _mapped(m, ptr, size)
    check(sum(a.nbytes for a in mapped) == size)
    access = access_list(m, desc, count)
    for device, flags in access:
        for allocation in mapped:
            if allocation.multicast is not None:
                check(flags == 0 or device in allocation.multicast.devices, R.CUDA_ERROR_ILLEGAL_STATE)
                continue
            owner = allocation.device
            assert owner is not None
            check(device is owner or flags == 0 or m.can_reach(device, owner), R.CUDA_ERROR_INVALID_DEVICE)
    for allocation in mapped:
        allocation.access.update((device.index, flags) for device, flags in access)
        m.memory.refresh(allocation)


@entry(1)
def cuMemGetAccess(m: Machine, location: Any, ptr: Any) -> int:
    device = located_device(m, location)
    allocation = present(m.memory.find(number(ptr)))
    check(allocation.mapped is not None)
    return allocation.access.get(device.index, 0)


@entry(1)
def cuMemRetainAllocationHandle(m: Machine, addr: Any) -> Any:
    item = present(present(m.memory.find(number(addr))).mapped)
    if item.references == 0:
        m.add(item)
    item.references += 1
    return T.CUmemGenericAllocationHandle(item.handle)


@entry(1)
def cuMemGetAllocationPropertiesFromHandle(m: Machine, handle: Any) -> Any:
    prop = T.CUmemAllocationProp()
    prop.type = T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = T.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = _memory(m, handle).device.index
    return prop


@entry(1)
def cuMemExportToShareableHandle(m: Machine, handle: Any, handleType: Any, flags: int) -> Any:
    m.get(handle, Mappable, R.CUDA_ERROR_INVALID_VALUE)
    raise Failure(R.CUDA_ERROR_NOT_SUPPORTED)


@entry(1)
def cuMemImportFromShareableHandle(m: Machine, osHandle: Any, shHandleType: Any) -> Any:
    raise Failure(R.CUDA_ERROR_NOT_SUPPORTED)
