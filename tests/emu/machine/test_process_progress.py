# SPDX-License-Identifier: Apache-2.0
"""Waits on a machine with several processes: a waiting process does not block the calls of the others, virtual time
passes during waits, and deadlocks are reported."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from emu.driver_helpers import R, code, function, ok, primary
from emu.machine.test_shared_memory import DESCRIPTOR, exportable, imported
from emu.multicast_helpers import PIECE, mapped, memory_prop, object_prop

from drvfuse.emu import Machine

SOURCE = """
__device__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
extern "C" __global__ void wait(volatile int* flag, int value) { while (*flag < value) {} }
extern "C" __global__ void bounded(volatile int* flag, unsigned long long ns, int* timed_out) {
    unsigned long long begin = now();
    for (unsigned polls = 1; !*flag; polls++) {
        if (polls % 1024 == 0 && now() - begin > ns) {
            *timed_out = 1;
            return;
        }
    }
    *timed_out = 0;
}
extern "C" __global__ void set(volatile int* flag, int value) { *flag = value; }
extern "C" __global__ void publish(int* flag, int value) {
    asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
__device__ int read(int* flag) {
    int value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
extern "C" __global__ void acquire(int* flag, int value) { while (read(flag) != value) {} }
extern "C" __global__ void message(int* flag, int value, int released) {
    flag[1] = 5;
    if (released) asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
    else asm volatile("st.relaxed.sys.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
extern "C" __global__ void receive(int* flag, int value) {
    while (read(flag) != value) {}
    flag[2] = flag[1];
}
"""
SIGNATURES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("wait", "set", "publish", "acquire", "receive"), (ctypes.c_void_p, ctypes.c_int)),
    "bounded": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p),
    "message": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
}
SECOND = 1_000_000_000


class Rank:
    """A process with a context on a device, and the calls that tests make in it."""

    def __init__(self, machine: Machine, name: str, device: int = 0) -> None:
        self.process = machine.process(name)
        self.cuda = self.process.driver
        ok(self.cuda.cuInit(0))
        self.context = primary(self.cuda, device)
        self.kernels = {name: function(self.cuda, SOURCE, name) for name in SIGNATURES}

    def launch(self, name: str, *values: int) -> None:
        params = values, SIGNATURES[name]
        ok(self.cuda.cuLaunchKernel(self.kernels[name], 1, 1, 1, 1, 1, 1, 0, 0, params, 0))

    def synchronise(self) -> Any:
        ok(self.cuda.cuCtxSetCurrent(self.context))
        return code(self.cuda.cuCtxSynchronize())

    def word(self) -> int:
        """The address of a word that is 0."""
        pointer = ok(self.cuda.cuMemAlloc(4))
        ok(self.cuda.cuMemsetD32(pointer, 0, 1))
        return int(pointer)

    def read(self, pointer: int) -> int:
        out = np.zeros(1, np.int32)
        ok(self.cuda.cuMemcpyDtoH(out, pointer, 4))
        return int(out[0])


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=2) as made:
        yield made


@pytest.fixture
def pair(machine: Machine) -> tuple[Rank, Rank]:
    return Rank(machine, "a"), Rank(machine, "b", 1)


def shared_word(one: Rank, other: Rank) -> tuple[int, int]:
    """A word that both processes share and that is 0: its address in each process."""
    ok(one.cuda.cuCtxSetCurrent(one.context))
    handle = ok(one.cuda.cuMemCreate(PIECE, exportable(0), 0))
    theirs = imported(other.cuda, ok(one.cuda.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0)))
    found = mapped(one.cuda, handle, PIECE, 2), mapped(other.cuda, theirs, PIECE, 2)
    ok(one.cuda.cuMemsetD32(found[0], 0, 1))
    ok(one.cuda.cuCtxSynchronize())
    return found


def beside(run: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in a thread. Returns a function that waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()

    def result() -> Any:
        thread.join()
        return results[0]

    return result


# Calls of other processes ---------------------------------------------------------------------------------------------


def test_a_wait_ends_at_the_work_of_another_process(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    a, b = pair
    mine, theirs = shared_word(a, b)
    a.launch("wait", mine, 7)
    waiting = beside(a.synchronise)
    while not a.process.blocked:
        time.sleep(0.001)
    begun = time.monotonic()
    ok(b.cuda.cuCtxSetCurrent(b.context))
    for _ in range(20):
        ok(b.cuda.cuMemFree(ok(b.cuda.cuMemAlloc(1 << 20))))
    b.launch("set", theirs, 7)
    assert b.synchronise() == waiting() == R.CUDA_SUCCESS
    assert time.monotonic() - begun < 2
    assert not machine.reports


def test_ranks_wait_for_one_another_many_times(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    ping = shared_word(*pair)
    pong = shared_word(*pair)

    def run(rank: int) -> list[Any]:
        own, found = pair[rank], []
        ok(own.cuda.cuCtxSetCurrent(own.context))
        for i in range(1, 21):
            own.launch("set", (ping, pong)[rank][rank], i)
            own.launch("wait", (pong, ping)[rank][rank], i)
            found.append(own.synchronise())
        return found

    other = beside(lambda: run(1))
    assert {*run(0), *other()} == {R.CUDA_SUCCESS}
    assert not machine.reports


def test_a_team_waits_for_another_process(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    """The wait may exceed the setting `emu_host_wait`, as the other process may still add its device."""
    machine.host_wait = 0.0
    prop = object_prop(2)
    prop.handleTypes = int(DESCRIPTOR)
    a, b = (rank.cuda for rank in pair)
    handle = ok(a.cuMulticastCreate(prop))
    theirs = imported(b, ok(a.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0)))
    ok(a.cuMulticastAddDevice(handle, 0))
    memory = ok(a.cuMemCreate(PIECE, memory_prop(0), 0))
    bound = beside(lambda: code(a.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0)))
    time.sleep(1.2)
    ok(b.cuMulticastAddDevice(theirs, 1))
    assert bound() == R.CUDA_SUCCESS and not machine.reports


# Time ----------------------------------------------------------------------------------------------------------------


def test_virtual_time_follows_wall_time_while_a_process_makes_no_call(
    machine: Machine, pair: tuple[Rank, Rank]
) -> None:
    a, _ = pair
    ok(a.cuda.cuCtxSetCurrent(a.context))
    flag, timed_out = a.word(), a.word()
    a.launch("bounded", flag, SECOND // 2, timed_out)
    begun, clock = time.monotonic(), machine.clock()
    assert a.synchronise() == R.CUDA_SUCCESS
    wall = time.monotonic() - begun
    assert a.read(timed_out) == 1
    assert 0.5 <= wall < 1.5
    assert SECOND // 2 <= machine.clock() - clock < 1.5 * SECOND


@pytest.mark.parametrize("how", ["waits too", "is dead", "never had a context"])
def test_virtual_time_jumps_when_every_process_waits(machine: Machine, how: str) -> None:
    a, done = Rank(machine, "a"), None
    if how == "never had a context":
        ok(machine.driver.cuInit(0))  # the machine's own process
    else:
        b = Rank(machine, "b", 1)
        flags = shared_word(a, b)
        if how == "is dead":
            b.process.close()
        else:
            ok(b.cuda.cuCtxSetCurrent(b.context))
            b.launch("wait", flags[1], 1)
            done = beside(b.synchronise)
            while not b.process.blocked:
                time.sleep(0.001)
    ok(a.cuda.cuCtxSetCurrent(a.context))
    timed_out = a.word()
    a.launch("bounded", flags[0] if how == "waits too" else a.word(), 3600 * SECOND, timed_out)
    if done is not None:
        a.launch("set", flags[0], 1)
    begun = time.monotonic()
    assert a.synchronise() == R.CUDA_SUCCESS
    assert time.monotonic() - begun < 5
    assert a.read(timed_out) == 1
    assert done is None or done() == R.CUDA_SUCCESS
    assert not machine.reports


def test_the_process_of_the_machine_counts_if_it_has_a_context(machine: Machine) -> None:
    a = Rank(machine, "a")
    timed_out = a.word()
    a.launch("bounded", a.word(), SECOND // 4, timed_out)
    ok(machine.driver.cuInit(0))
    primary(machine.driver)
    begun = time.monotonic()
    assert a.synchronise() == R.CUDA_SUCCESS
    assert 0.25 <= time.monotonic() - begun < 1.25


def test_queries_let_virtual_time_follow_wall_time(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    a, _ = pair
    ok(a.cuda.cuCtxSetCurrent(a.context))
    timed_out = a.word()
    a.launch("bounded", a.word(), SECOND // 4, timed_out)
    begun = time.monotonic()
    while code(a.cuda.cuStreamQuery(0)) == R.CUDA_ERROR_NOT_READY:
        assert time.monotonic() - begun < 5
    assert time.monotonic() - begun >= 0.25
    assert a.read(timed_out) == 1


# Deadlock ------------------------------------------------------------------------------------------------------------


def test_there_is_no_deadlock_while_a_process_may_still_call(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    machine.host_wait = 0.0
    a, b = pair
    mine, theirs = shared_word(a, b)
    a.launch("wait", mine, 1)
    waiting = beside(a.synchronise)
    time.sleep(1.3)  # a machine of one process would report a deadlock sooner
    ok(b.cuda.cuCtxSetCurrent(b.context))
    b.launch("set", theirs, 1)
    assert b.synchronise() == waiting() == R.CUDA_SUCCESS
    assert not machine.reports


def test_ranks_that_all_wait_are_a_deadlock(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    words = shared_word(*pair)

    def run(rank: int) -> Any:
        own = pair[rank]
        ok(own.cuda.cuCtxSetCurrent(own.context))
        own.launch("wait", words[rank], 1)
        return own.synchronise()

    first = beside(lambda: run(0))
    second = beside(lambda: run(1))
    assert first() == second() == R.CUDA_ERROR_LAUNCH_TIMEOUT
    (report,) = machine.reports
    assert report.kind == "deadlock"
    assert "device 0, wait of process a:" in report.message and "device 1, wait of process b:" in report.message
    assert report.process in ("a", "b") and f"kernel wait, process {report.process}" in str(report)


def test_a_deadlock_shows_writes_by_another_address(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    a, b = pair
    mine, theirs = shared_word(a, b)

    def of_b() -> Any:
        ok(b.cuda.cuCtxSetCurrent(b.context))
        b.launch("publish", theirs, 1)
        b.launch("acquire", theirs, 3)
        return b.synchronise()

    other = beside(of_b)
    ok(a.cuda.cuCtxSetCurrent(a.context))
    a.launch("acquire", mine, 2)
    assert a.synchronise() == other() == R.CUDA_ERROR_LAUNCH_TIMEOUT
    (report,) = machine.reports
    assert report.timeline is not None
    assert report.timeline.count("last written by device 1 block 0 thread 0") == 2


def test_the_exit_of_a_process_may_leave_a_deadlock(machine: Machine, pair: tuple[Rank, Rank]) -> None:
    a, b = pair
    mine, _ = shared_word(a, b)
    a.launch("wait", mine, 1)
    waiting = beside(a.synchronise)
    time.sleep(0.1)
    assert not machine.reports
    b.process.close()
    assert waiting() == R.CUDA_ERROR_LAUNCH_TIMEOUT
    assert [report.kind for report in machine.reports] == ["deadlock"]


# Races ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_a_race_between_processes_names_both_processes(ordered: bool) -> None:
    with Machine(devices=2, race=True) as machine:
        a, b = Rank(machine, "a"), Rank(machine, "b", 1)
        mine, theirs = shared_word(a, b)
        ok(a.cuda.cuMemsetD32(mine, 0, 2))
        ok(a.cuda.cuCtxSynchronize())
        ok(b.cuda.cuCtxSetCurrent(b.context))
        b.launch("message", theirs, 1, int(ordered))
        ok(a.cuda.cuCtxSetCurrent(a.context))
        a.launch("receive", mine, 1)
        assert a.synchronise() == R.CUDA_SUCCESS
        if ordered:
            assert not machine.reports
            return
        (report,) = machine.reports
        assert (report.kind, report.process, report.device) == ("race", "a", 0)
        assert report.other is not None and (report.other.process, report.other.device) == ("b", 1)
        assert "message of process b on device 1" in str(report) and "process a" in str(report)


# Host functions ------------------------------------------------------------------------------------------------------


def test_host_functions_run_in_their_own_process(pair: tuple[Rank, Rank]) -> None:
    a, b = pair
    calls: list[tuple[str, int, int]] = []
    inner: list[Any] = []
    a.process.call_host = lambda address, argument: calls.append(("a", address, argument))

    def of_b(address: int, argument: int) -> None:
        calls.append(("b", address, argument))
        inner.append((code(b.cuda.cuMemAlloc(64)), ok(a.cuda.cuDeviceGetCount())))

    b.process.call_host = of_b
    functions = [ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None) for _ in pair]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    for i, rank in enumerate(pair):
        ok(rank.cuda.cuCtxSetCurrent(rank.context))
        ok(rank.cuda.cuLaunchHostFunc(0, types.CUhostFn(addresses[i]), 7 + i))
        assert rank.synchronise() == R.CUDA_SUCCESS
    assert calls == [("a", addresses[0], 7), ("b", addresses[1], 8)]
    assert inner == [(R.CUDA_ERROR_NOT_PERMITTED, 2)]
