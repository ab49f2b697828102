# SPDX-License-Identifier: Apache-2.0
"""Seeds explore the orders in which work of different streams may start; stream and event order always holds."""

from __future__ import annotations

import ctypes

import numpy as np
from driver_helpers import function, ok, primary

from drvfuse.emu import Machine

SOURCE = """
extern "C" __global__ void note(unsigned* log, int value) { log[1 + atomicAdd(log, 1u)] = value; }
extern "C" __global__ void set(unsigned* word) { *word = 5; }
"""
STREAMS, EACH = 3, 3


def _log(seed: int, chained: bool = False) -> tuple[int, ...]:
    """The launches in the order in which they ran, each as two digits: the index of the stream, and the index of the
    launch on it. With `chained`, each stream waits for an event at the end of the previous stream.
    """
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        note = function(cuda, SOURCE, "note")
        log = ok(cuda.cuMemAlloc(256))
        ok(cuda.cuMemsetD32(log, 0, 64))
        ok(cuda.cuCtxSynchronize())
        before = None
        for s in range(STREAMS):
            stream = ok(cuda.cuStreamCreate(1))
            if chained and before is not None:
                ok(cuda.cuStreamWaitEvent(stream, before, 0))
            for i in range(EACH):
                args = ((log, 10 * s + i), (None, ctypes.c_int))
                ok(cuda.cuLaunchKernel(note, 1, 1, 1, 1, 1, 1, 0, stream, args, 0))
            before = ok(cuda.cuEventCreate(0))
            ok(cuda.cuEventRecord(before, stream))
        ok(cuda.cuCtxSynchronize())
        out = np.zeros(64, np.uint32)
        ok(cuda.cuMemcpyDtoH(out, log, out.nbytes))
        return tuple(int(x) for x in out[1 : 1 + out[0]])


def test_seeds_start_independent_streams_in_different_orders() -> None:
    logs = {seed: _log(seed) for seed in range(12)}
    for log in logs.values():
        for s in range(STREAMS):
            assert [x for x in log if x // 10 == s] == [10 * s + i for i in range(EACH)]
    assert len({tuple(x // 10 for x in log) for log in logs.values()}) >= 6
    assert {log[0] // 10 for log in logs.values()} == set(range(STREAMS))
    assert all(_log(seed) == logs[seed] for seed in range(4))


def test_events_order_streams_under_every_seed() -> None:
    expected = tuple(10 * s + i for s in range(STREAMS) for i in range(EACH))
    assert {_log(seed, chained=True) for seed in range(8)} == {expected}


def test_an_unordered_copy_may_run_before_or_after_a_kernel() -> None:
    found = set()
    for seed in range(12):
        with Machine(devices=1, seed=seed) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            kernel = function(cuda, SOURCE, "set")
            word, copy = (ok(cuda.cuMemAlloc(4)) for _ in range(2))
            ok(cuda.cuMemsetD32(word, 1, 1))
            ok(cuda.cuCtxSynchronize())
            first, second = (ok(cuda.cuStreamCreate(1)) for _ in range(2))
            ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, first, ((word,), (None,)), 0))
            ok(cuda.cuMemcpyDtoDAsync(copy, word, 4, second))
            ok(cuda.cuCtxSynchronize())
            out = np.zeros(1, np.uint32)
            ok(cuda.cuMemcpyDtoH(out, copy, 4))
            found.add(int(out[0]))
    assert found == {1, 5}
