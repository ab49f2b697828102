# SPDX-License-Identifier: Apache-2.0
"""Memory pools: allocation and freeing in stream order."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.failure import Failure
from ..machine.machine import Machine
from ..machine.memory import READ_WRITE
from ..machine.objects import Device, Pool, Stream
from ..machine.work import Free
from .entry import check, entry, is_enum, number

_A = T.CUmemPool_attribute
_COUNTERS = (
    _A.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    _A.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    _A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH,
)
_FLAGS = (
    _A.CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    _A.CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    _A.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
)


def _pool(m: Machine, value: Any) -> Pool:
    pool = m.get(value, Pool, R.CUDA_ERROR_INVALID_VALUE)
    check(not pool.destroyed)
    return pool


def located_device(m: Machine, location: Any) -> Device:
    """The device of a CUmemLocation; host locations are not supported."""
    check(location is not None)
    kinds = T.CUmemLocationType
    check(location.type != kinds.CU_MEM_LOCATION_TYPE_INVALID)
    check(location.type == kinds.CU_MEM_LOCATION_TYPE_DEVICE, R.CUDA_ERROR_NOT_SUPPORTED)
    return m.device(location.id)


def access_list(m: Machine, descriptors: Any, count: int) -> list[tuple[Device, int]]:
    """(device, CUmemAccess_flags) of CUmemAccessDesc entries."""
    descriptors = list(descriptors or [])
    if count > len(descriptors):
        raise RuntimeError(f"List is too small: {len(descriptors)} < {count}")
    found = [(located_device(m, d.location), int(d.flags)) for d in descriptors[:count]]
    check(all(flags in (0, 1, 3) for _, flags in found))
    return found


@entry(1, unsafe=True)
def cuMemPoolCreate(m: Machine, poolProps: Any) -> Any:
    check(poolProps is not None)
    check(poolProps.allocType == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
    none = T.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    check(poolProps.handleTypes == none, R.CUDA_ERROR_NOT_SUPPORTED)
    pool = Pool(located_device(m, poolProps.location), maximum=int(poolProps.maxSize))
    return T.CUmemoryPool(m.add(pool).handle)


@entry(unsafe=True)
def cuMemPoolDestroy(m: Machine, pool: Any) -> None:
    """Memory that is still allocated stays until it is freed."""
    found = _pool(m, pool)
    check(not found.is_default)
    found.destroyed = True
    if found.device.pool is found:
        found.device.pool = found.device.default_pool
    m.remove(found)


@entry()
def cuMemPoolSetAccess(m: Machine, pool: Any, map: Any, count: int) -> None:
    found = _pool(m, pool)
    access = access_list(m, map, count)
    for device, flags in access:
        check(device is not found.device or flags == READ_WRITE)
        check(device is found.device or m.can_reach(device, found.device), R.CUDA_ERROR_INVALID_DEVICE)
    found.access.update((device.index, flags) for device, flags in access)
    m.memory.refresh_pool(found)


@entry(1)
def cuMemPoolGetAccess(m: Machine, memPool: Any, location: Any) -> Any:
    found = _pool(m, memPool)
    device = located_device(m, location)
    return T.CUmemAccess_flags(READ_WRITE if device is found.device else found.access.get(device.index, 0))


@entry()
def cuMemPoolSetAttribute(m: Machine, pool: Any, attr: Any, value: Any) -> None:
    is_enum(attr, _A, "attr")
    found = _pool(m, pool)
    if attr in (_A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH):
        check(int(value) == 0)
        found.used_high = found.used
        return
    check(attr not in _COUNTERS)
    found.attributes[int(attr)] = int(value)


@entry(1)
def cuMemPoolGetAttribute(m: Machine, pool: Any, attr: Any) -> Any:
    is_enum(attr, _A, "attr")
    found = _pool(m, pool)
    if attr in _FLAGS:
        return found.attributes.get(int(attr), 1)
    if attr == _A.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return T.cuuint64_t(found.attributes.get(int(attr), 0))
    check(attr in _COUNTERS, R.CUDA_ERROR_NOT_SUPPORTED)
    high = attr in (_A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    return T.cuuint64_t(found.used_high if high else found.used)


@entry()
def cuMemPoolTrimTo(m: Machine, pool: Any, minBytesToKeep: int) -> None:
    """Freed memory goes back at once, so nothing is left to trim."""
    _pool(m, pool)


@entry(1)
def cuMemAllocAsync(m: Machine, bytesize: int, hStream: Any) -> Any:
    stream = m.stream(hStream)
    assert stream.context.device.pool is not None
    return _alloc(m, stream.context.device.pool, bytesize, stream)


@entry(1)
def cuMemAllocFromPoolAsync(m: Machine, bytesize: int, pool: Any, hStream: Any) -> Any:
    return _alloc(m, _pool(m, pool), bytesize, m.stream(hStream))


def _alloc(m: Machine, pool: Pool, nbytes: int, stream: Stream) -> Any:
    """The address is given at once; its use before the stream gets here is not noticed."""
    stream.refuse_captured(R.CUDA_ERROR_NOT_SUPPORTED)  # memory nodes of graphs are not emulated
    check(nbytes > 0)
    try:
        allocation = m.memory.pool_alloc(pool, nbytes)
    except Failure:
        m.progress.drain()  # what was freed in stream order may make room
        allocation = m.memory.pool_alloc(pool, nbytes)
    return T.CUdeviceptr(allocation.base)


@entry()
def cuMemFreeAsync(m: Machine, dptr: Any, hStream: Any) -> None:
    """The memory goes when the stream gets here; accesses after that fault."""
    stream = m.stream(hStream)
    stream.refuse_captured(R.CUDA_ERROR_NOT_SUPPORTED)
    allocation = m.memory.at(number(dptr))
    if allocation is None or allocation.pool is None or allocation.freed:
        raise m.memory.stray("cuMemFreeAsync needs the address of a pool's allocation, once", number(dptr))
    m.enqueue(stream, Free(stream.context, allocation.pool, allocation.base, allocation.nbytes))
    allocation.freed = True
