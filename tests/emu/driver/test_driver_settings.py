# SPDX-License-Identifier: Apache-2.0
"""Settings of contexts, kernels and devices; uses of a context; events of a whole context."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from driver_helpers import R, code, ok, primary

from drvfuse.emu.bindings import MAJOR, T

PTX = b"""
.version 9.1
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 p) { ret; }
"""


@pytest.fixture
def context(cuda: Any) -> Any:
    primary(cuda)
    return ok(cuda.cuCtxGetCurrent())


def test_settings_of_a_context_can_be_read_back(cuda: Any, context: Any) -> None:
    ok(cuda.cuCtxSetFlags(4))
    assert ok(cuda.cuCtxGetFlags()) == 4
    assert code(cuda.cuCtxSetFlags(0x100)) == R.CUDA_ERROR_INVALID_VALUE
    caches, banks = T.CUfunc_cache, T.CUsharedconfig
    assert ok(cuda.cuCtxGetCacheConfig()) is caches.CU_FUNC_CACHE_PREFER_NONE
    ok(cuda.cuCtxSetCacheConfig(caches.CU_FUNC_CACHE_PREFER_L1))
    assert ok(cuda.cuCtxGetCacheConfig()) is caches.CU_FUNC_CACHE_PREFER_L1
    ok(cuda.cuCtxSetSharedMemConfig(banks.CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE))
    assert ok(cuda.cuCtxGetSharedMemConfig()) is banks.CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE
    ok(cuda.cuCtxResetPersistingL2Cache())
    kind = T.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT
    attribute = T.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert ok(cuda.cuCtxGetExecAffinity(kind)).param.smCount.val == ok(cuda.cuDeviceGetAttribute(attribute, 0))
    unknown = T.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_MAX
    assert code(cuda.cuCtxGetExecAffinity(unknown)) == R.CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
    scope = T.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    ok(cuda.cuFlushGPUDirectRDMAWrites(T.CUflushGPUDirectRDMAWritesTarget(0), scope))


def test_a_context_lives_until_its_last_detach(cuda: Any, context: Any) -> None:
    made = ok(getattr(cuda, "cuCtxCreate_v4", cuda.cuCtxCreate)(None, 0, 0))
    assert int(ok(cuda.cuCtxAttach(0))) == int(made)
    assert code(cuda.cuCtxAttach(1)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuCtxDetach(made))
    ok(cuda.cuCtxSynchronize())
    ok(cuda.cuCtxDetach(made))
    assert code(cuda.cuCtxDetach(made)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert int(ok(cuda.cuCtxGetCurrent())) == int(context)


def test_settings_of_kernels_of_a_library_can_be_read_back(cuda: Any, context: Any) -> None:
    library = ok(cuda.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    kernel = ok(cuda.cuLibraryGetKernel(library, b"kernel"))
    function = ok(cuda.cuKernelGetFunction(kernel))
    assert int(ok(cuda.cuKernelGetLibrary(kernel))) == int(library)
    assert code(cuda.cuKernelGetLibrary(function)) == R.CUDA_ERROR_INVALID_HANDLE
    ok(cuda.cuKernelSetCacheConfig(kernel, T.CUfunc_cache.CU_FUNC_CACHE_PREFER_EQUAL, 0))
    assert code(cuda.cuKernelSetCacheConfig(kernel, T.CUfunc_cache(0), 9)) == R.CUDA_ERROR_INVALID_DEVICE
    ok(cuda.cuFuncSetSharedMemConfig(function, T.CUsharedconfig(0)))
    assert code(cuda.cuFuncSetSharedMemConfig(0, T.CUsharedconfig(0))) == R.CUDA_ERROR_INVALID_HANDLE
    plain, flagged = (
        ok(cuda.cuOccupancyMaxPotentialBlockSize(function, None, 0, 0)),
        ok(cuda.cuOccupancyMaxPotentialBlockSizeWithFlags(function, None, 0, 0, 1)),
    )
    assert plain == flagged
    refused = cuda.cuOccupancyMaxPotentialBlockSizeWithFlags(function, None, 0, 0, 2)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE


def test_a_device_reports_its_identifiers_and_properties(cuda: Any) -> None:
    found = ok(cuda.cuDeviceGetProperties(0))
    assert (found.maxThreadsPerBlock, found.maxThreadsDim, found.SIMDWidth) == (1024, [1024, 1024, 64], 32)
    assert found.regsPerBlock == 65536 and found.maxGridSize == [2**31 - 1, 65535, 65535]
    assert code(cuda.cuDeviceGetProperties(9)) == R.CUDA_ERROR_INVALID_DEVICE
    assert cuda.cuDeviceGetLuid(0) == (R.CUDA_ERROR_NOT_SUPPORTED, None, None)
    formats = T.CUarray_format.CU_AD_FORMAT_FLOAT
    assert ok(cuda.cuDeviceGetTexture1DLinearMaxWidth(formats, 1, 0)) == 0
    assert code(cuda.cuDeviceGetTexture1DLinearMaxWidth(formats, 3, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert ok(cuda.cuDeviceGetExecAffinitySupport(T.CUexecAffinityType(0), 0)) == 0


def test_a_notification_is_registered_for_one_device(cuda: Any) -> None:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: None)
    address = ctypes.cast(function, ctypes.c_void_p).value
    handle = ok(cuda.cuDeviceRegisterAsyncNotification(1, address, 0))
    assert type(handle) is T.CUasyncCallbackHandle
    assert code(cuda.cuDeviceRegisterAsyncNotification(1, 0, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuDeviceUnregisterAsyncNotification(0, handle)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuDeviceUnregisterAsyncNotification(1, handle))
    assert code(cuda.cuDeviceUnregisterAsyncNotification(1, handle)) == R.CUDA_ERROR_INVALID_VALUE


def test_an_event_of_a_context_covers_all_of_its_work(cuda: Any, context: Any) -> None:
    """The fill of stream `second` waits for the event, and so for the earlier fill of stream `first`."""
    pointer, event, order = ok(cuda.cuMemAlloc(64)), ok(cuda.cuEventCreate(2)), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(order.append)
    called = T.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)
    first, second = ok(cuda.cuStreamCreate(1)), ok(cuda.cuStreamCreate(1))
    for stream, number in ((first, 1), (second, 3)):
        if number == 3:
            ok(cuda.cuCtxRecordEvent(context, event))
            ok(cuda.cuCtxWaitEvent(context, event))
        ok(cuda.cuMemsetD8Async(pointer, number, 64, stream))
        ok(cuda.cuLaunchHostFunc(stream, called, number))
    late = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuLaunchHostFunc(late, called, 4))
    ok(cuda.cuCtxSynchronize())
    assert order[0] == 1 and sorted(order) == [1, 3, 4]
    ok(cuda.cuEventSynchronize(event))


def test_events_of_a_whole_context_are_refused_in_a_capture(cuda: Any, context: Any) -> None:
    event, stream = ok(cuda.cuEventCreate(2)), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamBeginCapture(stream, T.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    assert code(cuda.cuCtxRecordEvent(context, event)) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert code(cuda.cuStreamEndCapture(stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert code(cuda.cuCtxRecordEvent(7, event)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert code(cuda.cuCtxWaitEvent(context, 7)) == R.CUDA_ERROR_INVALID_HANDLE


def test_a_stream_reports_no_green_context(cuda: Any, context: Any) -> None:
    found, green = ok(cuda.cuStreamGetCtx_v2(ok(cuda.cuStreamCreate(0))))
    assert (int(found), int(green)) == (int(context), 0) and type(green) is T.CUgreenCtx


@pytest.mark.skipif(MAJOR == 12, reason="functions of CUDA 13")
def test_functions_of_cuda_13_work(cuda: Any, context: Any) -> None:
    assert int(ok(cuda.cuCtxGetDevice_v2(context))) == 0
    ok(cuda.cuCtxSynchronize_v2(context))
    operations = [
        T.CUatomicOperation.CU_ATOMIC_OPERATION_INTEGER_ADD,
        T.CUatomicOperation.CU_ATOMIC_OPERATION_FLOAT_MIN,
    ]
    assert ok(cuda.cuDeviceGetHostAtomicCapabilities(operations, 2, 0)) == [0, 0]
    integers, floats = ok(cuda.cuDeviceGetP2PAtomicCapabilities(operations, 2, 0, 1))
    assert integers and not floats
