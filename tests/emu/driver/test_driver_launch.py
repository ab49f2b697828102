# SPDX-License-Identifier: Apache-2.0
"""Modules, launches, faults and deadlocks on the emulated driver, through cuda-python."""

from __future__ import annotations

import ctypes
import gc
import signal
import struct
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, function, ok, primary, ptx

from drvfuse import config
from drvfuse.emu import Machine

F = types.CUfunction_attribute
ID = types.CUlaunchAttributeID

AXPY = """
__device__ float offsets[4] = {1.0f, 2.0f, 3.0f};
__constant__ int chosen;
extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void pick(float* out) { out[0] = offsets[chosen]; offsets[chosen] += 1.0f; }
"""


def _launch(cuda: Any, f: Any, grid: int, block: int, args: tuple[Any, ...], stream: Any = 0, smem: int = 0) -> Any:
    kinds = tuple({int: ctypes.c_int, float: ctypes.c_float}.get(type(a)) for a in args)
    return cuda.cuLaunchKernel(f, grid, 1, 1, block, 1, 1, smem, stream, (args, kinds), 0)


def _device(cuda: Any, data: np.ndarray) -> Any:
    pointer = ok(cuda.cuMemAlloc(data.nbytes))
    ok(cuda.cuMemcpyHtoD(pointer, data, data.nbytes))
    return pointer


def _host(cuda: Any, pointer: Any, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    ok(cuda.cuMemcpyDtoH(out, pointer, out.nbytes))
    return out


def _zeros(cuda: Any, count: int) -> Any:
    return _device(cuda, np.zeros(count, np.uint32))


def _attribute(kind: str, **value: Any) -> Any:
    attribute = types.CUlaunchAttribute()
    attribute.id = getattr(ID, f"CU_LAUNCH_ATTRIBUTE_{kind}")
    for name, item in value.items():
        setattr(attribute.value, name, item)
    return attribute


def _config(grid: int, block: int, stream: Any, *attributes: Any) -> Any:
    config = types.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.hStream = stream
    config.attrs = list(attributes)
    config.numAttrs = len(attributes)
    return config


# Modules ------------------------------------------------------------------------------------------------------------


def test_the_default_machine_runs_a_kernel(rng: np.random.Generator) -> None:
    from drvfuse.emu import driver as cuda

    ok(cuda.cuInit(0))
    primary(cuda)
    x, y = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    dx, dy = _device(cuda, x), _device(cuda, y)
    ok(_launch(cuda, function(cuda, AXPY, "axpy"), 4, 256, (2.0, dx, dy, 1000)))
    assert np.array_equal(_host(cuda, dy, y), np.float32(2) * x + y)
    ok(cuda.cuDevicePrimaryCtxRelease(0))


def test_a_module_is_loaded_from_every_form_of_image(cuda: Any, tmp_path: Any) -> None:
    primary(cuda)
    image = ptx(AXPY)
    keep = ctypes.create_string_buffer(image)
    path = tmp_path / "axpy.ptx"
    path.write_bytes(image)
    for module in (
        cuda.cuModuleLoadData(image),
        cuda.cuModuleLoadData(ctypes.addressof(keep)),
        cuda.cuModuleLoadData(np.frombuffer(image, np.uint8)),
        cuda.cuModuleLoadDataEx(image, 0, [], []),
        cuda.cuModuleLoad(str(path).encode()),
    ):
        handle = ok(module)
        assert ok(cuda.cuFuncGetName(ok(cuda.cuModuleGetFunction(handle, b"pick")))) == b"pick"
        assert ok(cuda.cuModuleGetFunctionCount(handle)) == 2
        ok(cuda.cuModuleUnload(handle))
    assert code(cuda.cuModuleGetFunction(handle, b"pick")) == R.CUDA_ERROR_INVALID_HANDLE
    assert code(cuda.cuModuleLoad(str(tmp_path / "none").encode())) == R.CUDA_ERROR_FILE_NOT_FOUND


def test_a_module_that_cannot_run_is_refused_with_a_report(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    newer = ptx(AXPY).replace(b"sm_90a", b"sm_100a")
    assert code(cuda.cuModuleLoadData(newer)) == R.CUDA_ERROR_INVALID_PTX
    assert "sm_100a" in machine.reports[-1].message
    text = ptx(AXPY).decode()
    line = next(i for i, row in enumerate(text.split("\n"), 1) if "ld.param.f32" in row)
    broken = text.replace("ld.param.f32", "frobnicate.f32")
    assert code(cuda.cuModuleLoadData(broken.encode())) == R.CUDA_ERROR_INVALID_PTX
    assert machine.reports[-1].kind == "module"
    assert f"PTX line {line}" in machine.reports[-1].message and "frobnicate" in machine.reports[-1].message
    assert machine.reports[-1].line == AXPY[: AXPY.index("axpy(")].count("\n") + 1


def test_each_context_has_its_own_variables(cuda: Any) -> None:
    seen = []
    for device in (0, 1):
        primary(cuda, device)
        module = ok(cuda.cuModuleLoadData(ptx(AXPY)))
        pick = ok(cuda.cuModuleGetFunction(module, b"pick"))
        chosen, size = ok(cuda.cuModuleGetGlobal(module, b"chosen"))
        assert size == 4
        ok(cuda.cuMemsetD32(chosen, device + 1, 1))
        out = _zeros(cuda, 1)
        for _ in range(2):
            ok(_launch(cuda, pick, 1, 1, (out,)))
        seen.append(_host(cuda, out, np.zeros(1, np.float32))[0])
        assert code(cuda.cuModuleGetGlobal(module, b"missing")) == R.CUDA_ERROR_NOT_FOUND
    assert seen == [3.0, 4.0]


def test_a_library_serves_every_context(cuda: Any) -> None:
    primary(cuda, 0)
    library = ok(cuda.cuLibraryLoadData(ptx(AXPY), [], [], 0, [], [], 0))
    kernel = ok(cuda.cuLibraryGetKernel(library, b"pick"))
    assert ok(cuda.cuLibraryGetKernelCount(library)) == 2
    for device in (0, 1):
        primary(cuda, device)
        out = _zeros(cuda, 1)
        ok(_launch(cuda, kernel, 1, 1, (out,)))
        assert _host(cuda, out, np.zeros(1, np.float32))[0] == 1.0
    assert ok(cuda.cuFuncGetName(ok(cuda.cuKernelGetFunction(kernel)))) == b"pick"
    ok(cuda.cuLibraryUnload(library))
    assert code(cuda.cuKernelGetFunction(kernel)) == R.CUDA_ERROR_INVALID_HANDLE


# Parameters ---------------------------------------------------------------------------------------------------------

MIXED = """
struct Inner { char tag; double value; };
extern "C" __global__ void mixed(char a, Inner in, short b, const int* p, long long c, bool d, double* out) {
  out[0] = a; out[1] = in.tag; out[2] = in.value; out[3] = b; out[4] = *p; out[5] = (double)c; out[6] = d;
}
"""


class Inner(ctypes.Structure):
    _fields_ = [("tag", ctypes.c_char), ("value", ctypes.c_double)]


def test_kernel_parameters_are_accepted_in_every_form(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, MIXED, "mixed")
    p, out = _device(cuda, np.array([77], np.int32)), _device(cuda, np.zeros(7))
    inner = Inner(b"\x05", 2.5)
    expected = np.array([-3, 5, 2.5, -300, 77, 2**40, 1])
    kinds = (ctypes.c_byte, None, ctypes.c_short, None, ctypes.c_longlong, ctypes.c_bool, ctypes.c_void_p)
    values = (-3, inner, -300, p, 2**40, True, int(out))

    cells = [
        ctypes.c_byte(-3),
        inner,
        ctypes.c_short(-300),
        ctypes.c_uint64(int(p)),
        ctypes.c_longlong(2**40),
        ctypes.c_bool(True),
        ctypes.c_uint64(int(out)),
    ]
    array = (ctypes.c_void_p * 7)(*(ctypes.addressof(cell) for cell in cells))
    numpy_array = np.array([ctypes.addressof(cell) for cell in cells], np.uint64)
    layout = "b7x" + "b7xd" + "h6x" + "Q" + "q" + "?7x" + "Q"
    packed = ctypes.create_string_buffer(struct.pack(layout, -3, 5, 2.5, -300, int(p), 2**40, True, int(out)))
    size = ctypes.c_size_t(len(packed) - 1)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)

    for params, more in (
        ((values, kinds), 0),
        (array, 0),
        (ctypes.addressof(array), 0),
        (numpy_array, 0),
        (0, ctypes.addressof(extra)),
        (None, ctypes.addressof(extra)),
    ):
        ok(cuda.cuMemsetD8(out, 0, 56))
        ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, params, more))
        assert np.array_equal(_host(cuda, out, expected), expected), params
    assert ok(cuda.cuFuncGetParamInfo(f, 1)) == (8, 16)
    assert code(cuda.cuFuncGetParamInfo(f, 7)) == R.CUDA_ERROR_INVALID_VALUE


