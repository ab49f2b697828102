# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime API on the emulated driver."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest

from drvfuse import emu
from drvfuse.emu.bindings import T
from drvfuse.emu.cudart import FUNCTIONS, RT, EmulatedRuntime, is_function, pairs
from drvfuse.emu.driver import ENTRIES
from drvfuse.emu.driver.refused import REFUSED

E, K = RT.cudaError_t, RT.cudaMemcpyKind

FAULT = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry fault(.param .u64 at)
{
    .reg .u64 %a<2>;
    ld.param.u64 %a1, [at];
    st.global.u32 [%a1], 1;
    ret;
}
"""


def ok(result):
    assert result[0] == E.cudaSuccess, result
    return result[1] if len(result) == 2 else result[1:]


@pytest.fixture
def machine():
    with emu.Machine(devices=2) as made:
        yield made


@pytest.fixture
def cudart(machine):
    return EmulatedRuntime(machine.driver)


def test_every_function_of_the_bindings_is_covered_or_refused_by_name(cudart):
    newer = []
    for name in (name for name, value in vars(RT).items() if is_function(name, value)):
        if name in FUNCTIONS or getattr(cudart, name) is getattr(RT, name):
            continue
        function = pairs.paired(name)
        assert function.outputs == len(pairs.results(getattr(RT, name)))
        other = pairs.RENAMED.get(name, "cu" + name.removeprefix("cuda"))
        if other not in ENTRIES and REFUSED.get(other, pairs.reason(name)) == pairs.NEWER:
            newer.append(name)
    assert newer in ([], ["cudaStreamBeginRecaptureToGraph"])


def test_functions_have_the_signatures_of_the_bindings(cudart):
    for name in ("cudaStreamWaitEvent", "cudaMemcpy", "cudaMallocArray"):
        assert inspect.signature(getattr(cudart, name)) == inspect.signature(getattr(RT, name))
        with pytest.raises(TypeError):
            getattr(cudart, name)()


def test_functions_without_a_driver_are_those_of_the_bindings(cudart):
    assert cudart.cudaGetErrorName(E.cudaErrorInvalidValue) == (E.cudaSuccess, b"cudaErrorInvalidValue")
    assert cudart.cudaStream_t is RT.cudaStream_t and cudart.make_cudaExtent is RT.make_cudaExtent
    with pytest.raises(AttributeError):
        cudart.cudaNothing  # noqa: B018


# Devices and contexts ------------------------------------------------------------------------------------------------


def test_a_call_makes_the_primary_context_of_the_threads_device_current(cudart, machine):
    cuda = machine.driver
    assert ok(cudart.cudaGetDeviceCount()) == 2 and ok(cudart.cudaGetDevice()) == 0
    assert int(ok(cuda.cuCtxGetCurrent())) == 0  # no call has needed a context yet
    ok(cudart.cudaFree(0))
    assert ok(cuda.cuCtxGetCurrent()) == ok(cuda.cuDevicePrimaryCtxRetain(0))
    ok(cudart.cudaSetDevice(1))
    assert int(ok(cuda.cuCtxGetDevice())) == 1 and ok(cudart.cudaGetDevice()) == 1

    seen = []
    thread = threading.Thread(target=lambda: seen.append((ok(cudart.cudaGetDevice()), ok(cudart.cudaMalloc(8)))))
    thread.start()
    thread.join()
    assert seen[0][0] == 0
    assert ok(cudart.cudaPointerGetAttributes(seen[0][1])).device == 0


def test_a_context_that_the_driver_api_made_current_is_used(cudart, machine):
    cuda = machine.driver
    ok(cuda.cuInit(0))
    ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(1))))
    assert ok(cudart.cudaGetDevice()) == 1
    assert ok(cudart.cudaPointerGetAttributes(ok(cudart.cudaMalloc(8)))).device == 1


def test_a_missing_device_stays_the_last_error_until_it_is_read(cudart):
    assert cudart.cudaSetDevice(2) == (E.cudaErrorInvalidDevice,)
    ok(cudart.cudaSetDevice(1))  # a successful call does not clear the last error
    assert cudart.cudaPeekAtLastError() == (E.cudaErrorInvalidDevice,)
    assert cudart.cudaGetLastError() == (E.cudaErrorInvalidDevice,)
    assert cudart.cudaGetLastError() == (E.cudaSuccess,)


def test_the_last_error_belongs_to_a_thread(cudart):
    cudart.cudaSetDevice(-1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(cudart.cudaGetLastError()))
    thread.start()
    thread.join()
    assert seen == [(E.cudaSuccess,)] and cudart.cudaGetLastError() == (E.cudaErrorInvalidDevice,)


def test_a_lost_context_stays_the_error_until_the_device_is_reset(cudart, machine):
    cuda = machine.driver
    ok(cudart.cudaSetDevice(0))
    kernel = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(FAULT)), b"fault"))
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((64,), (ctypes.c_void_p,)), 0))
    assert cudart.cudaDeviceSynchronize() == (E.cudaErrorIllegalAddress,)
    assert cudart.cudaMalloc(8) == (E.cudaErrorIllegalAddress, None)
    assert [cudart.cudaGetLastError() for _ in range(2)] == [(E.cudaErrorIllegalAddress,)] * 2
    ok(cudart.cudaDeviceReset())
    assert cudart.cudaGetLastError() == (E.cudaSuccess,)
    ok(cudart.cudaMalloc(8))


def test_properties_are_the_attributes_of_the_device(cudart):
    found = ok(cudart.cudaGetDeviceProperties(1))
    assert (found.major, found.minor, found.warpSize, found.multiProcessorCount) == (9, 0, 32, 132)
    assert found.maxThreadsDim == [1024, 1024, 64] and found.sharedMemPerBlock == 48 << 10
    assert found.totalGlobalMem == 16 << 30 and found.name.rstrip(b"\0") == b"drvfuse emulated sm_90a"
    assert bytes(found.uuid.bytes)[-1] == 1 and found.pciBusID == 2
    attribute = RT.cudaDeviceAttr.cudaDevAttrMaxThreadsPerBlock
    assert ok(cudart.cudaDeviceGetAttribute(attribute, 0)) == found.maxThreadsPerBlock == 1024
    assert cudart.cudaGetDeviceProperties(9) == (E.cudaErrorInvalidDevice, None)


def test_peers_are_enabled_between_primary_contexts(cudart, rng):
    x, y = rng.integers(0, 255, 64, np.uint8), np.zeros(64, np.uint8)
    ok(cudart.cudaSetDevice(1))
    there = ok(cudart.cudaMalloc(64))
    ok(cudart.cudaMemcpy(there, x, 64, K.cudaMemcpyHostToDevice))
    ok(cudart.cudaSetDevice(0))
    assert ok(cudart.cudaDeviceCanAccessPeer(0, 1)) == 1
    ok(cudart.cudaDeviceEnablePeerAccess(1, 0))
    assert cudart.cudaDeviceEnablePeerAccess(1, 0) == (E.cudaErrorPeerAccessAlreadyEnabled,)
    here = ok(cudart.cudaMalloc(64))
    ok(cudart.cudaMemcpyPeer(here, 0, there, 1, 64))
    ok(cudart.cudaMemcpy(y, here, 64, K.cudaMemcpyDeviceToHost))
    assert (x == y).all()
    ok(cudart.cudaDeviceDisablePeerAccess(1))
    assert cudart.cudaDeviceDisablePeerAccess(1) == (E.cudaErrorPeerAccessNotEnabled,)


# Memory and copies ---------------------------------------------------------------------------------------------------


def test_allocating_zero_bytes_and_freeing_null_succeed(cudart):
    assert cudart.cudaMalloc(0) == (E.cudaSuccess, 0) and cudart.cudaMallocHost(0) == (E.cudaSuccess, 0)
    assert cudart.cudaMallocPitch(0, 4) == (E.cudaSuccess, 0, 0)
    assert cudart.cudaFree(0) == cudart.cudaFree(None) == cudart.cudaFreeHost(0) == (E.cudaSuccess,)


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_copies_of_every_kind_move_the_bytes(cudart, rng, default, asynchronous):
    x, y = rng.integers(0, 255, 300, np.uint8), np.zeros(300, np.uint8)
    a, b, pinned = ok(cudart.cudaMalloc(300)), ok(cudart.cudaMalloc(300)), ok(cudart.cudaMallocHost(300))
    stream = ok(cudart.cudaStreamCreate())
    for target, source, kind in (
        (a, x, K.cudaMemcpyHostToDevice),
        (b, a, K.cudaMemcpyDeviceToDevice),
        (pinned, b, K.cudaMemcpyDeviceToHost),
        (y, pinned, K.cudaMemcpyHostToHost),
    ):
        kind = K.cudaMemcpyDefault if default else kind
        if asynchronous:
            ok(cudart.cudaMemcpyAsync(target, source, 300, kind, stream))
        else:
            ok(cudart.cudaMemcpy(target, source, 300, kind))
    ok(cudart.cudaStreamSynchronize(stream))
    assert (x == y).all()
    assert cudart.cudaMemcpy(y, a, 300, 77) == (E.cudaErrorInvalidMemcpyDirection,)


def test_two_dimensional_copies_and_fills_honour_the_pitches(cudart, rng):
    x, y = rng.integers(0, 255, (5, 40), np.uint8), np.zeros((5, 48), np.uint8)
    at, pitch = ok(cudart.cudaMallocPitch(40, 5))
    ok(cudart.cudaMemcpy2D(at, pitch, x, 40, 40, 5, K.cudaMemcpyHostToDevice))
    ok(cudart.cudaMemset2D(at + 2 * pitch + 7, pitch, 0x1AB, 3, 2))  # the fill uses only the low byte of the value
    ok(cudart.cudaMemcpy2D(y, 48, at, pitch, 40, 5, K.cudaMemcpyDeviceToHost))
    x[2:4, 7:10] = 0xAB
    assert (y[:, :40] == x).all() and not y[:, 40:].any()
    assert cudart.cudaMemcpy2D(y, 39, at, pitch, 40, 5, K.cudaMemcpyDeviceToHost) == (E.cudaErrorInvalidPitchValue,)


def test_three_dimensional_copies_and_fills_move_the_right_bytes(cudart, rng):
    x, y = rng.integers(0, 255, (3, 4, 16), np.uint8), np.zeros((3, 4, 16), np.uint8)
    volume = ok(cudart.cudaMalloc3D(RT.make_cudaExtent(16, 4, 3)))
    copy = RT.cudaMemcpy3DParms()
    copy.srcPtr, copy.dstPtr = RT.make_cudaPitchedPtr(x.ctypes.data, 16, 16, 4), volume
    copy.extent, copy.kind = RT.make_cudaExtent(16, 4, 3), K.cudaMemcpyHostToDevice
    ok(cudart.cudaMemcpy3D(copy))
    ok(cudart.cudaMemset3D(volume, 9, RT.make_cudaExtent(5, 2, 2)))
    copy.srcPtr, copy.dstPtr = volume, RT.make_cudaPitchedPtr(y.ctypes.data, 16, 16, 4)
    copy.kind = K.cudaMemcpyDeviceToHost
    ok(cudart.cudaMemcpy3D(copy))
    x[:2, :2, :5] = 9
    assert (x == y).all()


def test_pointer_attributes_distinguish_kinds_of_memory(cudart):
    kinds = RT.cudaMemoryType
    device, pinned, plain = ok(cudart.cudaMalloc(8)), ok(cudart.cudaHostAlloc(8, 0)), np.zeros(8, np.uint8)
    found = [ok(cudart.cudaPointerGetAttributes(pointer)) for pointer in (device, pinned, plain)]
    wanted = [kinds.cudaMemoryTypeDevice, kinds.cudaMemoryTypeHost, kinds.cudaMemoryTypeUnregistered]
    assert [one.type for one in found] == wanted
    assert int(found[0].devicePointer) == device and int(found[1].hostPointer) == pinned
    assert found[2].device == -2 and cudart.cudaGetLastError() == (E.cudaSuccess,)


# Functions that make one call of the driver --------------------------------------------------------------------------


def test_handles_are_of_the_runtimes_types_and_work_in_the_driver(cudart, machine):
    stream, event = ok(cudart.cudaStreamCreateWithFlags(1)), ok(cudart.cudaEventCreateWithFlags(0))
    assert type(stream) is RT.cudaStream_t and type(event) is RT.cudaEvent_t
    ok(machine.driver.cuEventRecord(event, stream))
    ok(cudart.cudaEventSynchronize(event))
    assert ok(cudart.cudaStreamIsCapturing(stream)) is RT.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone
    ok(cudart.cudaStreamBeginCapture(stream, RT.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    status, _, graph, *_ = ok(cudart.cudaStreamGetCaptureInfo(stream))
    assert status is RT.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive and type(graph) is RT.cudaGraph_t
    assert type(ok(cudart.cudaStreamEndCapture(stream))) is RT.cudaGraph_t


def test_enums_and_structures_pass_in_both_directions(cudart):
    properties = RT.cudaMemPoolProps()
    properties.allocType = RT.cudaMemAllocationType.cudaMemAllocationTypePinned
    properties.location.type, properties.location.id = RT.cudaMemLocationType.cudaMemLocationTypeDevice, 0
    pool = ok(cudart.cudaMemPoolCreate(properties))
    threshold = RT.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    ok(cudart.cudaMemPoolSetAttribute(pool, threshold, T.cuuint64_t(1 << 20)))
    assert int(ok(cudart.cudaMemPoolGetAttribute(pool, threshold))) == 1 << 20
    access = RT.cudaMemAccessDesc()
    access.location.type, access.location.id = RT.cudaMemLocationType.cudaMemLocationTypeDevice, 1
    access.flags = RT.cudaMemAccessFlags.cudaMemAccessFlagsProtReadWrite
    ok(cudart.cudaMemPoolSetAccess(pool, [access], 1))
    assert ok(cudart.cudaMemPoolGetAccess(pool, access.location)) is RT.cudaMemAccessFlags(3)
    stream = ok(cudart.cudaStreamCreate())
    ok(cudart.cudaFreeAsync(ok(cudart.cudaMallocFromPoolAsync(64, pool, stream)), stream))
    ok(cudart.cudaStreamSynchronize(stream))
    assert cudart.cudaDeviceGetAttribute(99999, 0) == (E.cudaErrorInvalidValue, None)
    with pytest.raises(TypeError, match=r"'poolProps' .*expected cuda.bindings.runtime.cudaMemPoolProps, got int"):
        cudart.cudaMemPoolCreate(3)
    with pytest.raises(TypeError, match=r"'extent' has incorrect type"):
        cudart.cudaMalloc3D(3)


def test_a_refused_function_fails_by_name_and_is_reported_once(cudart, machine):
    extent = RT.make_cudaExtent(1, 1, 1)
    for _ in range(2):
        assert cudart.cudaMalloc3DArray(None, extent, 0) == (E.cudaErrorNotSupported, None)
        assert cudart.cudaImportExternalMemory(None) == (E.cudaErrorNotSupported, None)  # the driver refuses this call
    words = [report.message for report in machine.reports]
    assert words[0] == "cudaMalloc3DArray is refused: arrays, textures and surfaces are not emulated"
    assert len(words) == 2 and words[1].startswith("cuImportExternalMemory is refused")


FUZZ = """
import inspect, random
import numpy as np
from drvfuse import emu
from drvfuse.emu.cudart import RT, EmulatedRuntime, is_function
cudart, rng = EmulatedRuntime(emu.Machine(devices=2).driver), random.Random(5)
memory, stream = cudart.cudaMalloc(4096)[1], cudart.cudaStreamCreate()[1]
freed = cudart.cudaStreamCreate()[1]
cudart.cudaStreamDestroy(freed)
values = [None, 0, 1, -1, 3, 64, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1, 1 << 70, 1.5, float("nan"), "x", b"x", []]
values += [memory, stream, freed, np.zeros(64, np.uint8), np.int64(3), object(), [None], RT.cudaExtent()]
values += [RT.cudaMemcpy3DParms(), RT.cudaGraphNodeParams(), RT.cudaKernelNodeParams(), RT.cudaMemcpyKind(4)]
raised = (TypeError, ValueError, OverflowError, MemoryError, RuntimeError, AttributeError)
functions = [name for name, value in vars(RT).items() if is_function(name, value)]
for name in 3 * functions:
    count = len(inspect.signature(getattr(RT, name)).parameters)
    try:
        result = getattr(cudart, name)(*rng.choices(values, k=count))
        assert type(result) is tuple and type(result[0]) is RT.cudaError_t, (name, result)
    except raised as error:
        assert not isinstance(error, AttributeError) or "getPtr" in str(error), (name, error)  # as the bindings
print(len(functions))
"""


def test_no_argument_of_any_call_crashes_the_interpreter():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FUZZ], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 300, done.stderr[-2000:]
