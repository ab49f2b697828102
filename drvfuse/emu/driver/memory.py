# SPDX-License-Identifier: Apache-2.0
"""Device and pinned memory."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.memory.allocation import Allocation
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from .entry import check, entry, host_address, number, present

_HOST_PORTABLE, _HOST_DEVICEMAP, _HOST_WRITECOMBINED = 1, 2, 4
_REGISTER_FLAGS = 0xF
_PITCH = 512


# Allocation ---------------------------------------------------------------------------------------------------------


@entry(1, unsafe=True)
def cuMemAlloc(proc: Process, bytesize: int) -> Any:
    context = proc.current()
    check(bytesize > 0)
    return T.CUdeviceptr(proc.memory.alloc(context, bytesize).base)


@entry(2, unsafe=True)
def cuMemAllocPitch(proc: Process, WidthInBytes: int, Height: int, ElementSizeBytes: int) -> tuple[Any, int]:
    context = proc.current()
    check(WidthInBytes > 0 and Height > 0 and ElementSizeBytes in (4, 8, 16))
    pitch = -(-WidthInBytes // _PITCH) * _PITCH
    return T.CUdeviceptr(proc.memory.alloc(context, pitch * Height).base), pitch


@entry(unsafe=True)
def cuMemFree(proc: Process, dptr: Any) -> None:
    """Waits for all work of the memory's context, as the driver does, then frees it. Memory of another process is only
    closed.
    """
    proc.current()
    address = number(dptr)
    if address == 0:
        return
    allocation = proc.memory.at(address)
    if allocation is None or not allocation.freeable:
        raise proc.memory.stray("cuMemFree needs an address that an allocation returned", address)
    check(allocation.origin is None or allocation.pool is not None)
    if allocation.pool is not None:
        check(not allocation.freed)
        proc.synchronise(proc.current())
        proc.memory.give_back(allocation)
        return
    if allocation.graph is not None:
        check(allocation.graph.freeable_by_call)
        proc.synchronise(proc.current())
        proc.graph_memory.free_now(allocation.graph)
        return
    assert allocation.context is not None
    proc.synchronise(allocation.context)
    proc.memory.free(allocation)


@entry(2)
def cuMemGetInfo(proc: Process) -> tuple[int, int]:
    device = proc.current().device
    return device.total - device.used, device.total


@entry(2)
def cuMemGetAddressRange(proc: Process, dptr: Any) -> tuple[Any, int]:
    proc.current()
    allocation = present(proc.memory.find(number(dptr)), R.CUDA_ERROR_NOT_FOUND)
    return T.CUdeviceptr(allocation.base), allocation.nbytes


@entry(1, unsafe=True)
def cuMemAllocHost(proc: Process, bytesize: int) -> int:
    return cuMemHostAlloc(proc, bytesize, 0)


@entry(1, unsafe=True)
def cuMemHostAlloc(proc: Process, bytesize: int, Flags: int) -> int:
    context = proc.current()
    check(bytesize > 0 and 0 <= int(Flags) < 8)
    return proc.memory.host_alloc(context, bytesize, int(Flags) | _HOST_DEVICEMAP).base


@entry(unsafe=True)
def cuMemFreeHost(proc: Process, p: Any) -> None:
    """Waits for all work of the memory's context, then frees it."""
    address, _ = host_address(p)
    allocation = present(proc.memory.at(address))
    check(allocation.host_flags is not None and not allocation.registered and allocation.host is None)
    _free_host(proc, allocation)


def _free_host(proc: Process, allocation: Allocation) -> None:
    assert allocation.context is not None
    proc.machine.waits.wait(proc.context_ops(allocation.context))
    proc.memory.free(allocation)


def _host(proc: Process, p: Any) -> Allocation:
    allocation = present(proc.memory.find(host_address(p)[0]))
    check(allocation.host_flags is not None)
    return allocation


@entry(1)
def cuMemHostGetDevicePointer(proc: Process, p: Any, Flags: int) -> Any:
    """Returns the device address. It is the same for memory of cuMemHostAlloc; registered memory has another address,
    or none.
    """
    proc.current()
    check(Flags == 0)
    found = _host(proc, p)
    check(not found.registered or found.alias is not None, R.CUDA_ERROR_NOT_SUPPORTED)
    return T.CUdeviceptr(proc.memory.on_device(host_address(p)[0]))


@entry(1)
def cuMemHostGetFlags(proc: Process, p: Any) -> int:
    return present(_host(proc, p).host_flags)


@entry(unsafe=True)
def cuMemHostRegister(proc: Process, p: Any, bytesize: int, Flags: int) -> None:
    """Pins memory for asynchronous copies. Kernels can access the memory, at the address that cuMemHostGetDevicePointer
    returns, if it is a MAP_SHARED mapping of a file with an open descriptor or if the flag DEVICEMAP is given (see
    `machine/memory/host_files.py`).
    """
    context = proc.current()
    address, _ = host_address(p)
    flags = int(Flags)
    check(address and bytesize > 0 and 0 <= flags <= _REGISTER_FLAGS)
    check(not proc.memory.within(address, bytesize), R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    window = proc.machine.window
    check(proc.foreign is not None or address + bytesize <= window.base or window.end <= address)
    file = proc.file_behind(address, bytesize)
    if file is None and flags & _HOST_DEVICEMAP:
        file = present(proc.make_shared(address, bytesize), R.CUDA_ERROR_NOT_SUPPORTED)
    proc.memory.register(context, address, bytesize, flags, file)


@entry(unsafe=True)
def cuMemHostUnregister(proc: Process, p: Any) -> None:
    address, _ = host_address(p)
    found = present(proc.memory.find(address), R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    check(found.registered, R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    allocation = present(proc.memory.at(address))
    _free_host(proc, allocation)


@entry(1)
def cuMemGetHandleForAddressRange(proc: Process, dptr: Any, size: int, handleType: Any, flags: int) -> int:
    """Returns CUDA_ERROR_NOT_SUPPORTED, as no emulated device has DMA buffers (DMA_BUF_SUPPORTED is 0)."""
    proc.current()
    check(size > 0 and proc.memory.uncovered(dptr, size) is None)
    raise Failure(R.CUDA_ERROR_NOT_SUPPORTED)