def test_parameters_are_copied_at_the_launch(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, AXPY, "axpy")
    x, y = _device(cuda, np.ones(1, np.float32)), _device(cuda, np.zeros(1, np.float32))
    factor = ctypes.c_float(3.0)
    cells = [factor, ctypes.c_uint64(int(x)), ctypes.c_uint64(int(y)), ctypes.c_int(1)]
    array = (ctypes.c_void_p * 4)(*(ctypes.addressof(cell) for cell in cells))
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, array, 0))
    factor.value = 100.0
    assert _host(cuda, y, np.zeros(1, np.float32))[0] == 3.0


def test_wrong_parameters_are_refused(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, AXPY, "axpy")
    with pytest.raises(TypeError):
        cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((1.0,), (ctypes.c_float, None)), 0)
    with pytest.raises(OverflowError):
        cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((2**31,), (ctypes.c_int,)), 0)
    assert code(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((1.0,), (ctypes.c_float,)), 0)) != R.CUDA_SUCCESS


# Configurations -----------------------------------------------------------------------------------------------------

SHARED = """
extern "C" __global__ void __launch_bounds__(128) shared(unsigned* out) {
  extern __shared__ unsigned dynamic[];
  __shared__ unsigned fixed[256];
  fixed[threadIdx.x] = threadIdx.x;
  dynamic[threadIdx.x] = 1000;
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = fixed[blockDim.x - 1 - threadIdx.x] + dynamic[threadIdx.x];
}
"""


def test_wrong_configurations_are_refused(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SHARED, "shared")
    out = _zeros(cuda, 128)
    assert ok(cuda.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f)) == 128
    assert ok(cuda.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f)) == 1024
    for grid, block, smem in ((0, 32, 512), (1, 0, 512), (1, 129, 1024), (1, 32, 48 << 10), (2**31, 32, 512)):
        assert code(_launch(cuda, f, grid, block, (out,), smem=smem)) == R.CUDA_ERROR_INVALID_VALUE
    ok(_launch(cuda, f, 1, 128, (out,), smem=512))
    expected = np.arange(127, -1, -1, dtype=np.uint32) + 1000
    assert np.array_equal(_host(cuda, out, expected), expected)


