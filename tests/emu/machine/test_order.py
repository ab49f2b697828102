# SPDX-License-Identifier: Apache-2.0
"""The order of calls of a run can be recorded, and later runs repeat it."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emu.driver_helpers import R, code, function, ok, primary
from emu.machine.test_shared_memory import DESCRIPTOR, exportable, imported
from emu.multicast_helpers import PIECE, mapped

from drvfuse.emu import Machine
from drvfuse.emu.machine.process import order
from drvfuse.emu.machine.process.order import Diverged
from drvfuse.errors import ArgumentError

SOURCE = """
extern "C" __global__ void arrive(int* list, int rank) { list[1 + atomicAdd(list, 1)] = rank; }
extern "C" __global__ void meet(volatile int* list, int rank, int count) {
    list[1 + atomicAdd((int*)list, 1)] = rank;
    while (list[0] < count) {}
}
"""
RANKS, CALLS = 3, 6


class Ranks:
    """Processes whose kernels append to one list, in memory that all processes map."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.lists, self.kernels = machine, [], []
        self.drivers = [machine.process(f"rank{i}").driver for i in range(RANKS)]
        self.contexts = []
        for i, cuda in enumerate(self.drivers):
            ok(cuda.cuInit(0))
            self.contexts.append(primary(cuda, i))
            self.kernels.append([function(cuda, SOURCE, name) for name in ("arrive", "meet")])
        first = self.drivers[0]
        handle = ok(first.cuMemCreate(PIECE, exportable(0), 0))
        for i, cuda in enumerate(self.drivers):
            if i:
                descriptor = ok(first.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0))
                theirs = imported(cuda, descriptor)
            self.lists.append(mapped(cuda, theirs if i else handle, PIECE, RANKS))
        ok(first.cuCtxSetCurrent(self.contexts[0]))
        ok(first.cuMemsetD32(self.lists[0], 0, 1000))
        ok(first.cuCtxSynchronize())

    def arrive(self, rank: int) -> None:
        values, kinds = (self.lists[rank], rank), (ctypes.c_void_p, ctypes.c_int)
        ok(self.drivers[rank].cuLaunchKernel(self.kernels[rank][0], 1, 1, 1, 32, 1, 1, 0, 0, (values, kinds), 0))

    def meet(self, rank: int, count: int) -> None:
        values, kinds = (self.lists[rank], rank, count), (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        ok(self.drivers[rank].cuLaunchKernel(self.kernels[rank][1], 1, 1, 1, 1, 1, 1, 0, 0, (values, kinds), 0))

    def list(self) -> list[int]:
        out = np.zeros(1000, np.int32)
        ok(self.drivers[0].cuMemcpyDtoH(out, self.lists[0], out.nbytes))
        return [int(x) for x in out]


def work(ranks: Ranks, pauses: np.ndarray) -> None:
    """Run each rank in a thread of its own, with pauses between its calls."""
    results: list[Any] = []

    def run(rank: int) -> None:
        cuda = ranks.drivers[rank]
        ok(cuda.cuCtxSetCurrent(ranks.contexts[rank]))
        for i in range(CALLS):
            time.sleep(pauses[rank, i])
            ranks.arrive(rank)
            if i % 2:
                results.append(code(cuda.cuCtxSynchronize()))
        ranks.meet(rank, RANKS * (32 * CALLS + 1))
        results.append(code(cuda.cuCtxSynchronize()))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {R.CUDA_SUCCESS}


def outcome(seed: int, pauses: np.ndarray, **order: Path) -> tuple[list[int], int, list[str]]:
    with Machine(devices=RANKS, seed=seed, **order) as machine:  # type: ignore[arg-type]
        ranks = Ranks(machine)
        work(ranks, pauses)
        return ranks.list(), machine.clock(), [record.kernel for record in machine.launches]


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_a_replay_is_the_recorded_run(tmp_path: Path, rng: np.random.Generator, seed: int) -> None:
    """A replay makes the calls in the recorded order, even if its threads pause for longer or shorter times."""
    recorded = outcome(seed, rng.uniform(0, 0.01, (RANKS, CALLS)), record=tmp_path / "record")
    for _ in range(2):
        assert outcome(seed, rng.uniform(0, 0.01, (RANKS, CALLS)), replay=tmp_path / "record") == recorded


def test_a_replay_ends_a_spin_at_the_recorded_time(tmp_path: Path) -> None:
    """While the kernel spins, virtual time advances with wall time, and the record has these advances."""
    source = """
    extern "C" __global__ void bounded(unsigned long long* ended) {
        unsigned long long begin, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
        for (unsigned polls = 1; *(volatile int*)(ended + 1) == 0; polls++) {
            if (polls % 1024) continue;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
            if (now - begin > 100000000) break;
        }
        *ended = now;
    }"""

    def run(**order: Path) -> tuple[int, int]:
        with Machine(devices=1, **order) as machine:  # type: ignore[arg-type]
            cuda = machine.process("a").driver
            machine.process("idle")
            ok(cuda.cuInit(0))
            primary(cuda)
            ended = ok(cuda.cuMemAlloc(16))
            ok(cuda.cuMemsetD8(ended, 0, 16))
            kernel = function(cuda, source, "bounded")
            ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(ended),), (ctypes.c_void_p,)), 0))
            ok(cuda.cuCtxSynchronize())
            out = np.zeros(1, np.uint64)
            ok(cuda.cuMemcpyDtoH(out, ended, 8))
            return int(out[0]), machine.clock()

    assert run(record=tmp_path / "record") == run(replay=tmp_path / "record")
    assert "\ttime\t" in (tmp_path / "record").read_text()


