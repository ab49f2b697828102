# SPDX-License-Identifier: Apache-2.0
"""Memory pools: allocation and freeing in stream order."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.memory.process_memory import READ_WRITE
from ..machine.objects import Device, Pool, Stream
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run.work import Allocate, Free, Leave
from .entry import check, entry, unsupported

_A = T.CUmemPool_attribute
_H = T.CUmemAllocationHandleType
DESCRIPTOR = _H.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
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


def pool_of(proc: Process, value: Any) -> Pool:
    pool = proc.get(value, Pool, R.CUDA_ERROR_INVALID_VALUE)
    check(not pool.destroyed)
    return pool


def located_device(proc: Process, location: Any) -> Device:
    """The device of a CUmemLocation. Host locations are not supported."""
    check(location is not None)
    kinds = T.CUmemLocationType
    check(location.type != kinds.CU_MEM_LOCATION_TYPE_INVALID)
    if location.type != kinds.CU_MEM_LOCATION_TYPE_DEVICE:
        raise unsupported(f"the location must be a device, not {location.type.name}")
    return proc.device(location.id)


def access_list(proc: Process, descriptors: Any, count: int) -> list[tuple[Device, int]]:
    """A pair (device, CUmemAccess_flags) for each CUmemAccessDesc."""
    found = [(located_device(proc, d.location), int(d.flags)) for d in descriptors[:count]]
    check(all(flags in (0, 1, 3) for _, flags in found))
    return found


def exportable(types: int) -> int:
    """Check the requested handle types of memory, a pool or a multicast object: file descriptors or none. Fabric
    handles are not permitted, as on a machine without an IMEX channel.
    """
    check(types != _H.CU_MEM_HANDLE_TYPE_FABRIC, R.CUDA_ERROR_NOT_PERMITTED)
    check(types in (_H.CU_MEM_HANDLE_TYPE_NONE, DESCRIPTOR), R.CUDA_ERROR_NOT_SUPPORTED)
    return types


@entry(1, unsafe=True)
def cuMemPoolCreate(proc: Process, poolProps: Any) -> Any:
    check(poolProps is not None)
    check(poolProps.allocType == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
    types = exportable(int(poolProps.handleTypes))
    pool = Pool(located_device(proc, poolProps.location), maximum=int(poolProps.maxSize), handle_types=types)
    return T.CUmemoryPool(proc.add(pool).handle)


@entry(unsafe=True)
def cuMemPoolDestroy(proc: Process, pool: Any) -> None:
    """Destroys a pool. Memory that is still allocated stays until it is freed."""
    found = pool_of(proc, pool)
    check(not found.is_default)
    found.destroyed = True
    tenancy = proc.tenancy(found.device)
    if tenancy.pool is found:
        tenancy.pool = tenancy.default_pool
    proc.remove(found)


@entry()
def cuMemPoolSetAccess(proc: Process, pool: Any, map: Any, count: int) -> None:
    found = pool_of(proc, pool)
    access = access_list(proc, map, count)
    for device, flags in access:
        check(device is not found.device or flags == READ_WRITE)
        check(device is found.device or proc.machine.can_reach(device, found.device), R.CUDA_ERROR_INVALID_DEVICE)
    found.access.update((device.index, flags) for device, flags in access)
    proc.memory.refresh_pool(found)


@entry(1)
def cuMemPoolGetAccess(proc: Process, memPool: Any, location: Any) -> Any:
    found = pool_of(proc, memPool)
    device = located_device(proc, location)
    return T.CUmemAccess_flags(READ_WRITE if device is found.device else found.access.get(device.index, 0))


@entry()
def cuMemPoolSetAttribute(proc: Process, pool: Any, attr: Any, value: Any) -> None:
    found = pool_of(proc, pool)
    if attr in (_A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH):
        check(int(value) == 0)
        found.used_high = found.used
        return
    check(attr not in _COUNTERS)
    found.attributes[int(attr)] = int(value)


@entry(1)
def cuMemPoolGetAttribute(proc: Process, pool: Any, attr: Any) -> Any:
    found = pool_of(proc, pool)
    if attr in _FLAGS:
        return found.attributes.get(int(attr), 1)
    if attr == _A.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return T.cuuint64_t(found.attributes.get(int(attr), 0))
    check(attr in _COUNTERS, R.CUDA_ERROR_NOT_SUPPORTED)
    high = attr in (_A.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, _A.CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    return T.cuuint64_t(found.used_high if high else found.used)


@entry()
def cuMemPoolTrimTo(proc: Process, pool: Any, minBytesToKeep: int) -> None:
    """Does nothing, as freed memory is given back at once."""
    pool_of(proc, pool)


@entry(1)
def cuMemAllocAsync(proc: Process, bytesize: int, hStream: Any) -> Any:
    stream = proc.stream(hStream)
    return _alloc(proc, proc.tenancy(stream.context.device).pool, bytesize, stream)


@entry(1)
def cuMemAllocFromPoolAsync(proc: Process, bytesize: int, pool: Any, hStream: Any) -> Any:
    return _alloc(proc, pool_of(proc, pool), bytesize, proc.stream(hStream))


def _alloc(proc: Process, pool: Pool, nbytes: int, stream: Stream) -> Any:
    """Allocate from a pool. The address is returned at once; an access before the stream reaches the allocation is not
    detected. In a capture, the memory belongs to the graph, with the present access rights of the pool.
    """
    check(not pool.imported)
    check(nbytes > 0)
    if stream.capture is not None:
        stream.capture.valid()
        memory = proc.graph_memory.create(stream.capture.graph, pool.device, nbytes, dict(pool.access))
        stream.capture.record(stream, Allocate(stream.context, memory))
        return T.CUdeviceptr(memory.allocation.base)
    try:
        allocation = proc.memory.pool_alloc(pool, nbytes)
    except Failure:
        proc.machine.waits.drain(proc)  # queued frees may make room
        allocation = proc.memory.pool_alloc(pool, nbytes)
    return T.CUdeviceptr(allocation.base)


@entry()
def cuMemFreeAsync(proc: Process, dptr: Any, hStream: Any) -> None:
    """Frees memory when the stream reaches this operation; later accesses fault. Imported memory is only closed. In a
    capture, only memory of graphs can be freed.
    """
    stream = proc.stream(hStream)
    allocation = proc.memory.at(dptr)
    if allocation is None or (allocation.pool is None and allocation.graph is None) or allocation.freed:
        raise proc.memory.stray("cuMemFreeAsync needs the address of a pool's allocation that was not freed yet", dptr)
    graph = allocation.graph
    if stream.capture is not None:
        if graph is None or not graph.freeable_in(stream.capture.graph):
            stream.refuse_captured(R.CUDA_ERROR_INVALID_VALUE)
        else:
            graph.freed_in.add(stream.capture.graph)
    else:
        check(graph is None or graph.freeable_by_call)
    foreign = allocation.origin is not None
    op = proc.enqueue(stream, (Leave if foreign else Free)(stream.context, allocation))
    if graph is None:
        allocation.freed = True
    elif op is not None:
        graph.live, graph.last = False, op


# Pools of a memory location (functions since CUDA 13) ---------------------------------------------------------------


def _device_of(proc: Process, location: Any, kind: Any) -> Device:
    """The device that a location names. All pools are pools of device memory."""
    check(kind == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, R.CUDA_ERROR_NOT_SUPPORTED)
    return located_device(proc, location)


@entry(1, bindings=13)
def cuMemGetDefaultMemPool(proc: Process, location: Any, typename: Any) -> Any:
    return T.CUmemoryPool(proc.tenancy(_device_of(proc, location, typename)).default_pool.handle)


@entry(1, bindings=13)
def cuMemGetMemPool(proc: Process, location: Any, typename: Any) -> Any:
    return T.CUmemoryPool(proc.tenancy(_device_of(proc, location, typename)).pool.handle)


@entry(bindings=13)
def cuMemSetMemPool(proc: Process, location: Any, typename: Any, pool: Any) -> None:
    device, found = _device_of(proc, location, typename), pool_of(proc, pool)
    check(found.device is device and not found.imported)
    proc.tenancy(device).pool = found