def test_a_refused_launch_is_explained_and_not_reported_as_a_finding(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    source = """
extern "C" __global__ void put(int* p, int n) { p[threadIdx.x] = n; }
extern "C" __global__ void __launch_bounds__(128) bounded(int* p) { *p = 1; }
"""
    put, bounded = (function(cuda, source, name) for name in ("put", "bounded"))
    out = _zeros(cuda, 1)
    refused = [
        (
            _launch(cuda, put, 0, 32, (out, 1)),
            "put",
            "a grid of 0 x 1 x 1, and the most is 2147483647 x",
        ),
        (_launch(cuda, put, 1, 2048, (out, 1)), "put", "a block of 2048 x 1 x 1, and the most is 1024 x 1024 x 64"),
        (_launch(cuda, bounded, 1, 256, (out,)), "bounded", "blocks of 256 threads, and the kernel may have 128"),
        (
            _launch(cuda, put, 1, 32, (out, 1), smem=60000),
            "put",
            "60000 bytes of dynamic shared memory, and",
        ),
        (
            _launch(cuda, put, 1, 32, (out,)),
            "put",
            "the kernel takes 12 bytes of parameters (2), and what was",
        ),
    ]
    assert len(machine.reports) == len(refused)
    for report, (result, kernel, said) in zip(machine.reports, refused, strict=True):
        assert code(result) == R.CUDA_ERROR_INVALID_VALUE
        assert (report.kind, report.kernel, report.finding) == ("launch", kernel, False)
        assert report.message.startswith(said)


def test_more_than_48_kib_of_shared_memory_must_be_requested(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SHARED, "shared")
    out, wanted = _zeros(cuda, 64), 100 << 10
    assert code(_launch(cuda, f, 1, 64, (out,), smem=wanted)) == R.CUDA_ERROR_INVALID_VALUE
    limit = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert code(cuda.cuFuncSetAttribute(f, limit, 227 << 10)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuFuncSetAttribute(f, limit, wanted))
    ok(_launch(cuda, f, 1, 64, (out,), smem=wanted))
    ok(cuda.cuCtxSynchronize())
    assert ok(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 64, wanted)) == 2


def test_occupancy_follows_threads_and_shared_memory(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SHARED, "shared")
    blocks = {n: ok(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, n, 0)) for n in (32, 64, 128)}
    assert blocks == {32: 32, 64: 32, 128: 16}
    assert ok(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 256, 0)) == 0
    assert ok(cuda.cuOccupancyMaxPotentialBlockSize(f, None, 0, 0)) == (16 * 132, 128)
    callback = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(lambda threads: threads * 1024)
    pointer = ctypes.c_void_p(ctypes.cast(callback, ctypes.c_void_p).value)
    sized = types.CUoccupancyB2DSize(_ptr=ctypes.addressof(pointer))
    grid, block = ok(cuda.cuOccupancyMaxPotentialBlockSize(f, sized, 0, 0))
    assert grid // 132 * block * 1024 <= 228 << 10


def test_a_kernel_of_another_context_is_refused(cuda: Any) -> None:
    primary(cuda, 0)
    f = function(cuda, SHARED, "shared")
    primary(cuda, 1)
    stream = ok(cuda.cuStreamCreate(0))
    assert code(_launch(cuda, f, 1, 32, (0,), stream)) == R.CUDA_ERROR_INVALID_HANDLE


def test_launch_attributes_are_understood_or_refused(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SHARED, "shared")
    out, stream = _zeros(cuda, 32), ok(cuda.cuStreamCreate(1))
    params = ((out,), (None,))

    def launch(*attributes: Any) -> Any:
        config = _config(1, 32, stream, *attributes)
        config.sharedMemBytes = 128
        return code(cuda.cuLaunchKernelEx(config, f, params, 0))

    assert launch() == R.CUDA_SUCCESS
    assert launch(_attribute("PRIORITY", priority=-3)) == R.CUDA_SUCCESS
    assert launch(_attribute("COOPERATIVE", cooperative=1)) == R.CUDA_SUCCESS
    serial = _attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)
    assert launch(serial) == R.CUDA_SUCCESS
    cluster = _attribute("CLUSTER_DIMENSION")
    cluster.value.clusterDim.x = cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
    assert launch(cluster) == R.CUDA_SUCCESS
    cluster.value.clusterDim.x = 2
    assert launch(cluster) == R.CUDA_ERROR_INVALID_VALUE  # the grid is one block
    preferred = _attribute("PREFERRED_CLUSTER_DIMENSION")
    preferred.value.preferredClusterDim.x = 2
    assert launch(preferred) == R.CUDA_ERROR_NOT_SUPPORTED
    assert launch(_attribute("PROGRAMMATIC_EVENT")) == R.CUDA_ERROR_NOT_SUPPORTED
    unknown = _attribute("IGNORE")
    ctypes.c_uint32.from_address(unknown.getPtr()).value = 99
    config = _config(1, 32, stream, unknown)
    try:
        refused = code(cuda.cuLaunchKernelEx(config, f, params, 0)) == R.CUDA_ERROR_INVALID_VALUE
    except ValueError:  # the bindings themselves have no such member
        refused = True
    assert refused
    ok(cuda.cuStreamSynchronize(stream))


# Faults -------------------------------------------------------------------------------------------------------------

FAULTS = """
#include <cassert>
extern "C" __global__ void beyond(unsigned* p, int i) { p[i] = 1; }
extern "C" __global__ void odd(char* p) { *(unsigned*)(p + 1) = 1; }
extern "C" __global__ void trapped(unsigned* p) { if (p) __trap(); }
extern "C" __global__ void reads(const unsigned* p, unsigned* out) { *out = *p; }
"""
FAULTS = FAULTS.replace("#include <cassert>\n", "")


