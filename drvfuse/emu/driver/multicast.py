# SPDX-License-Identifier: Apache-2.0
"""Multicast objects. cuMemMap, cuMemSetAccess, cuMemUnmap and cuMemRelease take them too (`vmm`)."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine import multicast
from ..machine.machine import Machine
from ..machine.memory import Allocation
from ..machine.objects import Device, Memory, Multicast
from ..space.members import PIECE
from .entry import check, entry, is_enum, number, present

RECOMMENDED = 2 * PIECE
"""More than the minimum, so that who mixes them up notices; what a GPU recommends is its driver's affair."""


def _object(m: Machine, handle: Any) -> Multicast:
    return m.get(handle, Multicast, R.CUDA_ERROR_INVALID_VALUE)


def _properties(m: Machine, prop: Any) -> None:
    """Check a CUmulticastObjectProp. Objects with shareable handles are not emulated."""
    check(any(multicast.supported(m, device) for device in m.devices), R.CUDA_ERROR_NOT_SUPPORTED)
    check(prop is not None)
    check(prop.flags == 0 and 0 < prop.numDevices <= len(m.devices))
    check(int(prop.handleTypes) == 0, R.CUDA_ERROR_NOT_SUPPORTED)


@entry(1)
def cuMulticastGetGranularity(m: Machine, prop: Any, option: Any) -> int:
    kinds = T.CUmulticastGranularity_flags
    is_enum(option, kinds, "option")
    _properties(m, prop)
    return RECOMMENDED if option == kinds.CU_MULTICAST_GRANULARITY_RECOMMENDED else PIECE


@entry(1, unsafe=True)
def cuMulticastCreate(m: Machine, prop: Any) -> Any:
    _properties(m, prop)
    size = int(prop.size)
    check(size > 0 and multicast.aligned(size))
    check(size <= m.window.nbytes, R.CUDA_ERROR_OUT_OF_MEMORY)
    return T.CUmemGenericAllocationHandle(multicast.create(m, size, int(prop.numDevices)).handle)


@entry(unsafe=True)
def cuMulticastAddDevice(m: Machine, mcHandle: Any, dev: Any) -> None:
    multicast.add_device(m, _object(m, mcHandle), m.device(dev))


def _bind_memory(
    m: Machine, handle: Any, device: Device | None, offset: int, memory: Any, at: int, size: int, flags: int
) -> None:
    item, source = _object(m, handle), m.get(memory, Memory, R.CUDA_ERROR_INVALID_VALUE)
    check(flags == 0 and size > 0 and multicast.aligned(offset, at, size))
    check(at + size <= source.nbytes and offset + size <= item.nbytes)
    check(device in (None, source.device), R.CUDA_ERROR_INVALID_DEVICE)
    multicast.await_team(m, item, "cuMulticastBindMem")
    check(m.handles.get(source.handle) is source)
    multicast.bind(m, item, offset, source, at, size)


def _bind_address(
    m: Machine, handle: Any, device: Device | None, offset: int, address: int, size: int, flags: int
) -> None:
    """Memory of cuMemCreate, by any address that it is mapped at, or of a pool."""
    item, found = _object(m, handle), present(m.memory.find(address))
    check(found.memory is not None or found.pool is not None)
    at = address - found.base
    check(flags == 0 and size > 0 and multicast.aligned(offset, address, size))
    check(at + size <= found.nbytes and offset + size <= item.nbytes)
    check(device in (None, found.device), R.CUDA_ERROR_INVALID_DEVICE)
    multicast.await_team(m, item, "cuMulticastBindAddr")
    check(m.memory.find(address) is found)
    source: Memory | Allocation = found.memory or found
    multicast.bind(m, item, offset, source, at, size)


@entry(unsafe=True)
def cuMulticastBindMem(
    m: Machine, mcHandle: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
) -> None:
    """Waits until all devices were added."""
    _bind_memory(m, mcHandle, None, mcOffset, memHandle, memOffset, size, flags)


@entry(unsafe=True)
def cuMulticastBindAddr(m: Machine, mcHandle: Any, mcOffset: int, memptr: Any, size: int, flags: int) -> None:
    """Waits until all devices were added."""
    _bind_address(m, mcHandle, None, mcOffset, number(memptr), size, flags)


@entry(unsafe=True, optional=True)
def cuMulticastBindMem_v2(
    m: Machine, mcHandle: Any, dev: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
) -> None:
    """The same, where the memory has to be of `dev`."""
    _bind_memory(m, mcHandle, m.device(dev), mcOffset, memHandle, memOffset, size, flags)


@entry(unsafe=True, optional=True)
def cuMulticastBindAddr_v2(
    m: Machine, mcHandle: Any, dev: Any, mcOffset: int, memptr: Any, size: int, flags: int
) -> None:
    _bind_address(m, mcHandle, m.device(dev), mcOffset, number(memptr), size, flags)


@entry(unsafe=True)
def cuMulticastUnbind(m: Machine, mcHandle: Any, dev: Any, mcOffset: int, size: int) -> None:
    """Waits for nothing: work that still uses the range faults."""
    item, device = _object(m, mcHandle), m.device(dev)
    check(size > 0 and multicast.aligned(mcOffset, size) and mcOffset + size <= item.nbytes)
    multicast.unbind(m, item, device, mcOffset, size)
