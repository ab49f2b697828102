# SPDX-License-Identifier: Apache-2.0
"""Managed memory: host and devices at one address, advice, prefetches, `__managed__` variables, pointer attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary
from loopback import FORMS, initialised

from drvfuse.emu.bindings import MAJOR

A, G = types.CUmem_advise, types.CUmem_range_attribute
GLOBAL, HOST, SINGLE = 1, 2, 4
PAGE = 4096

PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .global .attribute(.managed) .align 4 .u32 counter = 5;
.visible .global .align 4 .u32 plain = 7;
.visible .entry bump(.param .u64 where) {
  .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p;
  ld.param.u64 %rd1, [where];
  cvta.to.global.u64 %rd1, %rd1;
  mov.u64 %rd2, counter;
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %p, %r1, 0;
  @%p bra done;
  ld.global.u32 %r2, [%rd1];
  add.u32 %r2, %r2, 1;
  st.global.u32 [%rd1], %r2;
  ld.global.u32 %r3, [%rd2];
  add.u32 %r3, %r3, 10;
  st.global.u32 [%rd2], %r3;
done:
  ret;
}
"""


@pytest.fixture(params=FORMS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    with initialised(request.param, devices=3) as made:
        yield made


def _words(address: Any, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(int(address)))


def _location(kind: str, number: int = 0) -> Any:
    location = types.CUmemLocation()
    location.type = getattr(types.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{kind}")
    location.id = number
    return location


def _advise(cuda: Any, address: Any, count: int, advice: Any, place: Any) -> tuple[Any, ...]:
    """Call cuMemAdvise with the location `place`: the number of a device, or -1 for the host."""
    if MAJOR == 12:
        return cuda.cuMemAdvise(address, count, advice, place)
    return cuda.cuMemAdvise(address, count, advice, _location("HOST") if place == -1 else _location("DEVICE", place))


def _prefetch(cuda: Any, address: Any, count: int, place: Any, stream: Any = 0) -> tuple[Any, ...]:
    if MAJOR == 12:
        return cuda.cuMemPrefetchAsync(address, count, place, stream)
    location = _location("HOST") if place == -1 else _location("DEVICE", place)
    return cuda.cuMemPrefetchAsync(address, count, location, 0, stream)


def _told(cuda: Any, address: Any, count: int, attribute: Any, size: int = 4) -> Any:
    return ok(cuda.cuMemRangeGetAttribute(size, attribute, address, count))


def test_the_host_and_all_devices_use_managed_memory_at_one_address(cuda: Any) -> None:
    pointer = ok(cuda.cuMemAllocManaged(PAGE, GLOBAL))
    words = _words(pointer, PAGE // 4)
    words[:] = np.arange(PAGE // 4)
    for device in range(3):
        primary(cuda, device)
        kernel = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(PTX)), b"bump"))
        parameters = ((int(pointer) + 8,), (ctypes.c_void_p,))
        ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, parameters, 0))
        ok(cuda.cuCtxSynchronize())
    assert list(words[:4]) == [0, 1, 5, 3]
    other = ok(cuda.cuMemAlloc(16))
    ok(cuda.cuMemcpyDtoD(other, pointer, 16))
    back = np.zeros(4, np.uint32)
    ok(cuda.cuMemcpyDtoH(back, other, 16))
    assert list(back) == [0, 1, 5, 3]
    ok(cuda.cuMemFree(pointer))
    assert code(cuda.cuMemFree(pointer)) == R.CUDA_ERROR_INVALID_VALUE


def test_managed_memory_has_its_pointer_attributes(cuda: Any) -> None:
    pointer = ok(cuda.cuMemAllocManaged(64, HOST))
    kind = types.CUpointer_attribute
    attributes = {
        kind.CU_POINTER_ATTRIBUTE_IS_MANAGED: True,
        kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 2,
        kind.CU_POINTER_ATTRIBUTE_HOST_POINTER: int(pointer),
        kind.CU_POINTER_ATTRIBUTE_DEVICE_POINTER: int(pointer),
        kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: 0,
        kind.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: False,
    }
    for attribute, value in attributes.items():
        assert int(ok(cuda.cuPointerGetAttribute(attribute, pointer))) == value, attribute
    plain = ok(cuda.cuMemAlloc(64))
    assert not ok(cuda.cuPointerGetAttribute(kind.CU_POINTER_ATTRIBUTE_IS_MANAGED, plain))
    for value in (True, False):
        ok(cuda.cuPointerSetAttribute(value, kind.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain))
        assert ok(cuda.cuPointerGetAttribute(kind.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain)) == value
    wrong = cuda.cuPointerSetAttribute(1, kind.CU_POINTER_ATTRIBUTE_BUFFER_ID, plain)
    assert code(wrong) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize(("size", "flags"), [(0, GLOBAL), (64, 0), (64, SINGLE), (64, 3)])
def test_managed_memory_of_zero_size_or_with_unknown_flags_is_refused(cuda: Any, size: int, flags: int) -> None:
    assert code(cuda.cuMemAllocManaged(size, flags)) == R.CUDA_ERROR_INVALID_VALUE