@pytest.mark.parametrize(
    ("name", "args", "expected", "kind"),
    [
        ("beyond", (16,), "ILLEGAL_ADDRESS", "out_of_bounds"),
        ("beyond", (-1,), "ILLEGAL_ADDRESS", "out_of_bounds"),
        ("odd", (), "MISALIGNED_ADDRESS", "misaligned"),
        ("trapped", (), "LAUNCH_FAILED", "trap"),
    ],
)
def test_a_fault_leaves_its_context_in_error(
    machine: Machine, cuda: Any, name: str, args: tuple[int, ...], expected: str, kind: str
) -> None:
    primary(cuda, 0)
    f = function(cuda, FAULTS, name)
    pointer = _zeros(cuda, 16)
    stream = ok(cuda.cuStreamCreate(1))
    error = getattr(R, f"CUDA_ERROR_{expected}")
    ok(_launch(cuda, f, 1, 1, (pointer, *args), stream))
    assert machine.reports == []
    assert code(cuda.cuStreamSynchronize(stream)) == error
    (report,) = machine.reports
    assert (report.kind, report.kernel, report.device, report.block, report.thread) == (
        kind,
        name,
        0,
        (0, 0, 0),
        (0, 0, 0),
    )
    line = next(i for i, text in enumerate(FAULTS.split("\n"), 1) if f" {name}(" in text)
    assert report.line == line
    assert "test.cu" in str(report)
    for call in (cuda.cuCtxSynchronize(), cuda.cuMemAlloc(16), cuda.cuStreamQuery(stream)):
        assert code(call) == error
    assert code(_launch(cuda, f, 1, 1, (pointer, *args), stream)) == error
    primary(cuda, 1)
    ok(cuda.cuMemAlloc(16))
    ok(cuda.cuDevicePrimaryCtxReset(0))
    primary(cuda, 0)
    ok(cuda.cuMemAlloc(16))


def test_a_read_of_uninitialised_memory_is_found(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, FAULTS, "reads")
    out = _zeros(cuda, 1)
    ok(_launch(cuda, f, 1, 1, (ok(cuda.cuMemAlloc(4)), out)))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "uninitialised"


def test_unwritten_memory_is_zero_where_it_is_not_checked() -> None:
    with Machine(devices=1, check_initialised=False) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f, out = function(cuda, FAULTS, "reads"), _device(cuda, np.full(1, 9, np.uint32))
        ok(_launch(cuda, f, 1, 1, (ok(cuda.cuMemAlloc(4)), out)))
        assert _host(cuda, out, np.zeros(1, np.uint32))[0] == 0
        assert machine.reports == []


def test_access_to_peer_memory_must_be_enabled(machine: Machine, cuda: Any) -> None:
    peer = primary(cuda, 1)
    pointer = _device(cuda, np.array([42], np.uint32))
    primary(cuda, 0)
    f, out = function(cuda, FAULTS, "reads"), _zeros(cuda, 1)
    ok(cuda.cuCtxEnablePeerAccess(peer, 0))
    ok(_launch(cuda, f, 1, 1, (pointer, out)))
    assert _host(cuda, out, np.zeros(1, np.uint32))[0] == 42
    ok(cuda.cuCtxDisablePeerAccess(peer))
    ok(_launch(cuda, f, 1, 1, (pointer, out)))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "no_access"
    primary(cuda, 1)
    ok(cuda.cuCtxSynchronize())


