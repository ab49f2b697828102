# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of launches on the emulated driver: kernels, one-dimensional launches, arrays on devices."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver as types
from driver_helpers import ok

AXPY = """
__device__ float offsets[4] = {1.0f, 2.0f, 3.0f};
__constant__ int chosen;
extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void pick(float* out) { out[0] = offsets[chosen]; offsets[chosen] += 1.0f; }
"""
# Kernels that end in a fault if their arguments are wrong.
FAULTS = """
extern "C" __global__ void beyond(unsigned* p, int i) { p[i] = 1; }
extern "C" __global__ void odd(char* p) { *(unsigned*)(p + 1) = 1; }
extern "C" __global__ void trapped(unsigned* p) { if (p) __trap(); }
extern "C" __global__ void reads(const unsigned* p, unsigned* out) { *out = *p; }
"""
# `meet` exchanges a value with the same kernel on another device; `all_arrive` waits until all threads have arrived;
# `bounded` waits for a flag, up to a limit in nanoseconds.
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
# Kernels that append a number to a log, at once or after 50 us.
ORDER = """
extern "C" __global__ void note(unsigned* log, unsigned value) { log[1 + atomicAdd(log, 1u)] = value; }
extern "C" __global__ void late(unsigned* log, unsigned value) {
  for (int i = 0; i < 50; i++) __nanosleep(1000);
  log[1 + atomicAdd(log, 1u)] = value;
}
"""


def launch(cuda: Any, f: Any, grid: int, block: int, args: tuple[Any, ...], stream: Any = 0, smem: int = 0) -> Any:
    """The result of cuLaunchKernel with one-dimensional grid and blocks. In `args`, an int is a C int, a float a C
    float, and anything else a pointer."""
    kinds = tuple({int: ctypes.c_int, float: ctypes.c_float}.get(type(a)) for a in args)
    return cuda.cuLaunchKernel(f, grid, 1, 1, block, 1, 1, smem, stream, (args, kinds), 0)


def device_array(cuda: Any, data: np.ndarray) -> Any:
    """The address of new memory of the current device that holds `data`."""
    pointer = ok(cuda.cuMemAlloc(data.nbytes))
    ok(cuda.cuMemcpyHtoD(pointer, data, data.nbytes))
    return pointer


def zeros(cuda: Any, count: int) -> Any:
    """The address of `count` new 32-bit words that are 0, on the current device."""
    return device_array(cuda, np.zeros(count, np.uint32))


def host_array(cuda: Any, pointer: Any, like: np.ndarray) -> np.ndarray:
    """A copy of device memory with the shape and dtype of `like`."""
    out = np.empty_like(like)
    ok(cuda.cuMemcpyDtoH(out, pointer, out.nbytes))
    return out


def attribute(kind: str, **value: Any) -> Any:
    """A launch attribute CU_LAUNCH_ATTRIBUTE_`kind`."""
    made = types.CUlaunchAttribute()
    made.id = getattr(types.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{kind}")
    for name, item in value.items():
        setattr(made.value, name, item)
    return made


def launch_config(grid: int, block: int, stream: Any, *attributes: Any) -> Any:
    """The configuration of a launch with one-dimensional grid and blocks, for cuLaunchKernelEx."""
    config = types.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.hStream = stream
    config.attrs = list(attributes)
    config.numAttrs = len(attributes)
    return config


def log_entries(cuda: Any, log: Any) -> list[int]:
    """The numbers in a log of up to 15 entries, in the order in which kernels appended them."""
    entries = host_array(cuda, log, np.zeros(16, np.uint32))
    return list(entries[1 : 1 + entries[0]])