def test_one_process_can_be_recorded_too(tmp_path: Path) -> None:
    def run(**order: Path) -> int:
        with Machine(devices=1, seed=3, **order) as machine:  # type: ignore[arg-type]
            ok(machine.driver.cuInit(0))
            primary(machine.driver)
            ok(machine.driver.cuMemAlloc(64))
            return machine.held()["device_bytes"]

    assert run(record=tmp_path / "record") == run(replay=tmp_path / "record") == 64
    lines = (tmp_path / "record").read_text().splitlines()
    assert lines[1] == "0\tcall\t0\t0\tcuInit" and lines[-1] == "0\tend"


def test_a_call_that_differs_from_the_record_is_an_error_on_every_thread(tmp_path: Path) -> None:
    def run(machine: Machine, size: str) -> None:
        ok(machine.driver.cuInit(0))
        primary(machine.driver)
        getattr(machine.driver, size)(64)

    with Machine(devices=1, record=tmp_path / "record") as machine:
        run(machine, "cuMemAlloc")
    with Machine(devices=1, replay=tmp_path / "record") as machine:
        text = "thread 0 of process 0 calls cuMemAlloc .line 5.* comes next; thread 0 of process 0 calls cuMemAllocHost"
        with pytest.raises(Diverged, match=text):
            run(machine, "cuMemAllocHost")
        with pytest.raises(Diverged):
            machine.driver.cuMemAlloc(64)


def test_a_recorded_call_that_no_thread_makes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PATIENCE_S", 0.1)
    with Machine(devices=1, record=tmp_path / "record") as machine:
        for name in ("a", "b"):
            ok(machine.process(name).driver.cuInit(0))
    with Machine(devices=1, replay=tmp_path / "record") as machine:
        machine.process("a")
        with pytest.raises(Diverged, match="thread 0 of process a calls cuInit .*this event has not come"):
            machine.process("b")


def test_calls_after_the_end_of_the_record_run_in_any_order(tmp_path: Path) -> None:
    with Machine(devices=1, record=tmp_path / "record") as machine:
        ok(machine.driver.cuInit(0))
    with Machine(devices=1, replay=tmp_path / "record") as machine:
        ok(machine.driver.cuInit(0))
        primary(machine.driver)
        ok(machine.driver.cuMemAlloc(64))


def test_other_options_than_the_recorded_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "record"
    Machine(devices=2, seed=5, record=path).close()
    with pytest.raises(ArgumentError, match="seed=5"):
        Machine(devices=2, seed=6, replay=path)
    with pytest.raises(ArgumentError, match="None"):
        Machine(devices=2, seed=5, record=path, replay=path)
    with pytest.raises(ArgumentError, match="a record of a machine"):
        Machine(devices=2, replay=tmp_path / "nothing")
    (tmp_path / "other").write_text("hello")
    with pytest.raises(ArgumentError, match="a record of a machine"):
        Machine(devices=2, replay=tmp_path / "other")
    with pytest.raises(ArgumentError, match="can be written"):
        Machine(devices=2, record=tmp_path / "no" / "folder")
