# SPDX-License-Identifier: Apache-2.0
"""Addresses of functions, in initial values, registers and tables of virtual functions, and indirect calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, ok, primary, ptx

from drvfuse.emu import Machine

pytestmark = pytest.mark.emulated

SOURCE = """
typedef int (*Function)(int, int);
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int minus(int a, int b) { return a - b; }
__device__ __noinline__ int neighbour(int a, int b) { return __shfl_xor_sync(0xFFFFFFFFu, a, 1) * b; }
__device__ Function table[3] = {add, minus, neighbour};
__constant__ Function fixed = minus;
struct Shape {
    float scale;
    __device__ virtual float area(float x) const { return x; }
    __device__ virtual int meet(int v) const { return v; }
};
struct Square : Shape {
    __device__ float area(float x) const override { return x * x * scale; }
    __device__ int meet(int v) const override { __shared__ int s[64]; s[threadIdx.x] = v; __syncthreads();
        return s[63 - threadIdx.x]; }
};
struct Cube : Shape { __device__ float area(float x) const override { return x * x * x * scale; } };

extern "C" __global__ void call(const int* a, int* out, int which, float* areas, int cube) {
    __shared__ Square square;
    __shared__ Cube solid;
    if (threadIdx.x == 0) {
        new (&square) Square;
        new (&solid) Cube;
        square.scale = 2;
        solid.scale = 3;
    }
    __syncthreads();
    Shape* shape = cube ? (Shape*)&solid : (Shape*)&square;
    int x = table[which](a[threadIdx.x], which + 5);
    if (threadIdx.x % 2) x = fixed(x, 7);
    out[threadIdx.x] = shape->meet(x);
    areas[threadIdx.x] = shape->area((float)threadIdx.x);
}
__device__ __noinline__ int sum(int n, const int* a) { return n ? 3 * sum(n - 1, a) + a[n & 63] : 1; }  // deep
extern "C" __global__ void recurse(int n, const int* a, int* out) { *out = sum(n, a); }
extern "C" __global__ void give(unsigned long long* where) { *where = (unsigned long long)table[1]; }
extern "C" __global__ void by(unsigned long long address, int* out) {
    *out = ((Function)address)(40, 2);  // here
}
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=1, sm_count=2, seed=2) as made:
        ok(made.driver.cuInit(0))
        primary(made.driver)
        yield made


def launch(cuda: Any, module: Any, name: str, threads: int, *arguments: int, wide: bool = False) -> Any:
    kernel = ok(cuda.cuModuleGetFunction(module, name.encode()))
    kinds = tuple(ctypes.c_uint64 if a > 1 << 32 or wide else ctypes.c_int for a in arguments)
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, (arguments, kinds), 0))
    return code(cuda.cuCtxSynchronize())


def array(cuda: Any, values: np.ndarray) -> int:
    memory = ok(cuda.cuMemAlloc(values.nbytes))
    ok(cuda.cuMemcpyHtoD(memory, values, values.nbytes))
    return int(memory)