def test_advice_can_be_read_back_for_its_bytes(cuda: Any) -> None:
    pointer = ok(cuda.cuMemAllocManaged(4 * PAGE, GLOBAL))
    half = int(pointer) + 2 * PAGE
    assert _told(cuda, pointer, 64, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) == 0
    assert _told(cuda, pointer, 64, G.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION) == -2
    ok(_advise(cuda, pointer, 2 * PAGE, A.CU_MEM_ADVISE_SET_READ_MOSTLY, 0))
    assert _told(cuda, pointer, 2 * PAGE, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) == 1
    assert _told(cuda, pointer, 4 * PAGE, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) == 0
    assert _told(cuda, half, PAGE, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) == 0
    ok(_advise(cuda, pointer, 2 * PAGE, A.CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0))
    assert _told(cuda, pointer, 2 * PAGE, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) == 0
    ok(_advise(cuda, half, PAGE, A.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 2))
    ok(_advise(cuda, half + PAGE, PAGE, A.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, -1))
    assert _told(cuda, half, PAGE, G.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION) == 2
    assert _told(cuda, half + PAGE, PAGE, G.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION) == -1
    assert _told(cuda, half, 2 * PAGE, G.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION) == -2
    assert _told(cuda, half, PAGE, G.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE) == 1
    assert _told(cuda, half, PAGE, G.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID) == 2
    for place in (-1, 1, 0):
        ok(_advise(cuda, pointer, 4 * PAGE, A.CU_MEM_ADVISE_SET_ACCESSED_BY, place))
    ok(_advise(cuda, half, PAGE, A.CU_MEM_ADVISE_UNSET_ACCESSED_BY, 1))
    accessed = G.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY
    assert _told(cuda, pointer, PAGE, accessed, 16) == [0, 1, -1, -2]
    assert _told(cuda, pointer, 4 * PAGE, accessed, 12) == [0, -1, -2]
    assert _told(cuda, pointer, PAGE, accessed, 4) == [0]
    several = [G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, accessed, G.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION]
    assert ok(cuda.cuMemRangeGetAttributes([4, 8, 4], several, 3, half, PAGE)) == [0, [0, -1], -2]


def test_the_last_prefetch_can_be_read_back_and_is_ordered_in_its_stream(cuda: Any) -> None:
    pointer, stream = ok(cuda.cuMemAllocManaged(2 * PAGE, GLOBAL)), ok(cuda.cuStreamCreate(1))
    ok(_prefetch(cuda, pointer, PAGE, 1, stream))
    ok(_prefetch(cuda, int(pointer) + PAGE, PAGE, -1, stream))
    last = G.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
    assert _told(cuda, pointer, PAGE, last) == 1
    assert _told(cuda, int(pointer) + PAGE, PAGE, last) == -1
    assert _told(cuda, pointer, 2 * PAGE, last) == -2
    ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuStreamBeginCapture(stream, types.CUstreamCaptureMode(0)))
    refused = code(_prefetch(cuda, pointer, PAGE, 0, stream))
    assert refused == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


def test_only_managed_memory_takes_advice(cuda: Any) -> None:
    plain, managed = ok(cuda.cuMemAlloc(PAGE)), ok(cuda.cuMemAllocManaged(PAGE, GLOBAL))
    wrong = R.CUDA_ERROR_INVALID_VALUE
    for address, count in ((plain, PAGE), (0, 4), (managed, PAGE + 1), (managed, 0)):
        assert code(_advise(cuda, address, count, A.CU_MEM_ADVISE_SET_READ_MOSTLY, 0)) == wrong
        assert code(_prefetch(cuda, address, count, 0)) == wrong
        assert code(cuda.cuMemRangeGetAttribute(4, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, address, count)) == wrong
    device = R.CUDA_ERROR_INVALID_DEVICE
    assert code(_advise(cuda, managed, PAGE, A.CU_MEM_ADVISE_SET_ACCESSED_BY, 3)) == device
    assert code(_prefetch(cuda, managed, PAGE, 3)) == device
    for size in (0, 8):
        assert code(cuda.cuMemRangeGetAttribute(size, G.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, managed, 4)) == wrong
    assert code(cuda.cuMemRangeGetAttribute(6, G.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, managed, 4)) == wrong


def test_only_whole_allocations_can_be_attached_to_streams_of_the_context(cuda: Any) -> None:
    pointer, stream = ok(cuda.cuMemAllocManaged(PAGE, HOST)), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamAttachMemAsync(stream, pointer, 0, SINGLE))
    ok(cuda.cuStreamAttachMemAsync(stream, pointer, PAGE, GLOBAL))
    ok(cuda.cuStreamAttachMemAsync(0, pointer, 0, HOST))
    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuStreamAttachMemAsync(0, pointer, 0, SINGLE)) == wrong
    assert code(cuda.cuStreamAttachMemAsync(stream, pointer, 64, GLOBAL)) == wrong
    assert code(cuda.cuStreamAttachMemAsync(stream, pointer, 0, 3)) == wrong
    assert code(cuda.cuStreamAttachMemAsync(stream, ok(cuda.cuMemAlloc(4)), 0, GLOBAL)) == wrong