def test_a_use_of_freed_memory_is_found(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f, out, stream = function(cuda, FAULTS, "reads"), _zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
    pointer = ok(cuda.cuMemAllocAsync(4, stream))
    ok(cuda.cuMemsetD32Async(pointer, 5, 1, stream))
    ok(_launch(cuda, f, 1, 1, (pointer, out), stream))
    ok(cuda.cuMemFreeAsync(pointer, stream))
    ok(cuda.cuStreamSynchronize(stream))
    ok(_launch(cuda, f, 1, 1, (pointer, out), stream))
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "use_after_free"


def test_freeing_waits_for_the_work_that_uses_it(cuda: Any) -> None:
    primary(cuda)
    f, out, stream = function(cuda, FAULTS, "reads"), _zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
    pointer = _device(cuda, np.array([9], np.uint32))
    ok(_launch(cuda, f, 1, 1, (pointer, out), stream))
    ok(cuda.cuMemFree(pointer))
    assert _host(cuda, out, np.zeros(1, np.uint32))[0] == 9


LOCAL = """
extern "C" __global__ void local(unsigned* out, int i) {
  volatile unsigned mine[1 << 14];
  mine[i] = 1; out[threadIdx.x] = mine[i];
}
"""


def test_a_window_too_small_for_local_memory_ends_the_launch() -> None:
    with config.override(emu_window_gib=1), Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f, out = function(cuda, LOCAL, "local"), _zeros(cuda, 256)
        ok(_launch(cuda, f, 1, 256, (out, 5)))
        ok(cuda.cuCtxSynchronize())
        ok(_launch(cuda, f, 1000, 256, (out, 5)))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        assert machine.reports[-1].kind == "memory"


# Order and progress -------------------------------------------------------------------------------------------------

SPIN = """
__device__ unsigned load(const unsigned* p) {
  unsigned v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ void store(unsigned* p, unsigned v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
extern "C" __global__ void meet(unsigned* mine, unsigned* theirs, unsigned* out, unsigned value) {
  if (threadIdx.x == 0) { store(theirs + blockIdx.x, value); while (load(mine + blockIdx.x) < value) {} }
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
extern "C" __global__ void all_arrive(unsigned* count, unsigned blocks) {
  atomicAdd(count, 1u);
  while (load(count) < blocks) {}
}
extern "C" __global__ void bounded(unsigned* flag, unsigned* out, unsigned long long limit) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  while (load(flag) == 0) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin > limit) { *out = 7; return; }
  }
  *out = 1;
}
"""


def _pair(cuda: Any) -> list[tuple[Any, Any, Any, Any]]:
    """(stream, kernel, flags, out) of devices 0 and 1, which may reach one another."""
    contexts = [primary(cuda, i) for i in (0, 1)]
    found = []
    for i in (0, 1):
        primary(cuda, i)
        ok(cuda.cuCtxEnablePeerAccess(contexts[1 - i], 0))
        f = function(cuda, SPIN, "meet")
        found.append((ok(cuda.cuStreamCreate(1)), f, _zeros(cuda, 8), _zeros(cuda, 256)))
    return found


def _meet(cuda: Any, pair: list[tuple[Any, Any, Any, Any]], i: int, value: int) -> None:
    stream, f, mine, out = pair[i]
    theirs = pair[1 - i][2]
    ok(_launch(cuda, f, 8, 32, (mine, theirs, out, value), stream))


def test_devices_that_wait_for_each_other_advance_together(cuda: Any) -> None:
    pair = _pair(cuda)
    for value in (1, 2, 3):
        _meet(cuda, pair, 0, value)
    for value in (1, 2, 3):
        _meet(cuda, pair, 1, value)
    ok(cuda.cuStreamSynchronize(pair[0][0]))
    assert (_host(cuda, pair[0][3], np.zeros(256, np.uint32)) == 3).all()
    ok(cuda.cuStreamSynchronize(pair[1][0]))


def test_a_kernel_that_waits_alone_at_a_barrier_is_a_deadlock(machine: Machine, cuda: Any) -> None:
    pair = _pair(cuda)
    _meet(cuda, pair, 0, 1)
    assert code(cuda.cuStreamSynchronize(pair[0][0])) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    (report,) = machine.reports
    assert report.kind == "deadlock"
    assert report.device == 0
    assert "device 1 has no launch queued" in report.message
    line = next(i for i, text in enumerate(SPIN.split("\n"), 1) if "ld.acquire" in text)
    assert f"test.cu:{line}" in report.message
    assert "8 threads of 8 blocks (0 to 7)" in report.message
    assert "which holds 0" in report.message
    assert code(cuda.cuStreamSynchronize(pair[0][0])) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    ok(cuda.cuStreamSynchronize(pair[1][0]))


END = """
extern "C" __global__ void end(unsigned* out, int how) {
  if (how == 0) out[1 << 20] = 1;
  if (how == 1) __trap();
  if (how == 2) { if (threadIdx.x & 1) asm volatile("bar.sync 1, 32;"); else asm volatile("bar.sync 2, 32;"); }
}
"""


@pytest.mark.parametrize("how, kind", [(0, "out_of_bounds"), (1, "trap"), (2, "barrier_divergence")])
def test_a_deadlock_says_that_the_peer_was_ended_by_a_fault(machine: Machine, cuda: Any, how: int, kind: str) -> None:
    pair = _pair(cuda)
    _meet(cuda, pair, 0, 1)
    primary(cuda, 1)
    ok(_launch(cuda, function(cuda, END, "end"), 1, 32, (pair[1][3], how), pair[1][0]))
    primary(cuda, 0)
    assert code(cuda.cuStreamSynchronize(pair[0][0])) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    fault, deadlock = machine.reports
    assert (fault.kind, fault.device, deadlock.kind) == (kind, 1, "deadlock")
    sentence = f"device 1's kernel ended with {kind} at test.cu:{fault.line}"
    for text in (deadlock.message, deadlock.timeline):
        assert text is not None and sentence in text and "no launch queued" not in text
    assert machine.finding(0) is deadlock and machine.finding(1) is fault


LOCKS = """
extern "C" __global__ void cross(unsigned* words) {
  unsigned *x = words + 32 * blockIdx.x, *y = words + 32 * !blockIdx.x;
  while (atomicCAS(x, 0, 1));
  __threadfence();
  while (atomicCAS(y, 0, 1));
  atomicExch(y, 0);
  atomicExch(x, 0);
}
"""


def test_a_deadlock_of_two_locks_shows_both_blocks_and_who_took_which(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    words = _zeros(cuda, 64)
    ok(_launch(cuda, function(cuda, LOCKS, "cross"), 2, 1, (words,), 0))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    (report,) = machine.reports
    assert report.timeline is not None
    lines = report.timeline.splitlines()
    words_told = {
        (polled.split(": polled by ")[1].split(" (")[0], writer.split(":")[0].strip(), writer.split("] ")[1][:7])
        for polled, writer in zip(lines[:4:2], lines[1:4:2], strict=True)
    }
    first, second = (f"device 0 block {block} thread 0" for block in (0, 1))
    assert words_told == {
        (first, f"last written by {second}", "found 0"),
        (second, f"last written by {first}", "found 0"),
    }
    heads = next(line for line in lines if line.startswith("ns"))
    assert [cell.strip() for cell in heads.split("|")][1:] == ["device 0 block 0", "device 0 block 1"]
    assert "saw 1" in report.timeline


def test_a_free_between_two_launches_that_wait_for_each_other_is_a_deadlock(machine: Machine, cuda: Any) -> None:
    pair = _pair(cuda)
    primary(cuda, 0)
    spare = ok(cuda.cuMemAlloc(64))
    _meet(cuda, pair, 0, 1)
    assert code(cuda.cuMemFree(spare)) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    assert machine.reports[-1].kind == "deadlock"


def test_queries_observe_progress_and_never_end_work(machine: Machine, cuda: Any) -> None:
    pair = _pair(cuda)
    _meet(cuda, pair, 0, 1)
    assert code(cuda.cuStreamQuery(pair[0][0])) == R.CUDA_ERROR_NOT_READY
    _meet(cuda, pair, 1, 1)
    while (answer := code(cuda.cuStreamQuery(pair[0][0]))) == R.CUDA_ERROR_NOT_READY:
        pass
    assert answer == R.CUDA_SUCCESS
    _meet(cuda, pair, 0, 2)
    primary(cuda, 0)
    event = ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventRecord(event, pair[0][0]))
    for _ in range(3000):
        assert code(cuda.cuStreamQuery(pair[0][0])) == code(cuda.cuEventQuery(event)) == R.CUDA_ERROR_NOT_READY
    assert machine.reports == []
    assert code(cuda.cuStreamSynchronize(pair[0][0])) == R.CUDA_ERROR_LAUNCH_TIMEOUT


def _spin_on_host_memory(cuda: Any) -> tuple[Any, Any]:
    """(the word, in pinned memory, that releases a kernel; the kernel's stream)."""
    primary(cuda)
    address = int(ok(cuda.cuMemHostAlloc(4, 0)))
    word = ctypes.c_uint32.from_address(address)
    stream = ok(cuda.cuStreamCreate(1))
    f = function(cuda, SPIN, "all_arrive")
    kinds = (ctypes.c_void_p, ctypes.c_int)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, ((address, 2), kinds), 0))
    return word, stream