def read(cuda: Any, memory: int, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    ok(cuda.cuMemcpyDtoH(out, memory, out.nbytes))
    return out


@pytest.mark.parametrize("cube", [0, 1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_functions_in_tables_and_virtual_functions_are_called(
    machine: Machine, rng: np.random.Generator, which: int, cube: int
) -> None:
    cuda = machine.driver
    module = ok(cuda.cuModuleLoadData(ptx(SOURCE)))
    a = rng.integers(-1000, 1000, 64).astype(np.int32)
    x, areas = np.arange(64), np.zeros(64, np.float32)
    given, out, sizes = array(cuda, a), array(cuda, np.zeros_like(a)), array(cuda, areas)
    assert launch(cuda, module, "call", 64, given, out, which, sizes, cube) == R.CUDA_SUCCESS, machine.reports
    b = which + 5
    result = (a + b, a - b, a[x ^ 1] * b)[which]
    result = np.where(x % 2, result - 7, result)
    assert np.array_equal(read(cuda, out, a), result if cube else result[::-1])
    assert np.array_equal(read(cuda, sizes, areas), (x**3 * 3 if cube else x**2 * 2).astype(np.float32))


def test_an_address_is_the_same_in_each_context_and_can_be_passed_as_an_argument(machine: Machine) -> None:
    cuda = machine.driver
    module = ok(cuda.cuModuleLoadData(ptx(SOURCE)))
    where, out = array(cuda, np.zeros(1, np.uint64)), array(cuda, np.zeros(1, np.int32))
    assert launch(cuda, module, "give", 1, where) == R.CUDA_SUCCESS
    address = int(read(cuda, where, np.zeros(1, np.uint64))[0])
    assert launch(cuda, module, "by", 1, address, out) == R.CUDA_SUCCESS
    assert read(cuda, out, np.zeros(1, np.int32))[0] == 38


@pytest.mark.parametrize("shift", [None, 8, 1 << 20])
def test_a_call_of_an_address_that_is_no_function_is_found(machine: Machine, shift: int | None) -> None:
    cuda = machine.driver
    module = ok(cuda.cuModuleLoadData(ptx(SOURCE)))
    where, out = array(cuda, np.zeros(1, np.uint64)), array(cuda, np.zeros(1, np.int32))
    assert launch(cuda, module, "give", 1, where) == R.CUDA_SUCCESS
    address = 0 if shift is None else int(read(cuda, where, np.zeros(1, np.uint64))[0]) + shift
    assert launch(cuda, module, "by", 1, address, out, wide=True) == R.CUDA_ERROR_INVALID_PC
    (report,) = machine.reports
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "// here" in text)
    assert (report.kind, report.line) == ("no_function", line) and f"0x{address:x}" in report.message


@pytest.mark.parametrize("depth", [500, 1 << 30])
def test_a_recursive_function_works_and_an_endless_recursion_is_a_fault(
    machine: Machine, rng: np.random.Generator, depth: int
) -> None:
    cuda = machine.driver
    module = ok(cuda.cuModuleLoadData(ptx(SOURCE)))
    a = rng.integers(-1000, 1000, 64).astype(np.int32)
    given, out = array(cuda, a), array(cuda, np.zeros(1, np.int32))
    result = launch(cuda, module, "recurse", 1, depth, given, out)
    if depth > 500:
        assert result == R.CUDA_ERROR_HARDWARE_STACK_ERROR
        (report,) = machine.reports
        line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "// deep" in text)
        assert (report.kind, report.line) == ("stack_overflow", line)
        return
    total = 1
    for n in range(1, depth + 1):
        total = (3 * total + int(a[n & 63])) & 0xFFFFFFFF
    assert result == R.CUDA_SUCCESS and read(cuda, out, np.zeros(1, np.uint32))[0] == total
    assert not machine.reports


TARGETS = """
.version 8.8
.target sm_90a
.address_size 64
.func (.param .b32 r) one (.param .b32 x) { .reg .b32 a;
    ld.param.b32 a, [x]; add.s32 a, a, 1; st.param.b32 [r], a; ret; }
.func (.param .b32 r) two (.param .b32 x) { .reg .b32 a;
    ld.param.b32 a, [x]; mul.lo.s32 a, a, 3; st.param.b32 [r], a; ret; }
.func (.param .b32 r) three (.param .b32 x) { .reg .b32 a; mov.b32 a, 9; st.param.b32 [r], a; ret; }
.visible .entry k(.param .u64 out, .param .u32 which) {
    .reg .pred p; .reg .b32 w, v; .reg .b64 f, g, o;
    ld.param.u32 w, [which]; ld.param.u64 o, [out];
    setp.eq.u32 p, w, 0;
    mov.u64 f, one; mov.u64 g, two;
    selp.b64 f, f, g, p;
    setp.eq.u32 p, w, 2;
    @p mov.u64 f, three;
    setp.lt.u32 p, w, 3;
    mov.b32 v, 77;
    targets: .calltargets one, two;
    { .param .b32 a; .param .b32 b; st.param.b32 [b], 14;
      @p call (a), f, (b), targets;
      @p ld.param.b32 v, [a]; }
    st.global.b32 [o], v;
    ret;
}
"""


@pytest.mark.parametrize(("which", "expected"), [(0, 15), (1, 42), (3, 77), (2, None)])
def test_an_indirect_call_takes_a_list_of_targets_and_a_guard(
    machine: Machine, which: int, expected: int | None
) -> None:
    cuda = machine.driver
    module = ok(cuda.cuModuleLoadData(TARGETS.encode() + b"\0"))
    out = array(cuda, np.zeros(1, np.int32))
    result = launch(cuda, module, "k", 1, out, which)
    if expected is None:
        assert result == R.CUDA_ERROR_INVALID_PC
    else:
        assert result == R.CUDA_SUCCESS and read(cuda, out, np.zeros(1, np.int32))[0] == expected
