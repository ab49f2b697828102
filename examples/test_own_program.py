# SPDX-License-Identifier: Apache-2.0
"""How to test your own cuda-python program with pytest. The tests need no GPU, and every access is checked.

`moving_average` is such a program: it does not use drvfuse. drvfuse's pytest plugin switches `cuda.bindings` to
emulated GPUs for the tests that have the mark `emu`, and fails them for races, accesses out of bounds, uninitialised
reads, deadlocks and the other findings of the machine.

    pytest examples/test_own_program.py

Output, with -q:

    ....                                                                     [100%]
    4 passed
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from cuda.bindings import nvrtc

SOURCE = r"""
extern "C" __global__ void moving_average(const float* x, float* y, int count) {
  __shared__ float near[66];  // 64 elements and one on each side
  int i = 64 * blockIdx.x + threadIdx.x;
  near[threadIdx.x + 1] = i < count ? x[i] : 0;
  if (threadIdx.x == 0) near[0] = i > 0 ? x[i - 1] : 0;
  if (threadIdx.x == 63) near[65] = i + 1 < count ? x[i + 1] : 0;
  BARRIER
  if (i < count) y[i] = (near[threadIdx.x] + near[threadIdx.x + 1] + near[threadIdx.x + 2]) / 3;
}
"""


def ok(result):
    assert not result[0], result[0]
    return result[1] if len(result) == 2 else result[1:]


def moving_average(x: np.ndarray, barrier: str = "__syncthreads();") -> np.ndarray:
    """The program: compile, copy, launch, copy back."""
    program = ok(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"moving_average.cu", 0, [], []))
    options = [b"--gpu-architecture=compute_80", b"-lineinfo", f"-DBARRIER={barrier}".encode()]
    ok(nvrtc.nvrtcCompileProgram(program, len(options), options))
    ptx = bytes(ok(nvrtc.nvrtcGetPTXSize(program)))
    ok(nvrtc.nvrtcGetPTX(program, ptx))

    ok(cuda.cuInit(0))
    context = ok(cuda.cuDevicePrimaryCtxRetain(0))
    ok(cuda.cuCtxSetCurrent(context))
    kernel = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(ptx)), b"moving_average"))
    source, target = (ok(cuda.cuMemAlloc(x.nbytes)) for _ in range(2))
    ok(cuda.cuMemcpyHtoD(source, x.ctypes.data, x.nbytes))
    arguments = (int(source), int(target), x.size), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    ok(cuda.cuLaunchKernel(kernel, -(-x.size // 64), 1, 1, 64, 1, 1, 0, 0, arguments, 0))
    y = np.empty_like(x)
    ok(cuda.cuMemcpyDtoH(y.ctypes.data, target, x.nbytes))
    for pointer in (source, target):
        ok(cuda.cuMemFree(pointer))
    return y


def expected(x: np.ndarray) -> np.ndarray:
    padded = np.concatenate([[0], x, [0]]).astype(np.float32)
    return (padded[:-2] + padded[1:-1] + padded[2:]) / np.float32(3)


@pytest.mark.emu(devices=1, race=True, seeds=2)
def test_a_moving_average_of_any_length():
    for count in (1, 64, 200):
        x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        assert np.allclose(moving_average(x), expected(x), atol=1e-6)


@pytest.mark.emu(devices=1, race=True, seeds=2)
def test_that_the_missing_barrier_is_found(emu_cuda, emu_reports):
    """A test that provokes a report takes it from `emu_reports`; any other report would fail the test."""
    x = np.ones(64, np.float32)
    with pytest.raises(AssertionError):
        moving_average(x, barrier="")
    report = emu_reports.expect("uninitialised")
    assert report.kernel == "moving_average"
