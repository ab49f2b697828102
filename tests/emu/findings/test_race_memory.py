# SPDX-License-Identifier: Apache-2.0
"""The memory of the race detector does not grow with the number of launches, and dropped entries are reused."""

from __future__ import annotations

import pytest
from driver_helpers import R, function, ok, primary

from drvfuse.emu import Machine

SOURCE = """
// All blocks read the same 2048 words.
extern "C" __global__ void weights(const uint4* w, unsigned* out) {
  unsigned sum = 0;
  for (unsigned i = threadIdx.x; i < 512; i += blockDim.x) {
    uint4 v = w[i];
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
// Every thread counts, and polls, one word; the last one sets it back.
extern "C" __global__ void count(unsigned* w, unsigned* out) {
  unsigned all = gridDim.x * blockDim.x, seen;
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(w) : "memory");
  do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(w) : "memory"); while (seen < all);
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(w + 1) : "memory");
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(seen) : "l"(w + 1) : "memory");
  if (seen == all - 1) {
    *(volatile unsigned*)(w + 1) = 0;
    *w = 0;
  }
}
// All threads count one word, some at another place in the code; all read the columns of a table.
extern "C" __global__ void histogram(unsigned* w, unsigned* out) {
  if (threadIdx.x % 100 == 1) atomicAdd(w, 2);
  else atomicAdd(w, 1);
}
extern "C" __global__ void columns(const unsigned* w, unsigned* out) {
  unsigned sum = 0;
  for (unsigned i = 0; i < 64; i++) sum += w[i * 8 + threadIdx.x % 8];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
// Nobody ever writes the word that all poll.
extern "C" __global__ void stuck(volatile unsigned* w) { while (*w == 0); }
"""


@pytest.mark.parametrize(("kernel", "blocks", "threads"), [("weights", 64, 128), ("count", 6, 8)])
@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_the_detector_does_not_grow_with_ordered_launches(
    kernel: str, blocks: int, threads: int, waits: bool
) -> None:
    with Machine(devices=1, seed=1, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        w, out = (ok(cuda.cuMemAlloc(1 << 16)) for _ in range(2))
        for pointer in (w, out):
            ok(cuda.cuMemsetD32(pointer, 0, 1 << 14))
        call = function(cuda, SOURCE, kernel)
        used = []
        for launch in range(60):
            ok(cuda.cuLaunchKernel(call, blocks, 1, 1, threads, 1, 1, 0, 0, ((w, out), (None, None)), 0))
            if waits or launch % 4 == 3:
                ok(cuda.cuCtxSynchronize())
                used.append(machine.detector.state.arena_top)
        assert machine.reports == []
        assert used[-1] < 1.1 * used[len(used) // 2], used


@pytest.mark.parametrize(("kernel", "most"), [("histogram", 8), ("columns", 640)])
def test_memory_of_the_detector_does_not_grow_with_the_accesses_of_a_thread(kernel: str, most: int) -> None:
    """`most` is a bound in KiB. For each 16 bytes the detector keeps one entry of 32 bytes if a warp reads them,
    and two entries if atomics access them.
    """
    with Machine(devices=1, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        w, out = (ok(cuda.cuMemAlloc(1 << 16)) for _ in range(2))
        for pointer in (w, out):
            ok(cuda.cuMemsetD32(pointer, 0, 1 << 14))
        call = function(cuda, SOURCE, kernel)
        ok(cuda.cuCtxSynchronize())
        before = machine.detector.state.arena_top
        ok(cuda.cuLaunchKernel(call, 16, 1, 1, 256, 1, 1, 0, 0, ((w, out), (None, None)), 0))
        ok(cuda.cuCtxSynchronize())
        assert machine.reports == []
        assert machine.detector.state.arena_top - before < most << 10


def judged(state: int, most: int) -> int:
    """The number of accesses that the detector has checked, computed from the state of its random generator, which
    advances by one step for each access. Returns `most` + 1 if there are more than `most`."""
    drawn = 0
    for count in range(most + 1):
        if drawn == state:
            return count
        drawn = (drawn * 1664525 + 1013904223) & 0xFFFFFFFF
    return most + 1


def test_repeated_polls_are_checked_once_and_keep_one_entry_per_warp() -> None:
    used = []
    for threads in (32, 256):
        with Machine(devices=1, race=True) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            word = ok(cuda.cuMemAlloc(4))
            ok(cuda.cuMemsetD32(word, 0, 1))
            call = function(cuda, SOURCE, "stuck")
            ok(cuda.cuLaunchKernel(call, 1, 1, 1, threads, 1, 1, 0, 0, ((word,), (None,)), 0))
            assert cuda.cuCtxSynchronize()[0] == R.CUDA_ERROR_LAUNCH_TIMEOUT
            assert [report.kind for report in machine.reports] == ["deadlock"]
            used.append(machine.detector.state.arena_top)
            assert judged(machine.detector.state.random, 4 * threads) <= 4 * threads
    assert used[1] < used[0] + 100, used
