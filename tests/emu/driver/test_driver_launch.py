# SPDX-License-Identifier: Apache-2.0
"""Launches on the emulated driver: forms of kernel parameters, launch configurations, and counted accesses."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, function, ok, primary
from launch_helpers import AXPY, attribute, device_array, host_array, launch, launch_config, zeros

from drvfuse.emu import Machine

F = types.CUfunction_attribute

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
    p, out = device_array(cuda, np.array([77], np.int32)), device_array(cuda, np.zeros(7))
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
        assert np.array_equal(host_array(cuda, out, expected), expected), params
    assert ok(cuda.cuFuncGetParamInfo(f, 1)) == (8, 16)
    assert code(cuda.cuFuncGetParamInfo(f, 7)) == R.CUDA_ERROR_INVALID_VALUE


def test_parameters_are_copied_at_the_launch(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, AXPY, "axpy")
    x, y = device_array(cuda, np.ones(1, np.float32)), device_array(cuda, np.zeros(1, np.float32))
    factor = ctypes.c_float(3.0)
    cells = [factor, ctypes.c_uint64(int(x)), ctypes.c_uint64(int(y)), ctypes.c_int(1)]
    array = (ctypes.c_void_p * 4)(*(ctypes.addressof(cell) for cell in cells))
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, array, 0))
    factor.value = 100.0
    assert host_array(cuda, y, np.zeros(1, np.float32))[0] == 3.0


def test_wrong_parameters_are_refused(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, AXPY, "axpy")
    with pytest.raises(TypeError):
        cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((1.0,), (ctypes.c_float, None)), 0)
    with pytest.raises(OverflowError):
        cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((2**31,), (ctypes.c_int,)), 0)
    assert code(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((1.0,), (ctypes.c_float,)), 0)) != R.CUDA_SUCCESS


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
    out = zeros(cuda, 128)
    assert ok(cuda.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f)) == 128
    assert ok(cuda.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f)) == 1024
    for grid, block, smem in ((0, 32, 512), (1, 0, 512), (1, 129, 1024), (1, 32, 48 << 10), (2**31, 32, 512)):
        assert code(launch(cuda, f, grid, block, (out,), smem=smem)) == R.CUDA_ERROR_INVALID_VALUE
    ok(launch(cuda, f, 1, 128, (out,), smem=512))
    expected = np.arange(127, -1, -1, dtype=np.uint32) + 1000
    assert np.array_equal(host_array(cuda, out, expected), expected)


def test_a_refused_launch_is_explained_and_not_reported_as_a_finding(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    source = """
extern "C" __global__ void put(int* p, int n) { p[threadIdx.x] = n; }
extern "C" __global__ void __launch_bounds__(128) bounded(int* p) { *p = 1; }
"""
    put, bounded = (function(cuda, source, name) for name in ("put", "bounded"))
    out = zeros(cuda, 1)
    refused = [
        (
            launch(cuda, put, 0, 32, (out, 1)),
            "put",
            "a grid of 0 x 1 x 1: its sizes must be from 1 to 2147483647 x",
        ),
        (
            launch(cuda, put, 1, 2048, (out, 1)),
            "put",
            "a block of 2048 x 1 x 1: its sizes must be from 1 to 1024 x 1024 x 64",
        ),
        (
            launch(cuda, bounded, 1, 256, (out,)),
            "bounded",
            "blocks of 256 threads, and the kernel may have at most 128",
        ),
        (
            launch(cuda, put, 1, 32, (out, 1), smem=60000),
            "put",
            "60000 bytes of dynamic shared memory, and",
        ),
        (
            launch(cuda, put, 1, 32, (out,)),
            "put",
            "the kernel takes 12 bytes of parameters (number of parameters: 2), and the launch gives fewer",
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
    out, wanted = zeros(cuda, 64), 100 << 10
    assert code(launch(cuda, f, 1, 64, (out,), smem=wanted)) == R.CUDA_ERROR_INVALID_VALUE
    limit = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert code(cuda.cuFuncSetAttribute(f, limit, 227 << 10)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuFuncSetAttribute(f, limit, wanted))
    ok(launch(cuda, f, 1, 64, (out,), smem=wanted))
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
    assert code(launch(cuda, f, 1, 32, (0,), stream)) == R.CUDA_ERROR_INVALID_HANDLE


def test_launch_attributes_are_understood_or_refused(cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, SHARED, "shared")
    out, stream = zeros(cuda, 32), ok(cuda.cuStreamCreate(1))
    params = ((out,), (None,))

    def launch(*attributes: Any) -> Any:
        config = launch_config(1, 32, stream, *attributes)
        config.sharedMemBytes = 128
        return code(cuda.cuLaunchKernelEx(config, f, params, 0))

    assert launch() == R.CUDA_SUCCESS
    assert launch(attribute("PRIORITY", priority=-3)) == R.CUDA_SUCCESS
    assert launch(attribute("COOPERATIVE", cooperative=1)) == R.CUDA_SUCCESS
    serial = attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)
    assert launch(serial) == R.CUDA_SUCCESS
    cluster = attribute("CLUSTER_DIMENSION")
    cluster.value.clusterDim.x = cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
    assert launch(cluster) == R.CUDA_SUCCESS
    cluster.value.clusterDim.x = 2
    assert launch(cluster) == R.CUDA_ERROR_INVALID_VALUE  # the grid is one block
    preferred = attribute("PREFERRED_CLUSTER_DIMENSION")
    preferred.value.preferredClusterDim.x = 2
    assert launch(preferred) == R.CUDA_ERROR_NOT_SUPPORTED
    assert launch(attribute("PROGRAMMATIC_EVENT")) == R.CUDA_ERROR_NOT_SUPPORTED
    unknown = attribute("IGNORE")
    ctypes.c_uint32.from_address(unknown.getPtr()).value = 99
    config = launch_config(1, 32, stream, unknown)
    try:
        refused = code(cuda.cuLaunchKernelEx(config, f, params, 0)) == R.CUDA_ERROR_INVALID_VALUE
    except ValueError:  # the bindings cannot read an attribute with an unknown id
        refused = True
    assert refused
    ok(cuda.cuStreamSynchronize(stream))


def test_the_machine_counts_the_accesses_of_its_launches(machine: Machine, cuda: Any) -> None:
    primary(cuda, 2)
    x, y = device_array(cuda, np.ones(100, np.float32)), device_array(cuda, np.ones(100, np.float32))
    ok(launch(cuda, function(cuda, AXPY, "axpy"), 2, 64, (2.0, x, y, 100)))
    ok(cuda.cuCtxSynchronize())
    (record,) = machine.launches
    assert (record.kernel, record.device, record.grid, record.block) == ("axpy", 2, (2, 1, 1), (64, 1, 1))
    total = record.counters.total
    assert (total.local_read, total.local_written, total.remote_read) == (800, 400, 0)