def test_the_host_may_release_a_kernel_between_queries(machine: Machine, cuda: Any) -> None:
    word, stream = _spin_on_host_memory(cuda)
    for _ in range(3000):
        assert code(cuda.cuStreamQuery(stream)) == R.CUDA_ERROR_NOT_READY
    word.value = 2
    ok(cuda.cuStreamSynchronize(stream))
    assert machine.reports == []


def test_a_host_wait_gives_other_threads_time_to_release_a_kernel(machine: Machine, cuda: Any) -> None:
    word, stream = _spin_on_host_memory(cuda)
    timer = threading.Timer(1.5, setattr, [word, "value", 2])
    timer.start()
    ok(cuda.cuStreamSynchronize(stream))
    timer.join()
    assert machine.reports == []


def test_the_wait_for_other_host_threads_is_a_setting() -> None:
    with config.override(emu_host_wait=0.05), Machine(devices=1) as machine:
        cuda, leave = machine.driver, threading.Event()
        ok(cuda.cuInit(0))
        _, stream = _spin_on_host_memory(cuda)
        other = threading.Thread(target=leave.wait, args=(30,))
        other.start()
        begin = time.monotonic()
        assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_LAUNCH_TIMEOUT
        assert time.monotonic() - begin < 5
        leave.set()
        other.join()
        assert machine.reports[-1].kind == "deadlock"


def test_queries_let_virtual_time_pass(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SPIN, "bounded")
    flag, out = _zeros(cuda, 1), _zeros(cuda, 1)
    kinds = (None, None, ctypes.c_ulonglong)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((flag, out, 10**9), kinds), 0))
    while (answer := code(cuda.cuStreamQuery(0))) == R.CUDA_ERROR_NOT_READY:
        pass
    assert answer == R.CUDA_SUCCESS
    assert _host(cuda, out, np.zeros(1, np.uint32))[0] == 7


def test_a_thread_may_launch_what_another_one_waits_for(cuda: Any) -> None:
    pair = _pair(cuda)
    results: list[Any] = []

    def rank(i: int) -> None:
        _meet(cuda, pair, i, 1)
        results.append(code(cuda.cuStreamSynchronize(pair[i][0])))

    threads = [threading.Thread(target=rank, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [R.CUDA_SUCCESS] * 2


def test_a_spin_with_a_limit_ends_at_it(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SPIN, "bounded")
    flag, out = _zeros(cuda, 1), _zeros(cuda, 1)
    kinds = (None, None, ctypes.c_ulonglong)
    start, end = ok(cuda.cuEventCreate(0)), ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventRecord(start, 0))
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((flag, out, 10**9), kinds), 0))
    ok(cuda.cuEventRecord(end, 0))
    assert _host(cuda, out, np.zeros(1, np.uint32))[0] == 7
    assert ok(cuda.cuEventElapsedTime(start, end)) >= 1000


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_blocks_that_do_not_fit_cannot_wait_for_each_other(seed: int) -> None:
    with Machine(devices=1, seed=seed, sm_count=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f = function(cuda, SPIN, "all_arrive")
        fits = 2 * ok(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 1024, 0))
        count = _zeros(cuda, 2)
        params = ((count, fits), (None, ctypes.c_int))
        ok(cuda.cuMemsetD32(int(count) + 4, 0, 1))
        assert fits == 4
        ok(cuda.cuLaunchCooperativeKernel(f, fits, 1, 1, 1024, 1, 1, 0, 0, ((count, fits * 1024), params[1])))
        ok(cuda.cuCtxSynchronize())
        more = ((int(count) + 4, (fits + 1) * 1024), (ctypes.c_void_p, ctypes.c_int))
        refused = cuda.cuLaunchCooperativeKernel(f, fits + 1, 1, 1, 1024, 1, 1, 0, 0, more)
        assert code(refused) == R.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        ok(cuda.cuLaunchKernel(f, fits + 1, 1, 1, 1024, 1, 1, 0, 0, more, 0))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT


