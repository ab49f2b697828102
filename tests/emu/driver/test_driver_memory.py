# SPDX-License-Identifier: Apache-2.0
"""Memory of the emulated driver: allocation, copies, fills, pointers, pools, VMM, and which device may access which
memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine
from drvfuse.errors import ArgumentError

P = types.CUpointer_attribute
MIB = 1 << 20


def _bytes(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, count, np.uint8)


def _read(cuda: Any, pointer: Any, count: int) -> np.ndarray:
    out = np.zeros(count, np.uint8)
    ok(cuda.cuMemcpyDtoH(out, pointer, count))
    return out


# Plain memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 255, 4097, 3 * MIB + 5])
def test_copies_to_a_device_and_back_keep_the_bytes(cuda: Any, rng: np.random.Generator, count: int) -> None:
    primary(cuda)
    data = _bytes(rng, count)
    first, second = ok(cuda.cuMemAlloc(count)), ok(cuda.cuMemAlloc(count))
    ok(cuda.cuMemcpyHtoD(first, data, count))
    ok(cuda.cuMemcpyDtoD(second, first, count))
    assert np.array_equal(_read(cuda, second, count), data)


def test_host_arguments_are_addresses_or_buffers(cuda: Any, rng: np.random.Generator) -> None:
    primary(cuda)
    data = _bytes(rng, 64)
    pointer = ok(cuda.cuMemAlloc(64))
    for source in (data, data.tobytes(), bytearray(data), data.ctypes.data, (ctypes.c_uint8 * 64)(*data)):
        ok(cuda.cuMemsetD8(pointer, 0, 64))
        ok(cuda.cuMemcpyHtoD(pointer, source, 64))
        assert np.array_equal(_read(cuda, pointer, 64), data)
    with pytest.raises(TypeError):
        cuda.cuMemcpyHtoD(pointer, object(), 64)


def test_copies_of_host_addresses_that_are_not_mapped_are_refused(cuda: Any) -> None:
    """The addresses lie beyond the end of pinned memory, or beyond all addresses of a process."""
    primary(cuda)
    pinned, end = ok(cuda.cuMemAllocHost(64)), 1 << 56
    device = ok(cuda.cuMemAlloc(64))
    for host, nbytes in ((pinned, 1 << 40), (end, 4), (end - 2, 4)):
        for target, source in ((int(device), host), (host, int(device))):
            assert code(cuda.cuMemcpy(target, source, nbytes)) == R.CUDA_ERROR_INVALID_VALUE


def test_copies_outside_of_an_allocation_are_refused(cuda: Any) -> None:
    primary(cuda)
    pointer = ok(cuda.cuMemAlloc(100))
    host = np.zeros(200, np.uint8)
    assert code(cuda.cuMemcpyHtoD(pointer, host, 101)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemcpyDtoH(host, int(pointer) + 50, 51)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemsetD8(int(pointer) + 100, 0, 1)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuMemFree(pointer))
    assert code(cuda.cuMemcpyDtoH(host, pointer, 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemFree(pointer)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemAlloc(0)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuMemFree(0))


def test_device_memory_of_a_machine_is_positive() -> None:
    for wrong in (-1, 0, 1.5, None):
        with pytest.raises(ArgumentError, match="memory_bytes"):
            Machine(devices=1, memory_bytes=wrong)


def test_allocations_beyond_the_device_memory_fail() -> None:
    with Machine(devices=1, memory_bytes=MIB) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        assert ok(cuda.cuDeviceTotalMem(0)) == MIB
        pointer = ok(cuda.cuMemAlloc(MIB // 2))
        assert code(cuda.cuMemAlloc(MIB // 2 + 1)) == R.CUDA_ERROR_OUT_OF_MEMORY
        ok(cuda.cuMemFree(pointer))
        ok(cuda.cuMemAlloc(MIB))


@pytest.mark.parametrize(("size", "value"), [(1, 0xA5), (2, 0xBEEF), (4, 0xDEADBEEF)])
def test_fills_write_every_element(cuda: Any, size: int, value: int) -> None:
    primary(cuda)
    pointer = ok(cuda.cuMemAlloc(64 * size))
    stream = ok(cuda.cuStreamCreate(1))
    ok(getattr(cuda, f"cuMemsetD{8 * size}Async")(pointer, value, 64, stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert (_read(cuda, pointer, 64 * size).view(f"<u{size}") == value).all()
    if size > 1:
        wrong = getattr(cuda, f"cuMemsetD{8 * size}")(int(pointer) + 1, value, 1)
        assert code(wrong) == R.CUDA_ERROR_INVALID_VALUE


def test_an_asynchronous_copy_reads_pinned_memory_when_it_runs_and_pageable_memory_at_once(
    cuda: Any, rng: np.random.Generator
) -> None:
    primary(cuda)
    data = _bytes(rng, 256)
    stream = ok(cuda.cuStreamCreate(1))
    pinned = ok(cuda.cuMemHostAlloc(256, 0))
    view = np.frombuffer((ctypes.c_uint8 * 256).from_address(pinned), np.uint8)
    late, early = ok(cuda.cuMemAlloc(256)), ok(cuda.cuMemAlloc(256))
    pageable = np.zeros(256, np.uint8)
    view[:] = 0
    ok(cuda.cuMemcpyHtoDAsync(late, pinned, 256, stream))
    ok(cuda.cuMemcpyHtoDAsync(early, pageable, 256, stream))
    view[:] = data
    pageable[:] = data
    ok(cuda.cuStreamSynchronize(stream))
    assert np.array_equal(_read(cuda, late, 256), data)
    assert not _read(cuda, early, 256).any()


def test_peer_copies_need_no_peer_access(rng: np.random.Generator) -> None:
    with Machine(devices=2, peers=False) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        data = _bytes(rng, 1000)
        there = primary(cuda, 1)
        target = ok(cuda.cuMemAlloc(1000))
        here = primary(cuda, 0)
        source = ok(cuda.cuMemAlloc(1000))
        stream = ok(cuda.cuStreamCreate(1))
        ok(cuda.cuMemcpyHtoDAsync(source, data, 1000, stream))
        ok(cuda.cuMemcpyPeerAsync(target, there, source, here, 1000, stream))
        ok(cuda.cuStreamSynchronize(stream))
        assert np.array_equal(_read(cuda, target, 1000), data)


def test_pitched_memory_is_copied_by_rows(cuda: Any, rng: np.random.Generator) -> None:
    primary(cuda)
    data = _bytes(rng, 5 * 100).reshape(5, 100)
    pointer, pitch = ok(cuda.cuMemAllocPitch(100, 5, 4))
    assert pitch >= 100
    copy = types.CUDA_MEMCPY2D()
    copy.srcMemoryType = types.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = data.ctypes.data, 100
    copy.dstMemoryType = types.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = pointer, pitch
    copy.WidthInBytes, copy.Height = 100, 5
    ok(cuda.cuMemcpy2D(copy))
    for row in range(5):
        assert np.array_equal(_read(cuda, int(pointer) + row * pitch, 100), data[row])


def test_registered_memory_is_pinned_but_not_on_the_device(cuda: Any) -> None:
    primary(cuda)
    host = np.zeros(4096, np.uint8)
    ok(cuda.cuMemHostRegister(host, 4096, 0))
    assert code(cuda.cuMemHostRegister(host, 10, 0)) == R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    assert code(cuda.cuMemHostGetDevicePointer(host, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    pointer = ok(cuda.cuMemAlloc(4096))
    stream = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuMemsetD8Async(pointer, 7, 4096, stream))
    ok(cuda.cuMemcpyDtoHAsync(host, pointer, 4096, stream))
    assert not host.any()
    ok(cuda.cuStreamSynchronize(stream))
    assert (host == 7).all()
    ok(cuda.cuMemHostUnregister(host))
    assert code(cuda.cuMemHostUnregister(host)) == R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED


# Pointer attributes ---------------------------------------------------------------------------------------------------


def test_pointer_attributes_name_the_device_and_kind_of_memory(cuda: Any) -> None:
    context = primary(cuda, 3)
    pointer = ok(cuda.cuMemAlloc(1000))
    inside = int(pointer) + 300
    assert ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside)) == 3
    assert int(ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_CONTEXT, inside))) == int(context)
    assert ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside)) == 2
    assert int(ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside))) == int(pointer)
    base, size = ok(cuda.cuMemGetAddressRange(inside))
    assert (int(base), size) == (int(pointer), 1000)
    host = ok(cuda.cuMemHostAlloc(64, 0))
    assert ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host)) == 1
    assert int(ok(cuda.cuMemHostGetDevicePointer(host, 0))) == host
    ok(cuda.cuMemFreeHost(host))
    assert code(cuda.cuMemFreeHost(host)) == R.CUDA_ERROR_INVALID_VALUE


def test_one_attribute_of_an_unknown_pointer_is_refused_and_several_are_empty(cuda: Any) -> None:
    primary(cuda)
    local = np.zeros(16, np.uint8).ctypes.data
    wanted = [P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL]
    assert code(cuda.cuPointerGetAttribute(wanted[0], local)) == R.CUDA_ERROR_INVALID_VALUE
    assert ok(cuda.cuPointerGetAttributes(2, wanted, local)) == [0, -2]
    pointer = ok(cuda.cuMemAlloc(16))
    assert ok(cuda.cuPointerGetAttributes(2, wanted, pointer)) == [2, 0]


# Peer access ----------------------------------------------------------------------------------------------------------


def test_contexts_with_peer_access_can_access_plain_allocations(machine: Machine, cuda: Any) -> None:
    owner = primary(cuda, 1)
    before = int(ok(cuda.cuMemAlloc(64)))
    primary(cuda, 0)
    assert machine.window.access(before) == (0b10, 0b10)
    ok(cuda.cuCtxEnablePeerAccess(owner, 0))
    assert code(cuda.cuCtxEnablePeerAccess(owner, 0)) == R.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    primary(cuda, 1)
    after = int(ok(cuda.cuMemAlloc(64)))
    assert machine.window.access(before) == machine.window.access(after) == (0b11, 0b11)
    primary(cuda, 0)
    ok(cuda.cuCtxDisablePeerAccess(owner))
    assert machine.window.access(before) == (0b10, 0b10)
    assert code(cuda.cuCtxDisablePeerAccess(owner)) == R.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED


def test_peer_access_between_unconnected_devices_is_refused() -> None:
    with Machine(devices=2, peers=False) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        peer = primary(cuda, 1)
        primary(cuda, 0)
        assert code(cuda.cuCtxEnablePeerAccess(peer, 0)) == R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED


def _located(device: int) -> Any:
    location = types.CUmemLocation()
    location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _access(device: int, flags: Any) -> Any:
    access = types.CUmemAccessDesc()
    access.location = _located(device)
    access.flags = flags
    return access


READ = types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
READ_WRITE = types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NONE = types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


# Pools --------------------------------------------------------------------------------------------------------------


def _pool(cuda: Any, device: int) -> Any:
    props = types.CUmemPoolProps()
    props.allocType = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location = _located(device)
    return ok(cuda.cuMemPoolCreate(props))


def test_a_pool_frees_in_stream_order(machine: Machine, cuda: Any, rng: np.random.Generator) -> None:
    primary(cuda)
    pool, stream = _pool(cuda, 0), ok(cuda.cuStreamCreate(1))
    used = types.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    pointer = ok(cuda.cuMemAllocFromPoolAsync(5000, pool, stream))
    data, out = _bytes(rng, 5000), np.zeros(5000, np.uint8)
    ok(cuda.cuMemcpyHtoDAsync(pointer, data, 5000, stream))
    ok(cuda.cuMemHostRegister(out, 5000, 0))
    ok(cuda.cuMemcpyDtoHAsync(out, pointer, 5000, stream))
    ok(cuda.cuMemFreeAsync(pointer, stream))
    assert code(cuda.cuMemFreeAsync(pointer, stream)) == R.CUDA_ERROR_INVALID_VALUE
    assert int(ok(cuda.cuMemPoolGetAttribute(pool, used))) == 5000
    ok(cuda.cuStreamSynchronize(stream))
    assert np.array_equal(out, data)
    assert int(ok(cuda.cuMemPoolGetAttribute(pool, used))) == 0
    assert machine.window.index.find(int(pointer)) is None


def test_the_default_pool_serves_plain_asynchronous_allocation(cuda: Any) -> None:
    primary(cuda, 1)
    stream = ok(cuda.cuStreamCreate(1))
    pointer = ok(cuda.cuMemAllocAsync(64, stream))
    assert ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)) == 1
    pool = ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer))
    assert int(pool) == int(ok(cuda.cuDeviceGetDefaultMemPool(1)))
    ok(cuda.cuMemFree(pointer))
    assert code(cuda.cuMemPoolDestroy(pool)) == R.CUDA_ERROR_INVALID_VALUE


def test_access_to_a_pool_is_set_for_the_pool_alone(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    pool, stream = _pool(cuda, 0), ok(cuda.cuStreamCreate(1))
    before = int(ok(cuda.cuMemAllocFromPoolAsync(64, pool, stream)))
    ok(cuda.cuMemPoolSetAccess(pool, [_access(1, READ_WRITE), _access(2, READ)], 2))
    after = int(ok(cuda.cuMemAllocFromPoolAsync(64, pool, stream)))
    assert machine.window.access(before) == machine.window.access(after) == (0b111, 0b011)
    assert ok(cuda.cuMemPoolGetAccess(pool, _located(2))) == READ
    ok(cuda.cuMemPoolSetAccess(pool, [_access(1, NONE)], 1))
    assert machine.window.access(before) == (0b101, 0b001)


def test_a_pool_waits_for_queued_frees_before_it_is_full() -> None:
    with Machine(devices=1, memory_bytes=MIB) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        stream = ok(cuda.cuStreamCreate(1))
        first = ok(cuda.cuMemAllocAsync(MIB, stream))
        assert code(cuda.cuMemAllocAsync(1, stream)) == R.CUDA_ERROR_OUT_OF_MEMORY
        ok(cuda.cuMemFreeAsync(first, stream))
        ok(cuda.cuMemAllocAsync(MIB, stream))


# VMM ----------------------------------------------------------------------------------------------------------------


def _prop(device: int) -> Any:
    prop = types.CUmemAllocationProp()
    prop.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location = _located(device)
    return prop


def test_one_memory_has_many_addresses(machine: Machine, cuda: Any, rng: np.random.Generator) -> None:
    primary(cuda)
    granularity = ok(
        cuda.cuMemGetAllocationGranularity(
            _prop(0), types.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        )
    )
    handle = ok(cuda.cuMemCreate(granularity, _prop(2), 0))
    one, two = (ok(cuda.cuMemAddressReserve(granularity, 0, 0, 0)) for _ in range(2))
    for address in (one, two):
        ok(cuda.cuMemMap(address, granularity, 0, handle, 0))
    assert machine.window.access(int(one)) == (0, 0)
    ok(cuda.cuMemSetAccess(one, granularity, [_access(i, READ_WRITE) for i in (0, 2)], 2))
    ok(cuda.cuMemSetAccess(two, granularity, [_access(1, READ)], 1))
    assert machine.window.access(int(one)) == (0b101, 0b101)
    assert machine.window.access(int(two)) == (0b010, 0)
    assert ok(cuda.cuMemGetAccess(_located(1), two)) == int(READ)
    data = _bytes(rng, 1000)
    ok(cuda.cuMemcpyHtoD(one, data, 1000))
    primary(cuda, 1)
    assert np.array_equal(_read(cuda, two, 1000), data)
    assert ok(cuda.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, one)) == 2
    assert ok(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id == 2


def test_released_memory_stays_until_it_is_unmapped(cuda: Any) -> None:
    primary(cuda)
    size = 2 * MIB
    free, _ = ok(cuda.cuMemGetInfo())
    handle = ok(cuda.cuMemCreate(size, _prop(0), 0))
    address = ok(cuda.cuMemAddressReserve(size, 0, 0, 0))
    ok(cuda.cuMemMap(address, size, 0, handle, 0))
    ok(cuda.cuMemRelease(handle))
    assert code(cuda.cuMemRelease(handle)) == R.CUDA_ERROR_INVALID_VALUE
    assert ok(cuda.cuMemGetInfo())[0] == free - size
    again = ok(cuda.cuMemRetainAllocationHandle(int(address) + 5))
    assert int(again) == int(handle)
    ok(cuda.cuMemRelease(again))
    ok(cuda.cuMemUnmap(address, size))
    assert ok(cuda.cuMemGetInfo())[0] == free
    ok(cuda.cuMemAddressFree(address, size))
    assert code(cuda.cuMemAddressFree(address, size)) == R.CUDA_ERROR_INVALID_VALUE


def test_vmm_calls_with_wrong_sizes_and_addresses_are_refused(cuda: Any) -> None:
    primary(cuda)
    size = 2 * MIB
    assert code(cuda.cuMemCreate(size + 1, _prop(0), 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemCreate(size, _prop(9), 0)) == R.CUDA_ERROR_INVALID_DEVICE
    handle = ok(cuda.cuMemCreate(size, _prop(0), 0))
    address = ok(cuda.cuMemAddressReserve(2 * size, 0, 0, 0))
    assert code(cuda.cuMemMap(address, 2 * size, 0, handle, 0)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuMemMap(address, size, 0, handle, 0))
    assert code(cuda.cuMemMap(address, size, 0, handle, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemSetAccess(address, 2 * size, [_access(0, READ)], 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemAddressFree(address, 2 * size)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemUnmap(address, size // 2)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemFree(address)) == R.CUDA_ERROR_INVALID_VALUE


def _mapped(cuda: Any, address: int, flags: Any) -> None:
    """Map new memory of device 0 at an address. Without `flags` no device gets access to it."""
    size = ok(cuda.cuMemGetAllocationGranularity(_prop(0), types.CUmemAllocationGranularity_flags(0)))
    handle = ok(cuda.cuMemCreate(size, _prop(0), 0))
    ok(cuda.cuMemMap(address, size, 0, handle, 0))
    ok(cuda.cuMemRelease(handle))
    if flags is not None:
        ok(cuda.cuMemSetAccess(address, size, [_access(0, flags)], 1))


READ, READ_WRITE = (types.CUmemAccess_flags(n) for n in (1, 3))
QUEUED = {
    "a fill": lambda cuda, address, other, stream: cuda.cuMemsetD32Async(address, 7, 16, stream),
    "a copy to it": lambda cuda, address, other, stream: cuda.cuMemcpyDtoDAsync(address, other, 64, stream),
    "a copy from it": lambda cuda, address, other, stream: cuda.cuMemcpyDtoDAsync(other, address, 64, stream),
}


@pytest.mark.parametrize("queued", QUEUED)
@pytest.mark.parametrize("then", ["unmapped", "mapped anew"])
def test_queued_work_on_unmapped_memory_faults(machine: Machine, cuda: Any, queued: str, then: str) -> None:
    primary(cuda)
    size, stream = 2 * MIB, ok(cuda.cuStreamCreate(1))
    address, other = int(ok(cuda.cuMemAddressReserve(size, 0, 0, 0))), ok(cuda.cuMemAlloc(64))
    _mapped(cuda, address, READ_WRITE)
    ok(QUEUED[queued](cuda, address, other, stream))
    ok(cuda.cuMemUnmap(address, size))
    if then == "mapped anew":
        _mapped(cuda, address, READ_WRITE)
    assert machine.reports == []
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    (report,) = machine.reports
    assert (report.kind, report.device, report.address) == ("use_after_free", 0, address)
    assert f"0x{address:x}" in report.message and "64 bytes" in report.message


@pytest.mark.parametrize("queued", QUEUED)
def test_writes_to_read_only_memory_are_refused(machine: Machine, cuda: Any, queued: str) -> None:
    primary(cuda)
    stream = ok(cuda.cuStreamCreate(1))
    address, other = int(ok(cuda.cuMemAddressReserve(2 * MIB, 0, 0, 0))), ok(cuda.cuMemAlloc(64))
    _mapped(cuda, address, READ)
    ok(QUEUED[queued](cuda, address, other, stream))
    if queued == "a copy from it":
        ok(cuda.cuStreamSynchronize(stream))
        return
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "read_only"


# By kind of memory of device 1: whether three calls accept it while the context of device 0 is current, as measured on
# an H200. The calls are a copy, a fill, and cuMemcpyPeerAsync with the context of device 0 as the context of this
# memory.
FOREIGN = {
    "virtual, its own": (False, False, False),
    "virtual, of both": (True, True, True),
    "a pool's": (False, False, False),
    "cuMemAlloc's": (True, False, True),
}


@pytest.mark.parametrize("memory", FOREIGN)
def test_copies_and_fills_need_the_access_of_the_current_context(
    machine: Machine, cuda: Any, rng: np.random.Generator, memory: str
) -> None:
    here, there = primary(cuda, 0), primary(cuda, 1)
    stream_there = ok(cuda.cuStreamCreate(1))
    if memory == "a pool's":
        theirs = int(ok(cuda.cuMemAllocAsync(64, stream_there)))
    elif memory == "cuMemAlloc's":
        theirs = int(ok(cuda.cuMemAlloc(64)))
    else:
        theirs = int(ok(cuda.cuMemAddressReserve(2 * MIB, 0, 0, 0)))
        handle = ok(cuda.cuMemCreate(2 * MIB, _prop(1), 0))
        ok(cuda.cuMemMap(theirs, 2 * MIB, 0, handle, 0))
        users = [_access(i, READ_WRITE) for i in ((0, 1) if memory == "virtual, of both" else (1,))]
        ok(cuda.cuMemSetAccess(theirs, 2 * MIB, users, len(users)))
    data, out = _bytes(rng, 64), np.zeros(64, np.uint8)
    ok(cuda.cuMemcpyHtoDAsync(theirs, data, 64, stream_there))
    ok(cuda.cuCtxSetCurrent(here))
    ours, stream = int(ok(cuda.cuMemAlloc(64))), ok(cuda.cuStreamCreate(1))

    copied, filled, swapped = FOREIGN[memory]
    wanted = {True: R.CUDA_SUCCESS, False: R.CUDA_ERROR_INVALID_VALUE}
    for call in (
        lambda: cuda.cuMemcpyDtoDAsync(ours, theirs, 64, stream),
        lambda: cuda.cuMemcpyDtoD(theirs, ours, 64),
        lambda: cuda.cuMemcpyDtoH(out, theirs, 64),
        lambda: cuda.cuMemcpyHtoDAsync(theirs, data, 64, stream),
        lambda: cuda.cuMemcpyDtoDAsync(ours, theirs, 64, stream_there),  # the stream's device does not matter
    ):
        assert code(call()) == wanted[copied]
        assert copied or (machine.refusal.kind, machine.refusal.device) == ("no_access", 0)
    assert code(cuda.cuMemcpyPeerAsync(ours, here, theirs, there, 64, stream)) == R.CUDA_SUCCESS
    assert code(cuda.cuMemcpyPeerAsync(ours, here, theirs, here, 64, stream)) == wanted[swapped]
    ok(cuda.cuStreamSynchronize(stream_there))
    ok(cuda.cuStreamSynchronize(stream))
    assert np.array_equal(_read(cuda, ours, 64), data)
    assert code(cuda.cuMemsetD8Async(theirs, 1, 64, stream)) == wanted[filled]
    if memory == "cuMemAlloc's":
        ok(cuda.cuCtxEnablePeerAccess(there, 0))
        ok(cuda.cuMemsetD8(theirs, 1, 64))


def test_a_fill_ordered_after_the_free_of_its_memory_faults(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    stream = ok(cuda.cuStreamCreate(1))
    pointer = ok(cuda.cuMemAllocAsync(64, stream))
    ok(cuda.cuMemFreeAsync(pointer, stream))
    ok(cuda.cuMemsetD8Async(pointer, 1, 64, stream))
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "use_after_free"


def test_a_stray_pointer_on_an_empty_machine_is_reported_in_one_sentence(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    for pointer, said in ((0x12345678, "no device memory: nothing is"), (0x1234, "outside of device memory: a null")):
        assert code(cuda.cuMemFree(pointer)) == R.CUDA_ERROR_INVALID_VALUE
        assert f"0x{pointer:x} is {said}" in machine.reports[-1].message
