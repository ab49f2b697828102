# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for other kernels or for the host: progress, deadlocks, queries, time-outs, Ctrl-C."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, function, ok, primary
from launch_helpers import SPIN, host_array, launch, zeros

from drvfuse import config
from drvfuse.emu import Machine


def _pair(cuda: Any) -> list[tuple[Any, Any, Any, Any]]:
    """For devices 0 and 1, which are peers: a stream, the kernel `meet`, its flags and its output."""
    contexts = [primary(cuda, i) for i in (0, 1)]
    found = []
    for i in (0, 1):
        primary(cuda, i)
        ok(cuda.cuCtxEnablePeerAccess(contexts[1 - i], 0))
        f = function(cuda, SPIN, "meet")
        found.append((ok(cuda.cuStreamCreate(1)), f, zeros(cuda, 8), zeros(cuda, 256)))
    return found


def _meet(cuda: Any, pair: list[tuple[Any, Any, Any, Any]], i: int, value: int) -> None:
    stream, f, mine, out = pair[i]
    theirs = pair[1 - i][2]
    ok(launch(cuda, f, 8, 32, (mine, theirs, out, value), stream))


def test_devices_that_wait_for_each_other_advance_together(cuda: Any) -> None:
    pair = _pair(cuda)
    for value in (1, 2, 3):
        _meet(cuda, pair, 0, value)
    for value in (1, 2, 3):
        _meet(cuda, pair, 1, value)
    ok(cuda.cuStreamSynchronize(pair[0][0]))
    assert (host_array(cuda, pair[0][3], np.zeros(256, np.uint32)) == 3).all()
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
    ok(launch(cuda, function(cuda, END, "end"), 1, 32, (pair[1][3], how), pair[1][0]))
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
    words = zeros(cuda, 64)
    ok(launch(cuda, function(cuda, LOCKS, "cross"), 2, 1, (words,), 0))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    (report,) = machine.reports
    assert report.timeline is not None
    lines = report.timeline.splitlines()
    shown = {
        (polled.split(": polled by ")[1].split(" (")[0], writer.split(":")[0].strip(), writer.split("] ")[1][:7])
        for polled, writer in zip(lines[:4:2], lines[1:4:2], strict=True)
    }
    first, second = (f"device 0 block {block} thread 0" for block in (0, 1))
    assert shown == {
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
    """Launch a kernel that waits for a word in pinned memory to be 2. Returns the word and the kernel's stream."""
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
    flag, out = zeros(cuda, 1), zeros(cuda, 1)
    kinds = (None, None, ctypes.c_ulonglong)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((flag, out, 10**9), kinds), 0))
    while (answer := code(cuda.cuStreamQuery(0))) == R.CUDA_ERROR_NOT_READY:
        pass
    assert answer == R.CUDA_SUCCESS
    assert host_array(cuda, out, np.zeros(1, np.uint32))[0] == 7


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
    flag, out = zeros(cuda, 1), zeros(cuda, 1)
    kinds = (None, None, ctypes.c_ulonglong)
    start, end = ok(cuda.cuEventCreate(0)), ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventRecord(start, 0))
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((flag, out, 10**9), kinds), 0))
    ok(cuda.cuEventRecord(end, 0))
    assert host_array(cuda, out, np.zeros(1, np.uint32))[0] == 7
    assert ok(cuda.cuEventElapsedTime(start, end)) >= 1000


BUSY = """
extern "C" __global__ void busy(unsigned* p, long n) { for (long i = 0; i < n; i++) atomicAdd(p, 1u); }
"""


def test_an_interrupted_wait_ends_its_kernel_and_a_new_context_goes_on(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f, count = function(cuda, BUSY, "busy"), zeros(cuda, 1)
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
    f, count = function(cuda, BUSY, "busy"), zeros(cuda, 1)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, 0, ((count, 200), (None, ctypes.c_long)), 0))
    assert host_array(cuda, count, np.zeros(1, np.uint32))[0] == 64 * 200