def test_a_cooperative_launch_starts_when_all_of_its_blocks_have_room() -> None:
    """A cooperative launch waits while another kernel leaves room for half of its blocks. A partial start would come
    first in the log."""
    with Machine(devices=1, sm_count=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        note, late = function(cuda, ORDER, "note"), function(cuda, ORDER, "late")
        log, streams = _zeros(cuda, 8192), [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
        ok(cuda.cuCtxSynchronize())
        ok(_launch(cuda, late, 2, 1024, (log, 1), streams[0]))
        params = ((log, 2), (None, ctypes.c_int))
        ok(cuda.cuLaunchCooperativeKernel(note, 4, 1, 1, 1024, 1, 1, 0, streams[1], params))
        ok(cuda.cuCtxSynchronize())
        entries = _host(cuda, log, np.zeros(8192, np.uint32))
        assert entries[0] == 6 * 1024
        values = entries[1 : 1 + 6 * 1024]
        assert (values[: np.flatnonzero(values == 2)[0]] == 1).sum() >= 1024


def test_concurrent_kernels_share_the_multiprocessors() -> None:
    """Two grids of the same size, of which only one is resident at a time, cannot meet; with more room they can."""
    for sm_count, expected in ((2, R.CUDA_ERROR_LAUNCH_TIMEOUT), (4, R.CUDA_SUCCESS)):
        with Machine(devices=1, sm_count=sm_count) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            f, count = function(cuda, SPIN, "all_arrive"), _zeros(cuda, 1)
            streams = [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
            for stream in streams:
                ok(_launch(cuda, f, 4, 1024, (count, 8 * 1024), stream))
            assert code(cuda.cuCtxSynchronize()) == expected
            assert (expected == R.CUDA_SUCCESS) or "room for a block" in machine.reports[-1].message


ORDER = """
extern "C" __global__ void note(unsigned* log, unsigned value) { log[1 + atomicAdd(log, 1u)] = value; }
extern "C" __global__ void late(unsigned* log, unsigned value) {
  for (int i = 0; i < 50; i++) __nanosleep(1000);
  log[1 + atomicAdd(log, 1u)] = value;
}
"""


def _noted(cuda: Any, log: Any) -> list[int]:
    entries = _host(cuda, log, np.zeros(16, np.uint32))
    return list(entries[1 : 1 + entries[0]])


@pytest.mark.parametrize("legacy_first", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_blocking_streams_and_the_legacy_stream_wait_for_each_other(
    cuda: Any, legacy_first: bool, blocking: bool
) -> None:
    primary(cuda)
    note, late = function(cuda, ORDER, "note"), function(cuda, ORDER, "late")
    log, stream = _zeros(cuda, 16), ok(cuda.cuStreamCreate(0 if blocking else 1))
    ok(cuda.cuCtxSynchronize())
    order = (0, stream) if legacy_first else (stream, 0)
    ok(_launch(cuda, late, 1, 1, (log, 1), order[0]))
    ok(_launch(cuda, note, 1, 1, (log, 2), order[1]))
    ok(cuda.cuCtxSynchronize())
    assert _noted(cuda, log) == ([1, 2] if blocking else [2, 1])


def test_a_launch_of_higher_priority_starts_first(cuda: Any) -> None:
    primary(cuda)
    note, log = function(cuda, ORDER, "note"), _zeros(cuda, 16)
    ok(cuda.cuCtxSynchronize())
    for value, priority in ((1, 0), (2, -1), (3, -5)):
        stream = ok(cuda.cuStreamCreate(1))
        config = _config(1, 1, stream, _attribute("PRIORITY", priority=priority))
        ok(cuda.cuLaunchKernelEx(config, note, ((log, value), (None, ctypes.c_int)), 0))
    ok(cuda.cuCtxSynchronize())
    assert _noted(cuda, log) == [3, 2, 1]


def test_disabling_peer_access_waits_for_the_work_that_uses_it(cuda: Any) -> None:
    peer = primary(cuda, 1)
    pointer = _device(cuda, np.array([42], np.uint32))
    primary(cuda, 0)
    f, out, stream = function(cuda, FAULTS, "reads"), _zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuCtxEnablePeerAccess(peer, 0))
    ok(_launch(cuda, f, 1, 1, (pointer, out), stream))
    ok(cuda.cuCtxDisablePeerAccess(peer))
    assert _host(cuda, out, np.zeros(1, np.uint32))[0] == 42


# Programmatic launches ----------------------------------------------------------------------------------------------

CHAIN = """
__device__ void append(unsigned* log, unsigned value) { log[1 + atomicAdd(log, 1u)] = value; }
extern "C" __global__ void first(unsigned* log, unsigned* gate) {
  append(log, 10);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned v;
  if (gate) do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(gate) : "memory"); } while (!v);
  append(log, 11);
}
extern "C" __global__ void second(unsigned* log, unsigned* gate) {
  append(log, 20);
  if (gate) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(gate) : "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  append(log, 21);
}
extern "C" __global__ void third(unsigned* log) { append(log, 30); }
"""


def _chain(seed: int, gated: bool) -> tuple[Any, list[int]]:
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        first, second, third = (function(cuda, CHAIN, name) for name in ("first", "second", "third"))
        log, gate, stream = _zeros(cuda, 16), _zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
        pointer = gate if gated else types.CUdeviceptr(0)
        serial = _attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)
        params = ((log, pointer), (None, None))
        ok(cuda.cuLaunchKernel(first, 1, 1, 1, 1, 1, 1, 0, stream, params, 0))
        ok(cuda.cuLaunchKernelEx(_config(1, 1, stream, serial), second, params, 0))
        ok(cuda.cuLaunchKernel(third, 1, 1, 1, 1, 1, 1, 0, stream, ((log,), (None,)), 0))
        result = code(cuda.cuStreamSynchronize(stream))
        entries = _host(cuda, log, np.zeros(16, np.uint32)) if result == R.CUDA_SUCCESS else np.zeros(1, np.uint32)
        return result, list(entries[1 : 1 + entries[0]])


@pytest.mark.parametrize("seed", range(6))
def test_a_dependent_launch_waits_for_the_whole_primary(seed: int) -> None:
    result, log = _chain(seed, gated=False)
    assert result == R.CUDA_SUCCESS
    assert log.index(11) < log.index(21) < log.index(30)
    assert log.index(10) < log.index(20)


def test_odd_seeds_start_dependents_early_and_even_ones_late() -> None:
    """A primary kernel must not wait for its dependent, as nothing guarantees that they overlap."""
    assert _chain(1, gated=True) == (R.CUDA_SUCCESS, [10, 20, 11, 21, 30])
    assert _chain(0, gated=True)[0] == R.CUDA_ERROR_LAUNCH_TIMEOUT


@pytest.mark.parametrize("seed", range(4))
def test_work_behind_a_dependent_launch_waits_for_the_primary_too(seed: int) -> None:
    """The dependent launch does not wait for its primary itself and ends long before it."""
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        source = CHAIN + ORDER.replace("{\n  for", '{\n  asm volatile("griddepcontrol.launch_dependents;");\n  for')
        late, third, note = (function(cuda, source, name) for name in ("late", "third", "note"))
        log, stream = _zeros(cuda, 16), ok(cuda.cuStreamCreate(1))
        ok(cuda.cuCtxSynchronize())
        serial = _attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)
        ok(_launch(cuda, late, 1, 1, (log, 1), stream))
        ok(cuda.cuLaunchKernelEx(_config(1, 1, stream, serial), third, ((log,), (None,)), 0))
        ok(_launch(cuda, note, 1, 1, (log, 2), stream))
        ok(cuda.cuCtxSynchronize())
        assert _noted(cuda, log) == ([30, 1, 2] if seed % 2 else [1, 30, 2])


def test_a_launch_without_the_attribute_never_overlaps() -> None:
    with Machine(devices=1, seed=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        first, second = (function(cuda, CHAIN, name) for name in ("first", "second"))
        log = _zeros(cuda, 16)
        params = ((log, 0), (None, ctypes.c_void_p))
        for f in (first, second):
            ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, params, 0))
        assert list(_host(cuda, log, np.zeros(16, np.uint32))[:5]) == [4, 10, 11, 20, 21]


