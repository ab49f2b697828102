# SPDX-License-Identifier: Apache-2.0
"""Reports that do not end a kernel: warp operations and barriers with missing lanes; and suggestions in reports."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, ok, primary, ptx

from drvfuse.emu import Machine, Report
from drvfuse.emu.findings.notices import lanes_text

SOURCE = """
#define FULL 0xffffffffu
#define KERNEL extern "C" __global__ void
KERNEL down(int* out) {
  int v = threadIdx.x;
  for (int o = 16; o; o >>= 1) v += __shfl_down_sync(FULL, v, o);  // down
  out[threadIdx.x] = v;
}
KERNEL swap(int* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __shfl_xor_sync(FULL, (int)threadIdx.x, 16);  // swap
}
KERNEL foreign(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, (int)threadIdx.x, 20);  // foreign
}
KERNEL up(int* out) { out[threadIdx.x] = __shfl_up_sync(FULL, (int)threadIdx.x, 1); }
KERNEL segments(int* out) { out[threadIdx.x] = __shfl_xor_sync(FULL, (int)threadIdx.x, 4, 8); }
KERNEL ballot(int* out) { out[threadIdx.x] = __ballot_sync(FULL, 1); }  // ballot
KERNEL all(int* out) { if (threadIdx.x < 20) out[threadIdx.x] = __all_sync(FULL, 1); }  // all
KERNEL sum(int* out) { out[threadIdx.x] = __reduce_add_sync(FULL, 1); }  // sum
KERNEL active(int* out) {
  if (threadIdx.x < 20) out[threadIdx.x] = __popc(__ballot_sync(__activemask(), 1));
}
KERNEL sync(int* out) { if (threadIdx.x < 20) { __syncwarp(); out[threadIdx.x] = 1; } }
KERNEL barrier(int* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();  // barrier
  out[threadIdx.x] = 1;
}
KERNEL count(int* out) { out[0]++; }  // count
KERNEL highest(int* out) { if (out[0] < threadIdx.x) out[0] = threadIdx.x; }  // highest
KERNEL shift(int* out) { out[threadIdx.x] = out[threadIdx.x + 1]; }  // shift
KERNEL flag(int* out) {
  if (threadIdx.x < 32) out[0] = 1;
  else out[threadIdx.x] = out[0];
}
KERNEL neighbour(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = 1;  // wrote
  out[threadIdx.x] = s[(threadIdx.x + 1) % 64];  // neighbour
}
KERNEL unwritten(int* out) {
  __shared__ int s[64];
  if (out[0]) s[threadIdx.x] = 1;  // might write
  out[threadIdx.x] = s[threadIdx.x];  // unwritten
}
KERNEL meet(int* out) {
  if (threadIdx.x) return;
  atomicAdd(out, 1);
  while (*(volatile int*)out < gridDim.x);  // meet
}
"""


def line(mark: str) -> int:
    return next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"// {mark}"))


class Bench:
    """A device, its kernels, and 64 words of memory that are 0."""

    def __init__(self, race: bool | str = False, image: bytes | None = None) -> None:
        self.machine = Machine(devices=1, race=race, sm_count=2)
        self.cuda = self.machine.driver
        self.cuda.cuInit(0)
        primary(self.cuda)
        self.module = ok(self.cuda.cuModuleLoadData(image or ptx(SOURCE)))
        self.words = int(ok(self.cuda.cuMemAlloc(1024)))
        ok(self.cuda.cuMemsetD32(self.words, 0, 256))
        ok(self.cuda.cuCtxSynchronize())

    def run(self, name: str, threads: int, blocks: int = 1, code: Any = R.CUDA_SUCCESS) -> list[Report]:
        """The reports of a run of a kernel."""
        kernel = ok(self.cuda.cuModuleGetFunction(self.module, name.encode()))
        values, types = (self.words,), (ctypes.c_void_p,)
        ok(self.cuda.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, 0, (values, types), 0))
        assert self.cuda.cuCtxSynchronize()[0] == code
        found, self.machine.reports[:] = list(self.machine.reports), []
        return found

    def read(self, count: int) -> list[int]:
        values = np.zeros(count, np.int32)
        ok(self.cuda.cuMemcpyDtoH(values.ctypes.data, self.words, values.nbytes))
        return values.tolist()


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(getattr(request, "param", False))
    yield made
    made.machine.close()


def test_a_shuffle_from_a_lane_beyond_the_block_is_reported(bench: Bench) -> None:
    (report,) = bench.run("down", 16)
    assert (report.kind, report.line, report.thread) == ("absent_lane", line("down"), (0, 0, 0))
    assert report.message == (
        "lane 0 reads lane 16 by a shuffle, which the block does not have: this warp has 16 lanes; "
        "the result is undefined (here 0xdeadbeef)"
    )
    assert bench.run("down", 32) == [] and bench.read(1) == [31 * 16]


def test_a_shuffle_from_an_exited_or_unmasked_lane_is_reported(bench: Bench) -> None:
    (report,) = bench.run("swap", 32)
    assert report.message.startswith("lane 4 reads lane 20 by a shuffle, which has exited; ")
    assert report.line == line("swap")
    (report,) = bench.run("foreign", 32)
    assert report.message.startswith("lane 0 reads lane 20 by a shuffle, which is not in the mask 0x0000ffff; ")
    assert report.line == line("foreign")


@pytest.mark.parametrize("name, threads", [("up", 7), ("up", 33), ("segments", 8), ("segments", 48), ("active", 32)])
def test_shuffles_that_read_no_absent_lane_are_not_reported(bench: Bench, name: str, threads: int) -> None:
    assert bench.run(name, threads) == []
    assert bench.run("sync", 32) == []


@pytest.mark.parametrize(
    "name, threads, lanes",
    [
        ("ballot", 16, "lanes 16 to 31, which the block does not have"),
        ("ballot", 63, "lane 31, which the block does not have"),
        ("all", 32, "lanes 20 to 31, which have exited"),
        ("all", 24, "lanes 24 to 31, which the block does not have, and lanes 20 to 23, which have exited"),
        ("sum", 30, "lanes 30 to 31, which the block does not have"),
    ],
)
def test_a_vote_with_absent_lanes_in_its_mask_is_reported_once(
    bench: Bench, name: str, threads: int, lanes: str
) -> None:
    (report,) = bench.run(name, threads, blocks=3)
    assert (report.kind, report.line) == ("absent_lane", line(name))
    assert f"names {lanes}: only the lanes that are there are counted" in report.message
    assert bench.run(name, threads) == []  # a second report of the same place is not made


@pytest.mark.parametrize("bench", [False, True, "strict"], indirect=True)
def test_a_barrier_that_exited_lanes_never_reach_is_reported_in_strict(bench: Bench) -> None:
    found = bench.run("barrier", 64)
    if bench.machine.detector is None or not bench.machine.detector.state.strict:
        assert found == []
        return
    (report,) = found
    assert (report.kind, report.line, report.thread) == ("barrier_exited", line("barrier"), (32, 0, 0))
    assert report.message == (
        "8 of the 32 lanes of this warp are at the barrier; lanes 8 to 31 have exited and will never reach it"
    )
    assert bench.run("barrier", 36) == []  # the block has no lanes beyond 36


@pytest.mark.parametrize("lines", [True, False])
def test_the_race_of_a_counter_suggests_an_atomic(lines: bool) -> None:
    text = ptx(SOURCE).decode()
    bench = Bench(True, (text if lines else re.sub(r"\n\s*\.(loc|file) .*", "", text)).encode())
    for name in ("highest", "count"):
        found = bench.run(name, 10)
        assert all("an atomic (atomicAdd, atomicMax" in report.hint for report in found)
        assert not lines or [(r.line, r.other.line) for r in found] == [(line(name), line(name))]
    for name in ("shift", "flag"):
        found = bench.run(name, 40)
        assert found and all(report.kind == "race" and report.hint is None for report in found), name
    bench.machine.close()


@pytest.mark.parametrize("name, wrote", [("neighbour", "wrote"), ("unwritten", "might write")])
def test_an_uninitialised_shared_word_that_the_kernel_writes_suggests_a_barrier(
    bench: Bench, name: str, wrote: str
) -> None:
    (report,) = bench.run(name, 64, code=R.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert (report.kind, report.line) == ("uninitialised", line(name))
    assert report.hint.startswith(f"the kernel writes shared memory at test.cu:{line(wrote)}: if another thread")
    assert "a barrier (__syncthreads) is missing" in report.hint


@pytest.mark.parametrize("bench", [True], indirect=True)
def test_a_race_with_a_copy_or_a_fill_names_the_call(bench: Bench) -> None:
    cuda = bench.cuda
    streams = [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
    ok(cuda.cuMemsetD8Async(bench.words, 0, 64, streams[0]))
    ok(cuda.cuMemcpyDtoDAsync(bench.words, bench.words + 512, 64, streams[1]))
    ok(cuda.cuCtxSynchronize())
    (report,) = bench.machine.reports
    assert (report.kernel, report.other.kernel) == ("cuMemcpyDtoDAsync (copy)", "cuMemsetD8Async (fill)")
    assert "is not ordered after the write by cuMemsetD8Async (fill) of device 0" in report.message


def test_a_deadlock_says_how_many_blocks_never_became_resident(bench: Bench) -> None:
    (report,) = bench.run("meet", 1024, blocks=7, code=R.CUDA_ERROR_LAUNCH_TIMEOUT)
    first, *rest = report.message.splitlines()
    assert first == "nothing can go on; 3 of the 7 blocks of meet on device 0 never became resident:"
    assert rest[-1].startswith(
        "  device 0, meet: 3 of its 7 blocks never became resident: 4 are resident and do not end."
    )


def test_lists_of_lanes_are_printed_as_ranges() -> None:
    assert lanes_text(1 << 3) == "lane 3"
    assert lanes_text(0xFFFF0000) == "lanes 16 to 31"
    assert lanes_text(0b1010 | 0xFF00) == "lanes 1, 3, 8 to 15"