def test_managed_variables_are_seen_by_the_host(cuda: Any) -> None:
    library = ok(cuda.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    address, nbytes = ok(cuda.cuLibraryGetManaged(library, b"counter"))
    counter = _words(address, 1)
    assert nbytes == 4 and counter[0] == 5
    assert code(cuda.cuLibraryGetManaged(library, b"plain")) == R.CUDA_ERROR_NOT_FOUND
    assert code(cuda.cuLibraryGetManaged(library, b"none")) == R.CUDA_ERROR_NOT_FOUND
    assert int(ok(cuda.cuLibraryGetGlobal(library, b"counter"))[0]) == int(address)
    assert code(cuda.cuMemFree(address)) == R.CUDA_ERROR_INVALID_VALUE  # the memory belongs to the module
    word = ok(cuda.cuMemAllocManaged(4, GLOBAL))
    _words(word, 1)[0], counter[0] = 1, 100
    kernel = ok(cuda.cuLibraryGetKernel(library, b"bump"))
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, ((int(word),), (ctypes.c_void_p,)), 0))
    ok(cuda.cuCtxSynchronize())
    assert counter[0] == 110
    ok(cuda.cuLibraryUnload(library))


@pytest.mark.skipif(MAJOR < 13, reason="functions of CUDA 13")
def test_ranges_are_prefetched_and_discarded_by_one_call(cuda: Any) -> None:
    pointer, stream = ok(cuda.cuMemAllocManaged(3 * PAGE, GLOBAL)), ok(cuda.cuStreamCreate(1))
    words = _words(pointer, 3 * PAGE // 4)
    words[:] = 7
    ranges = [types.CUdeviceptr(int(pointer) + i * PAGE) for i in range(3)]
    places = [_location("DEVICE", 1), _location("HOST")]
    ok(cuda.cuMemPrefetchBatchAsync(ranges, [PAGE] * 3, 3, places, [0, 2], 2, 0, stream))
    last = G.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
    assert [_told(cuda, r, PAGE, last) for r in ranges] == [1, 1, -1]
    ok(cuda.cuMemDiscardBatchAsync(ranges[1:2], [PAGE], 1, 0, stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert {int(w) for w in words[PAGE // 4 : PAGE // 2]} == {0} and words[0] == words[-1] == 7
    ok(cuda.cuMemDiscardAndPrefetchBatchAsync(ranges[:1], [PAGE], 1, places[1:], [0], 1, 0, stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert words[0] == 0 and _told(cuda, ranges[0], PAGE, last) == -1
    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemPrefetchBatchAsync(ranges, [PAGE] * 3, 3, places, [0, 3], 2, 0, stream)) == wrong
    assert code(cuda.cuMemPrefetchBatchAsync(ranges, [PAGE] * 3, 3, places, [0, 2], 2, 0, 0)) == wrong
    assert code(cuda.cuMemDiscardBatchAsync(ranges[2:], [2 * PAGE], 1, 0, stream)) == wrong


@pytest.mark.skipif(MAJOR < 13, reason="functions of CUDA 13")
def test_memory_pools_are_set_and_read_by_location(cuda: Any) -> None:
    pinned, managed = types.CUmemAllocationType(1), types.CUmemAllocationType(2)
    place = _location("DEVICE", 1)
    default = ok(cuda.cuMemGetDefaultMemPool(place, pinned))
    assert int(default) == int(ok(cuda.cuDeviceGetDefaultMemPool(1)))
    assert code(cuda.cuMemSetMemPool(_location("DEVICE"), pinned, default)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuMemSetMemPool(place, pinned, default))
    assert int(ok(cuda.cuMemGetMemPool(place, pinned))) == int(default)
    assert code(cuda.cuMemGetMemPool(place, managed)) == R.CUDA_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("kind", ["managed", "pinned"])
def test_a_fill_of_host_memory_is_complete_when_it_returns(cuda: Any, kind: str) -> None:
    """The fill also waits for work that the legacy stream waits for."""
    primary(cuda)
    stream = ok(cuda.cuStreamCreate(0))
    memory = int(ok(cuda.cuMemAllocManaged(PAGE, GLOBAL) if kind == "managed" else cuda.cuMemHostAlloc(PAGE, 0)))
    words = np.ctypeslib.as_array((ctypes.c_uint32 * (PAGE // 4)).from_address(memory))
    ok(cuda.cuMemsetD32Async(memory, 3, PAGE // 4, stream))
    ok(cuda.cuMemsetD32(memory + 16, 9, 8))
    assert words[:14].tolist() == [3] * 4 + [9] * 8 + [3] * 2
    ok(cuda.cuMemsetD2D8(memory, 8, 1, 4, 2))
    assert words[:4].tolist() == [0x01010101, 3, 0x01010101, 3]
