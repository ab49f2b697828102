# SPDX-License-Identifier: Apache-2.0
"""Memory pools: allocation and freeing in stream order."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.failure import Failure
from ..machine.memory import READ_WRITE
from ..machine.objects import Device, Pool, Stream
from ..machine.process import Process
from ..machine.work import Free
from .entry import check, entry

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


def _pool(proc: Process, value: Any) -> Pool:
    pool = proc.get(value, Pool, R.CUDA_ERROR_INVALID_VALUE)
    check(not pool.destroyed)
    return pool


def located_device(proc: Process, location: Any) -> Device:
    """The device of a CUmemLocation; host locations are not supported."""
    check(location is not None)
    kinds = T.CUmemLocationType
    check(location.type != kinds.CU_MEM_LOCATION_TYPE_INVALID)
    check(location.type == kinds.CU_MEM_LOCATION_TYPE_DEVICE, R.CUDA_ERROR_NOT_SUPPORTED)
    return proc.device(location.id)


def access_list(proc: Process, descriptors: Any, count: int) -> list[tuple[Device, int]]:
    """(device, CUmemAccess_flags) of CUmemAccessDesc entries."""
    found = [(located_device(proc, d.location), int(d.flags)) for d in descriptors[:count]]
    check(all(flags in (0, 1, 3) for _, flags in found))
    return found


@entry(1, unsafe=True)
def cuMemPoolCreate(proc: Process, poolProps: Any) -> Any:
    check(poolProps is not None)
    check(poolProps.allocType == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
    none = T.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    check(poolProps.handleTypes == none, R.CUDA_ERROR_NOT_SUPPORTED)
    pool = Pool(located_device(proc, poolProps.location), maximum=int(poolProps.maxSize))
    return T.CUmemoryPool(proc.add(pool).handle)


@entry(unsafe=True)
def cuMemPoolDestroy(proc: Process, pool: Any) -> None:
    """Memory that is still allocated stays until it is freed."""
    found = _pool(proc, pool)
    check(not found.is_default)
    found.destroyed = True
    tenancy = proc.tenancy(found.device)
    if tenancy.pool is found:
        tenancy.pool = tenancy.default_pool
    proc.remove(found)


@entry()
def cuMemPoolSetAccess(proc: Process, pool: Any, map: Any, count: int) -> None:
    found = _pool(proc, pool)
    access = access_list(proc, map, count)
    for device, flags in access:
        check(device is not found.device or flags == READ_WRITE)
        check(device is found.device or proc.machine.can_reach(device, found.device), R.CUDA_ERROR_INVALID_DEVICE)
    found.access.update((device.index, flags) for device, flags in access)
    proc.memory.refresh_pool(found)


@entry(1)
def cuMemPoolGetAccess(proc: Process, memPool: Any, location: Any) -> Any:
    found = _pool(proc, memPool)
    device = located_device(proc, location)
    return T.CUmemAccess_flags(READ_WRITE if device is found.device else found.access.get(device.index, 0))


@entry()
def cuMemPoolSetAttribute(proc: Process, pool: Any, attr: Any, value: Any) -> None:
    found = _pool(proc, pool)
    if attr in (_A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH):
        check(int(value) == 0)
        found.used_high = found.used
        return
    check(attr not in _COUNTERS)
    found.attributes[int(attr)] = int(value)


@entry(1)
def cuMemPoolGetAttribute(proc: Process, pool: Any, attr: Any) -> Any:
    found = _pool(proc, pool)
    if attr in _FLAGS:
        return found.attributes.get(int(attr), 1)
    if attr == _A.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return T.cuuint64_t(found.attributes.get(int(attr), 0))
    check(attr in _COUNTERS, R.CUDA_ERROR_NOT_SUPPORTED)
    high = attr in (_A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    return T.cuuint64_t(found.used_high if high else found.used)


@entry()
def cuMemPoolTrimTo(proc: Process, pool: Any, minBytesToKeep: int) -> None:
    """Freed memory goes back at once, so nothing is left to trim."""
    _pool(proc, pool)


@entry(1)
def cuMemAllocAsync(proc: Process, bytesize: int, hStream: Any) -> Any:
    stream = proc.stream(hStream)
    return _alloc(proc, proc.tenancy(stream.context.device).pool, bytesize, stream)


@entry(1)
def cuMemAllocFromPoolAsync(proc: Process, bytesize: int, pool: Any, hStream: Any) -> Any:
    return _alloc(proc, _pool(proc, pool), bytesize, proc.stream(hStream))


def _alloc(proc: Process, pool: Pool, nbytes: int, stream: Stream) -> Any:
    """The address is given at once; its use before the stream gets here is not noticed."""
    stream.refuse_captured(R.CUDA_ERROR_NOT_SUPPORTED)  # memory nodes of graphs are not emulated
    check(nbytes > 0)
    try:
        allocation = proc.memory.pool_alloc(pool, nbytes)
    except Failure:
        proc.machine.waits.drain(proc)  # what was freed in stream order may make room
        allocation = proc.memory.pool_alloc(pool, nbytes)
    return T.CUdeviceptr(allocation.base)


@entry()
def cuMemFreeAsync(proc: Process, dptr: Any, hStream: Any) -> None:
    """The memory goes when the stream gets here; accesses after that fault."""
    stream = proc.stream(hStream)
    stream.refuse_captured(R.CUDA_ERROR_NOT_SUPPORTED)
    allocation = proc.memory.at(dptr)
    if allocation is None or allocation.pool is None or allocation.freed:
        raise proc.memory.stray("cuMemFreeAsync needs the address of a pool's allocation, once", dptr)
    proc.enqueue(stream, Free(stream.context, allocation.pool, allocation.base, allocation.nbytes))
    allocation.freed = True