# The machine --------------------------------------------------------------------------------------------------------

BUSY = """
extern "C" __global__ void busy(unsigned* p, long n) { for (long i = 0; i < n; i++) atomicAdd(p, 1u); }
"""


def test_an_interrupted_wait_ends_its_kernel_and_a_new_context_goes_on(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f, count = function(cuda, BUSY, "busy"), _zeros(cuda, 1)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, 0, ((count, 1 << 40), (None, ctypes.c_long)), 0))
    timer = threading.Timer(0.06, signal.raise_signal, [signal.SIGINT])
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored if the tests run under nohup
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            cuda.cuCtxSynchronize()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, former)
    assert [report.kind for report in machine.reports] == ["interrupted"]
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    ok(cuda.cuDevicePrimaryCtxReset(0))
    primary(cuda)
    f, count = function(cuda, BUSY, "busy"), _zeros(cuda, 1)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, 0, ((count, 200), (None, ctypes.c_long)), 0))
    assert _host(cuda, count, np.zeros(1, np.uint32))[0] == 64 * 200


def test_the_machine_counts_the_accesses_of_its_launches(machine: Machine, cuda: Any) -> None:
    primary(cuda, 2)
    x, y = _device(cuda, np.ones(100, np.float32)), _device(cuda, np.ones(100, np.float32))
    ok(_launch(cuda, function(cuda, AXPY, "axpy"), 2, 64, (2.0, x, y, 100)))
    ok(cuda.cuCtxSynchronize())
    (record,) = machine.launches
    assert (record.kernel, record.device, record.grid, record.block) == ("axpy", 2, (2, 1, 1), (64, 1, 1))
    total = record.counters.total
    assert (total.local_read, total.local_written, total.remote_read) == (800, 400, 0)


def test_a_garbage_collected_machine_returns_its_addresses() -> None:
    machine = Machine(devices=1)
    window = weakref.ref(machine.window)
    ok(machine.driver.cuInit(0))
    primary(machine.driver)
    out = _zeros(machine.driver, 128)
    ok(_launch(machine.driver, function(machine.driver, SHARED, "shared"), 1, 32, (out,), smem=128))
    ok(machine.driver.cuCtxSynchronize())
    del machine
    gc.collect()
    assert window() is None


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    def run() -> list[int]:
        with Machine(devices=1, seed=seed) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            log = _zeros(cuda, 64)
            for value in (30, 31):
                stream = ok(cuda.cuStreamCreate(1))
                f = function(cuda, CHAIN.replace("30", str(value)), "third")
                ok(cuda.cuLaunchKernel(f, 12, 1, 1, 1, 1, 1, 0, stream, ((log,), (None,)), 0))
            ok(cuda.cuCtxSynchronize())
            return list(_host(cuda, log, np.zeros(64, np.uint32)))

    assert run() == run()
