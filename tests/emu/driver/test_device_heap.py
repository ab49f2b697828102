# SPDX-License-Identifier: Apache-2.0
"""malloc and free in kernels: the heap of a context, its limit, and reports of misuse."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary, ptx

from drvfuse.emu import Machine

pytestmark = pytest.mark.emulated
HEAP = types.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE

SOURCE = """
struct Node { int value; Node* next; };
extern "C" __global__ void build(Node** lists, const int* values, int count) {
    Node* list = 0;
    for (int i = 0; i < count; i++) {
        Node* node = new Node;
        node->value = values[threadIdx.x * count + i];
        node->next = list;
        list = node;
    }
    lists[threadIdx.x] = list;
}
extern "C" __global__ void take(Node** lists, int* out, int count) {
    Node* list = lists[(threadIdx.x + 1) % blockDim.x];
    for (int i = 0; i < count; i++) {
        Node* next = list->next;
        out[threadIdx.x * count + i] = list->value;
        delete list;
        list = next;
    }
}
extern "C" __global__ void misuse(int how, int bytes, int* out) {
    char* memory = (char*)malloc(bytes);
    out[0] = ((unsigned long long)memory & 15) == 0;
    if (how == 0) memory[bytes] = 1;     // behind the end
    if (how == 1) out[1] = memory[0];    // unwritten
    if (how == 5) free(memory + 16);
    free(memory);
    if (how == 2) out[1] = memory[0];    // freed
    if (how == 3) free(memory);
    if (how == 4) free(out);
    free(0);
}
extern "C" __global__ void most(int bytes, int* out) { while (malloc(bytes)) out[0]++; }
extern "C" __global__ void hand_over(char** where) {
    if (threadIdx.x == 0) { *where = (char*)malloc(4); **where = 1; }
    __syncthreads();
    if (threadIdx.x == 64) **where = 0;  // what a freed byte is then, too
    if (threadIdx.x == 32) free(*where);
}
"""


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with Machine(devices=1, sm_count=2, race=getattr(request, "param", False)) as made:
        ok(made.driver.cuInit(0))
        primary(made.driver)
        yield made


class Kernels:
    """A device on which the kernels of SOURCE run with one output array."""

    def __init__(self, machine: Machine) -> None:
        self.cuda = machine.driver
        self.module = ok(self.cuda.cuModuleLoadData(ptx(SOURCE)))

    def array(self, values: np.ndarray) -> int:
        memory = ok(self.cuda.cuMemAlloc(values.nbytes))
        ok(self.cuda.cuMemcpyHtoD(memory, values, values.nbytes))
        return int(memory)

    def read(self, memory: int, count: int) -> np.ndarray:
        out = np.empty(count, np.int32)
        ok(self.cuda.cuMemcpyDtoH(out, memory, out.nbytes))
        return out

    def run(self, name: str, threads: int, *arguments: int) -> Any:
        kernel = ok(self.cuda.cuModuleGetFunction(self.module, name.encode()))
        kinds = tuple(ctypes.c_uint64 if a > 1 << 32 else ctypes.c_int for a in arguments)
        ok(self.cuda.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, (arguments, kinds), 0))
        return code(self.cuda.cuCtxSynchronize())


@pytest.mark.parametrize("machine", [False, True], indirect=True)
def test_memory_allocated_in_one_kernel_is_read_and_freed_by_the_next(
    machine: Machine, rng: np.random.Generator
) -> None:
    kernels, threads, count = Kernels(machine), 40, 5
    values = rng.integers(-(2**31), 2**31, threads * count).astype(np.int32)
    lists, out = kernels.array(np.zeros(2 * threads, np.int32)), kernels.array(np.zeros(threads * count, np.int32))
    assert kernels.run("build", threads, lists, kernels.array(values), count) == R.CUDA_SUCCESS
    assert kernels.run("take", threads, lists, out, count) == R.CUDA_SUCCESS
    expected = np.roll(values.reshape(threads, count)[:, ::-1], -1, 0)
    assert np.array_equal(kernels.read(out, threads * count), expected.reshape(-1))
    assert not machine.reports


@pytest.mark.parametrize(
    ("how", "kind", "mark"),
    [
        (0, "out_of_bounds", "behind the end"),
        (1, "uninitialised", "unwritten"),
        (2, "use_after_free", "freed"),
        (3, "bad_free", "if (how == 3)"),
        (4, "bad_free", "if (how == 4)"),
        (5, "bad_free", "if (how == 5)"),
    ],
)
def test_misuse_of_the_heap_is_found_at_its_line(machine: Machine, how: int, kind: str, mark: str) -> None:
    kernels = Kernels(machine)
    assert kernels.run("misuse", 1, how, 21, kernels.array(np.zeros(2, np.int32))) != R.CUDA_SUCCESS
    (report,) = machine.reports
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if mark in text)
    assert (report.kind, report.line) == (kind, line)
    if kind in ("out_of_bounds", "use_after_free"):
        assert "21 bytes at 0x" in report.message


def test_the_heap_has_the_size_of_its_limit_and_reuses_freed_memory(machine: Machine) -> None:
    kernels, cuda = Kernels(machine), machine.driver
    assert ok(cuda.cuCtxGetLimit(HEAP)) == 8 << 20
    ok(cuda.cuCtxSetLimit(HEAP, 3 << 20))
    out = kernels.array(np.zeros(2, np.int32))
    for _ in range(5):  # each launch frees what it has allocated
        assert kernels.run("misuse", 1, 6, 2 << 20, out) == R.CUDA_SUCCESS
        assert kernels.read(out, 1)[0] == 1
    ok(cuda.cuMemsetD32(out, 0, 2))
    assert kernels.run("most", 1, 1 << 20, out) == R.CUDA_SUCCESS
    assert kernels.read(out, 1)[0] == 3
    assert code(cuda.cuCtxSetLimit(HEAP, 4 << 20)) == R.CUDA_ERROR_INVALID_VALUE
    assert ok(cuda.cuCtxGetLimit(HEAP)) == 3 << 20
    held = machine.held()
    ok(cuda.cuDevicePrimaryCtxReset(0))
    assert held["allocations"] > 0 and machine.held()["allocations"] == 0
    assert not machine.reports


@pytest.mark.parametrize("machine", [True], indirect=True)
def test_a_free_races_with_an_unordered_write(machine: Machine) -> None:
    kernels = Kernels(machine)
    kernels.run("hand_over", 96, kernels.array(np.zeros(2, np.int32)))
    lines = SOURCE.splitlines()
    (report,) = [r for r in machine.reports if r.kind == "race"]
    places = {report.line, report.other.line}
    assert places == {
        i for i, text in enumerate(lines, 1) if "threadIdx.x == 32" in text or "threadIdx.x == 64" in text
    }
