# SPDX-License-Identifier: Apache-2.0
"""Multicast objects. cuMemMap, cuMemSetAccess, cuMemUnmap and cuMemRelease accept them too (`vmm`)."""

from __future__ import annotations

from typing import Any, cast

from ..bindings import R, T
from ..machine.memory import multicast
from ..machine.memory.allocation import Allocation
from ..machine.objects import Device, Handle, Memory, Multicast
from ..machine.process.process import Process
from ..space.members import PIECE
from .entry import check, entry, present
from .vmm import exportable, memory_of

RECOMMENDED = 2 * PIECE
"""The recommended granularity. It differs from the minimum, so that a program that confuses the two is noticed."""


def _object(proc: Process, value: Any) -> tuple[Handle, Multicast]:
    """The handle of a multicast object, and the object."""
    handle = proc.get(value, Handle, R.CUDA_ERROR_INVALID_VALUE)
    check(isinstance(handle.item, Multicast))
    return handle, cast(Multicast, handle.item)


def _properties(proc: Process, prop: Any) -> int:
    """Check a CUmulticastObjectProp, and return its handle types."""
    check(any(multicast.supported(proc.machine, device) for device in proc.machine.devices), R.CUDA_ERROR_NOT_SUPPORTED)
    check(prop is not None)
    check(prop.flags == 0 and 0 < prop.numDevices <= len(proc.machine.devices))
    return exportable(int(prop.handleTypes))


@entry(1)
def cuMulticastGetGranularity(proc: Process, prop: Any, option: Any) -> int:
    kinds = T.CUmulticastGranularity_flags
    _properties(proc, prop)
    return RECOMMENDED if option == kinds.CU_MULTICAST_GRANULARITY_RECOMMENDED else PIECE


@entry(1, unsafe=True)
def cuMulticastCreate(proc: Process, prop: Any) -> Any:
    types, size = _properties(proc, prop), int(prop.size)
    check(size > 0 and multicast.aligned(size))
    check(size <= proc.machine.window.nbytes, R.CUDA_ERROR_OUT_OF_MEMORY)
    return T.CUmemGenericAllocationHandle(multicast.create(proc, size, int(prop.numDevices), types).handle)


@entry(unsafe=True)
def cuMulticastAddDevice(proc: Process, mcHandle: Any, dev: Any) -> None:
    multicast.add_device(proc, _object(proc, mcHandle)[1], proc.device(dev))


def _bind_memory(
    proc: Process, handle: Any, device: Device | None, offset: int, memory: Any, at: int, size: int, flags: int
) -> None:
    (own, item), (theirs, source) = _object(proc, handle), memory_of(proc, memory)
    check(flags == 0 and size > 0 and multicast.aligned(offset, at, size))
    check(at + size <= source.nbytes and offset + size <= item.nbytes)
    check(device in (None, source.device), R.CUDA_ERROR_INVALID_DEVICE)
    multicast.await_team(proc, own, item, "cuMulticastBindMem")
    check(theirs.references)
    multicast.bind(proc, item, offset, source, at, size)


def _bind_address(
    proc: Process, handle: Any, device: Device | None, offset: int, address: int, size: int, flags: int
) -> None:
    """Bind memory by its address: memory of cuMemCreate, wherever it is mapped, or memory of a pool."""
    (own, item), found = _object(proc, handle), present(proc.memory.find(address))
    check(found.memory is not None or found.pool is not None)
    at = address - found.base
    check(flags == 0 and size > 0 and multicast.aligned(offset, address, size))
    check(at + size <= found.nbytes and offset + size <= item.nbytes)
    check(device in (None, found.device), R.CUDA_ERROR_INVALID_DEVICE)
    multicast.await_team(proc, own, item, "cuMulticastBindAddr")
    check(proc.memory.find(address) is found)
    source: Memory | Allocation = found.memory or found
    multicast.bind(proc, item, offset, source, at, size)


@entry(unsafe=True)
def cuMulticastBindMem(
    proc: Process, mcHandle: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
) -> None:
    """Waits until all `numDevices` devices were added to the object, then binds memory."""
    _bind_memory(proc, mcHandle, None, mcOffset, memHandle, memOffset, size, flags)


@entry(unsafe=True)
def cuMulticastBindAddr(proc: Process, mcHandle: Any, mcOffset: int, memptr: Any, size: int, flags: int) -> None:
    """Waits until all `numDevices` devices were added to the object, then binds memory."""
    _bind_address(proc, mcHandle, None, mcOffset, memptr, size, flags)


@entry(unsafe=True, optional=True)
def cuMulticastBindMem_v2(
    proc: Process, mcHandle: Any, dev: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
) -> None:
    """Binds memory, as cuMulticastBindMem does, but the memory must be on the device `dev`."""
    _bind_memory(proc, mcHandle, proc.device(dev), mcOffset, memHandle, memOffset, size, flags)


@entry(unsafe=True, optional=True)
def cuMulticastBindAddr_v2(
    proc: Process, mcHandle: Any, dev: Any, mcOffset: int, memptr: Any, size: int, flags: int
) -> None:
    _bind_address(proc, mcHandle, proc.device(dev), mcOffset, memptr, size, flags)


@entry(unsafe=True)
def cuMulticastUnbind(proc: Process, mcHandle: Any, dev: Any, mcOffset: int, size: int) -> None:
    """Unbinds at once. Work that still uses the range causes a fault."""
    (_, item), device = _object(proc, mcHandle), proc.device(dev)
    check(size > 0 and multicast.aligned(mcOffset, size) and mcOffset + size <= item.nbytes)
    multicast.unbind(proc, item, device, mcOffset, size)
