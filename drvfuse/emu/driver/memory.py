# SPDX-License-Identifier: Apache-2.0
"""Device and pinned memory."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.machine import Machine
from ..machine.memory import Allocation
from .entry import check, entry, host_address, number, present

_HOST_PORTABLE, _HOST_DEVICEMAP, _HOST_WRITECOMBINED = 1, 2, 4
_REGISTER_FLAGS = 0xF
_PITCH = 512


# Allocation ---------------------------------------------------------------------------------------------------------


@entry(1, unsafe=True)
def cuMemAlloc(m: Machine, bytesize: int) -> Any:
    context = m.current()
    check(bytesize > 0)
    return T.CUdeviceptr(m.memory.alloc(context, bytesize).base)


@entry(2, unsafe=True)
def cuMemAllocPitch(m: Machine, WidthInBytes: int, Height: int, ElementSizeBytes: int) -> tuple[Any, int]:
    context = m.current()
    check(WidthInBytes > 0 and Height > 0 and ElementSizeBytes in (4, 8, 16))
    pitch = -(-WidthInBytes // _PITCH) * _PITCH
    return T.CUdeviceptr(m.memory.alloc(context, pitch * Height).base), pitch


@entry(unsafe=True)
def cuMemFree(m: Machine, dptr: Any) -> None:
    """Waits for all work of the memory's context first, as the driver does."""
    m.current()
    address = number(dptr)
    if address == 0:
        return
    allocation = m.memory.at(address)
    if allocation is None or allocation.device is None or allocation.memory is not None:
        raise m.memory.stray("cuMemFree needs an address that an allocation returned", address)
    if allocation.pool is not None:
        check(not allocation.freed)
        m.synchronise(m.current())
        m.memory.pool_free(allocation.pool, address)
        return
    assert allocation.context is not None
    m.synchronise(allocation.context)
    m.memory.free(allocation)


@entry(2)
def cuMemGetInfo(m: Machine) -> tuple[int, int]:
    device = m.current().device
    return device.total - device.used, device.total


@entry(2)
def cuMemGetAddressRange(m: Machine, dptr: Any) -> tuple[Any, int]:
    m.current()
    allocation = present(m.memory.find(number(dptr)), R.CUDA_ERROR_NOT_FOUND)
    return T.CUdeviceptr(allocation.base), allocation.nbytes


@entry(1, unsafe=True)
def cuMemAllocHost(m: Machine, bytesize: int) -> int:
    return cuMemHostAlloc(m, bytesize, 0)


@entry(1, unsafe=True)
def cuMemHostAlloc(m: Machine, bytesize: int, Flags: int) -> int:
    context = m.current()
    check(bytesize > 0 and 0 <= int(Flags) < 8)
    return m.memory.host_alloc(context, bytesize, int(Flags) | _HOST_DEVICEMAP).base


@entry(unsafe=True)
def cuMemFreeHost(m: Machine, p: Any) -> None:
    """Waits for all work of the memory's context first."""
    address, _ = host_address(p)
    allocation = present(m.memory.at(address))
    check(allocation.host_flags is not None and not allocation.registered)
    _free_host(m, allocation)


def _free_host(m: Machine, allocation: Allocation) -> None:
    assert allocation.context is not None
    m.progress.wait(m.context_ops(allocation.context))
    m.memory.free(allocation)


def _host(m: Machine, p: Any) -> Allocation:
    allocation = present(m.memory.find(host_address(p)[0]))
    check(allocation.host_flags is not None)
    return allocation


@entry(1)
def cuMemHostGetDevicePointer(m: Machine, p: Any, Flags: int) -> Any:
    """Memory from cuMemHostAlloc has the same address on a device; registered memory has none there."""
    m.current()
    check(Flags == 0)
    check(not _host(m, p).registered, R.CUDA_ERROR_NOT_SUPPORTED)
    return T.CUdeviceptr(host_address(p)[0])


@entry(1)
def cuMemHostGetFlags(m: Machine, p: Any) -> int:
    return present(_host(m, p).host_flags)


@entry(unsafe=True)
def cuMemHostRegister(m: Machine, p: Any, bytesize: int, Flags: int) -> None:
    """Pins memory for asynchronous copies. Emulated kernels cannot reach it: mapping it is not supported."""
    context = m.current()
    address, _ = host_address(p)
    flags = int(Flags)
    check(address and bytesize > 0 and 0 <= flags <= _REGISTER_FLAGS)
    check(not flags & _HOST_DEVICEMAP, R.CUDA_ERROR_NOT_SUPPORTED)
    check(not m.memory.within(address, bytesize), R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    m.memory.add(Allocation(address, bytesize, None, context=context, host_flags=flags, registered=True))


@entry(unsafe=True)
def cuMemHostUnregister(m: Machine, p: Any) -> None:
    allocation = present(m.memory.at(host_address(p)[0]), R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    check(allocation.registered, R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    _free_host(m, allocation)
