# SPDX-License-Identifier: Apache-2.0
"""Memory, events and pools that another process opens, and what happens when their owner frees them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine

INTERPROCESS, LAZY = 4 | 2, 1
DESCRIPTOR = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Two(NamedTuple):
    machine: Machine
    a: Any
    b: Any


def _two(**options: Any) -> Two:
    machine = Machine(devices=2, **options)
    a, b = machine.process("a").driver, machine.process("b").driver
    for cuda in (a, b):
        ok(cuda.cuInit(0))
        primary(cuda)
    return Two(machine, a, b)


@pytest.fixture
def two() -> Iterator[Two]:
    made = _two()
    yield made
    made.machine.close()


def _fill(cuda: Any, pointer: Any, data: np.ndarray) -> None:
    ok(cuda.cuMemcpyHtoD(pointer, data, data.nbytes))


def _read(cuda: Any, pointer: Any, count: int) -> np.ndarray:
    out = np.zeros(count, np.uint8)
    ok(cuda.cuMemcpyDtoH(out, pointer, count))
    return out


def _bytes(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 256, count).astype(np.uint8)


def test_memory_is_opened_by_its_handle_and_closed_once_per_open(two: Two, rng: np.random.Generator) -> None:
    data, pointer = _bytes(rng, 1000), ok(two.a.cuMemAlloc(1000))
    _fill(two.a, pointer, data)
    handle = ok(two.a.cuIpcGetMemHandle(int(pointer) + 10))
    assert code(two.b.cuMemcpyDtoH(np.zeros(4, np.uint8), pointer, 4)) == R.CUDA_ERROR_INVALID_VALUE
    for _ in range(2):
        assert int(ok(two.b.cuIpcOpenMemHandle(handle, LAZY))) == int(pointer)
    assert (_read(two.b, pointer, 1000) == data).all()
    ok(two.b.cuMemsetD8(int(pointer) + 5, 0, 7))
    ok(two.b.cuCtxSynchronize())
    assert not _read(two.a, pointer, 1000)[5:12].any()
    assert ok(two.b.cuMemGetAddressRange(pointer))[1] == 1000
    assert two.machine.held()["allocations"] == 1
    assert code(two.b.cuMemFree(pointer)) == R.CUDA_ERROR_INVALID_VALUE
    ok(two.b.cuIpcCloseMemHandle(pointer))
    ok(two.b.cuMemsetD8(pointer, 0, 4))
    ok(two.b.cuIpcCloseMemHandle(pointer))
    for call in (two.b.cuIpcCloseMemHandle(pointer), two.b.cuMemsetD8(pointer, 0, 4)):
        assert code(call) == R.CUDA_ERROR_INVALID_VALUE
    ok(two.a.cuMemFree(pointer))


def test_handles_of_ipc_memory_are_refused_where_they_are_not_allowed(two: Two) -> None:
    pointer = ok(two.a.cuMemAlloc(64))
    handle = ok(two.a.cuIpcGetMemHandle(pointer))
    assert code(two.a.cuIpcOpenMemHandle(handle, LAZY)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert "only other processes can" in two.machine.reports[-1].message
    assert code(two.b.cuIpcOpenMemHandle(handle, 2)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(two.b.cuIpcOpenMemHandle(types.CUipcMemHandle(), LAZY)) == R.CUDA_ERROR_INVALID_HANDLE
    for other in (
        ok(two.a.cuMemAllocHost(64)),
        ok(two.a.cuMemAllocManaged(64, 1)),
        ok(two.a.cuMemAllocAsync(64, 0)),
        5,
    ):
        assert code(two.a.cuIpcGetMemHandle(other)) == R.CUDA_ERROR_INVALID_VALUE
    ok(two.a.cuMemFree(pointer))
    assert code(two.b.cuIpcOpenMemHandle(handle, LAZY)) == R.CUDA_ERROR_INVALID_HANDLE


def test_opened_memory_of_another_device_needs_peer_access() -> None:
    for peers, expected in ((True, R.CUDA_SUCCESS), (False, R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)):
        machine, a, b = _two(peers=peers)
        handle = ok(a.cuIpcGetMemHandle(ok(a.cuMemAlloc(64))))
        primary(b, 1)
        result = b.cuIpcOpenMemHandle(handle, LAZY)
        assert result[0] == expected
        if expected == R.CUDA_SUCCESS:
            ok(b.cuMemsetD8(result[1], 0, 64))
        machine.close()


@pytest.mark.parametrize("end", ["free", "close"])
def test_memory_freed_by_its_owner_is_inaccessible_to_all(two: Two, end: str) -> None:
    pointer = ok(two.a.cuMemAlloc(64))
    ok(two.b.cuIpcOpenMemHandle(ok(two.a.cuIpcGetMemHandle(pointer)), LAZY))
    stream, word = ok(two.b.cuStreamCreate(1)), ok(two.b.cuMemAlloc(4))
    ok(two.b.cuMemsetD32(word, 0, 1))
    ok(two.b.cuStreamWaitValue32(stream, word, 1, 1))
    ok(two.b.cuMemsetD8Async(pointer, 0, 64, stream))
    if end == "free":
        ok(two.a.cuMemFree(pointer))
    else:
        two.a.process.close()
    ok(two.b.cuStreamWriteValue32(0, word, 1, 0))
    assert code(two.b.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert two.machine.reports[-1].kind == "use_after_free"


def test_an_opened_event_shares_the_records_of_its_owner() -> None:
    machine, a, b = _two(race=True)
    data, word = ok(a.cuMemAlloc(64)), ok(a.cuMemAlloc(4))
    ok(a.cuMemsetD32(word, 0, 1))
    ok(b.cuIpcOpenMemHandle(ok(a.cuIpcGetMemHandle(data)), LAZY))
    event = ok(a.cuEventCreate(INTERPROCESS))
    opened = ok(b.cuIpcOpenEventHandle(ok(a.cuIpcGetEventHandle(event))))
    stream, other = ok(a.cuStreamCreate(1)), ok(b.cuStreamCreate(1))
    ok(a.cuStreamWaitValue32(stream, word, 1, 1))
    ok(a.cuMemsetD8Async(data, 3, 64, stream))
    ok(a.cuEventRecord(event, stream))
    assert code(b.cuEventQuery(opened)) == R.CUDA_ERROR_NOT_READY
    ok(b.cuStreamWaitEvent(other, opened, 0))
    ok(b.cuMemsetD8Async(data, 4, 32, other))
    assert code(b.cuStreamQuery(other)) == R.CUDA_ERROR_NOT_READY
    ok(a.cuStreamWriteValue32(0, word, 1, 0))
    ok(b.cuEventSynchronize(opened))
    ok(b.cuStreamSynchronize(other))
    assert set(_read(b, data, 32)) == {4} and set(_read(a, int(data) + 32, 32)) == {3}
    assert not machine.reports
    ok(b.cuEventRecord(opened, other))
    ok(a.cuEventSynchronize(event))
    assert code(a.cuEventElapsedTime(event, event)) == R.CUDA_ERROR_INVALID_HANDLE
    machine.close()


def test_a_stream_waits_for_what_another_process_writes(two: Two) -> None:
    """While one process waits, the other may still make a call, so there is no deadlock."""
    word, result = ok(two.a.cuMemAlloc(4)), []
    ok(two.a.cuMemsetD32(word, 0, 1))
    ok(two.a.cuCtxSynchronize())
    ok(two.b.cuIpcOpenMemHandle(ok(two.a.cuIpcGetMemHandle(word)), LAZY))
    stream = ok(two.a.cuStreamCreate(1))
    ok(two.a.cuStreamWaitValue32(stream, word, 7, 1))
    waiting = threading.Thread(target=lambda: result.append(code(two.a.cuStreamSynchronize(stream))))
    waiting.start()
    waiting.join(0.05)
    assert not result
    ok(two.b.cuStreamWriteValue32(0, word, 7, 0))
    ok(two.b.cuCtxSynchronize())
    waiting.join(10)
    assert result == [R.CUDA_SUCCESS]


def test_events_without_the_interprocess_flag_have_no_handle(two: Two) -> None:
    assert code(two.a.cuEventCreate(4)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(two.a.cuIpcGetEventHandle(ok(two.a.cuEventCreate(2)))) == R.CUDA_ERROR_INVALID_VALUE
    event = ok(two.a.cuEventCreate(INTERPROCESS))
    handle = ok(two.a.cuIpcGetEventHandle(event))
    assert code(two.a.cuIpcOpenEventHandle(handle)) == R.CUDA_ERROR_INVALID_CONTEXT
    ok(two.b.cuIpcOpenEventHandle(handle))
    wrong = types.CUipcEventHandle()
    assert code(two.b.cuIpcOpenEventHandle(wrong)) == R.CUDA_ERROR_INVALID_HANDLE


# Pools --------------------------------------------------------------------------------------------------------------


def _pool(cuda: Any, kind: Any = DESCRIPTOR, device: int = 0) -> Any:
    props = types.CUmemPoolProps()
    props.allocType = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = kind
    props.location.type, props.location.id = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
    return ok(cuda.cuMemPoolCreate(props))


def test_memory_of_a_pool_is_imported_by_the_pool(two: Two, rng: np.random.Generator) -> None:
    data, pool = _bytes(rng, 500), _pool(two.a)
    pointer = ok(two.a.cuMemAllocFromPoolAsync(500, pool, 0))
    _fill(two.a, pointer, data)
    descriptor = ok(two.a.cuMemPoolExportToShareableHandle(pool, DESCRIPTOR, 0))
    imported = ok(two.b.cuMemPoolImportFromShareableHandle(descriptor, DESCRIPTOR, 0))
    os.close(descriptor)
    there = ok(two.b.cuMemPoolImportPointer(imported, ok(two.a.cuMemPoolExportPointer(pointer))))
    assert (_read(two.b, there, 500) == data).all()
    ok(two.b.cuMemsetD8Async(there, 9, 100, 0))
    ok(two.b.cuMemFreeAsync(there, 0))
    assert code(two.b.cuMemFreeAsync(there, 0)) == R.CUDA_ERROR_INVALID_VALUE
    ok(two.b.cuCtxSynchronize())
    assert code(two.b.cuMemsetD8(there, 0, 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert (_read(two.a, pointer, 500)[:100] == 9).all()
    ok(two.b.cuMemPoolImportPointer(imported, ok(two.a.cuMemPoolExportPointer(pointer))))
    ok(two.b.cuMemFree(there))
    ok(two.a.cuMemFreeAsync(pointer, 0))
    ok(two.a.cuCtxSynchronize())
    assert two.machine.held()["allocations"] == 0
    assert len(two.machine.reports) == 2  # reports of the two refused calls


def test_the_owner_may_free_pool_memory_before_the_queued_free_of_an_importer_runs(two: Two) -> None:
    pool = _pool(two.a)
    pointer = ok(two.a.cuMemAllocFromPoolAsync(64, pool, 0))
    descriptor = ok(two.a.cuMemPoolExportToShareableHandle(pool, DESCRIPTOR, 0))
    imported = ok(two.b.cuMemPoolImportFromShareableHandle(descriptor, DESCRIPTOR, 0))
    os.close(descriptor)
    there = ok(two.b.cuMemPoolImportPointer(imported, ok(two.a.cuMemPoolExportPointer(pointer))))
    ok(two.b.cuMemFreeAsync(there, 0))
    ok(two.a.cuMemFree(pointer))
    ok(two.b.cuCtxSynchronize())
    assert not two.machine.reports


def test_calls_that_shared_pools_do_not_support_are_refused(two: Two) -> None:
    none, wrong = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE, R.CUDA_ERROR_INVALID_VALUE
    pool, private = _pool(two.a), _pool(two.a, none)
    assert code(two.a.cuMemPoolExportToShareableHandle(private, DESCRIPTOR, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    assert code(two.a.cuMemPoolExportPointer(ok(two.a.cuMemAllocFromPoolAsync(4, private, 0)))) == wrong
    assert code(two.a.cuMemPoolExportPointer(ok(two.a.cuMemAlloc(4)))) == wrong
    descriptor = ok(two.a.cuMemPoolExportToShareableHandle(pool, DESCRIPTOR, 0))
    imported = ok(two.b.cuMemPoolImportFromShareableHandle(descriptor, DESCRIPTOR, 0))
    assert code(two.b.cuMemAllocFromPoolAsync(64, imported, 0)) == wrong
    assert code(two.b.cuDeviceSetMemPool(0, imported)) == wrong
    assert code(two.b.cuMemPoolExportToShareableHandle(imported, DESCRIPTOR, 0)) == wrong
    assert code(two.b.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR)) == wrong
    shared = ok(two.a.cuMemPoolExportPointer(ok(two.a.cuMemAllocFromPoolAsync(64, pool, 0))))
    assert code(two.b.cuMemPoolImportPointer(_pool(two.b), shared)) == wrong
    assert code(two.b.cuMemPoolImportPointer(imported, types.CUmemPoolPtrExportData())) == wrong
    os.close(descriptor)
    assert code(two.b.cuMemPoolImportFromShareableHandle(descriptor, DESCRIPTOR, 0)) == wrong
    fabric = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    props = types.CUmemPoolProps()
    props.allocType, props.handleTypes = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, fabric
    props.location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert code(two.a.cuMemPoolCreate(props)) == R.CUDA_ERROR_NOT_PERMITTED


def test_dma_buf_descriptors_are_refused(two: Two) -> None:
    kind = types.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    pointer = ok(two.a.cuMemAlloc(4096))
    assert code(two.a.cuMemGetHandleForAddressRange(pointer, 4096, kind, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    assert code(two.a.cuMemGetHandleForAddressRange(pointer, 8192, kind, 0)) == R.CUDA_ERROR_INVALID_VALUE
