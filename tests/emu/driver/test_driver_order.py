# SPDX-License-Identifier: Apache-2.0
"""Which launches run at once and in which order on the emulated driver: residency, streams, priorities, seeds."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, function, ok, primary
from launch_helpers import (
    FAULTS,
    ORDER,
    SPIN,
    attribute,
    device_array,
    host_array,
    launch,
    launch_config,
    log_entries,
    zeros,
)

from drvfuse.emu import Machine


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_blocks_that_do_not_fit_cannot_wait_for_each_other(seed: int) -> None:
    with Machine(devices=1, seed=seed, sm_count=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f = function(cuda, SPIN, "all_arrive")
        fits = 2 * ok(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 1024, 0))
        count = zeros(cuda, 2)
        params = ((count, fits), (None, ctypes.c_int))
        ok(cuda.cuMemsetD32(int(count) + 4, 0, 1))
        assert fits == 4
        ok(cuda.cuLaunchCooperativeKernel(f, fits, 1, 1, 1024, 1, 1, 0, 0, ((count, fits * 1024), params[1])))
        ok(cuda.cuCtxSynchronize())
        more = ((int(count) + 4, (fits + 1) * 1024), (ctypes.c_void_p, ctypes.c_int))
        refused = cuda.cuLaunchCooperativeKernel(f, fits + 1, 1, 1, 1024, 1, 1, 0, 0, more)
        assert code(refused) == R.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        ok(cuda.cuLaunchKernel(f, fits + 1, 1, 1, 1024, 1, 1, 0, 0, more, 0))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT


def test_a_cooperative_launch_starts_when_all_of_its_blocks_have_room() -> None:
    """A cooperative launch waits while another kernel, `late`, leaves room for half of the cooperative kernel's blocks.
    If it started with half of them, the log would begin with entries of the cooperative kernel."""
    with Machine(devices=1, sm_count=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        note, late = function(cuda, ORDER, "note"), function(cuda, ORDER, "late")
        log, streams = zeros(cuda, 8192), [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
        ok(cuda.cuCtxSynchronize())
        ok(launch(cuda, late, 2, 1024, (log, 1), streams[0]))
        params = ((log, 2), (None, ctypes.c_int))
        ok(cuda.cuLaunchCooperativeKernel(note, 4, 1, 1, 1024, 1, 1, 0, streams[1], params))
        ok(cuda.cuCtxSynchronize())
        entries = host_array(cuda, log, np.zeros(8192, np.uint32))
        assert entries[0] == 6 * 1024
        values = entries[1 : 1 + 6 * 1024]
        assert (values[: np.flatnonzero(values == 2)[0]] == 1).sum() >= 1024


def test_concurrent_kernels_share_the_multiprocessors() -> None:
    """Two grids of which only one fits on the device at a time cannot wait for each other; if both fit, they can."""
    for sm_count, expected in ((2, R.CUDA_ERROR_LAUNCH_TIMEOUT), (4, R.CUDA_SUCCESS)):
        with Machine(devices=1, sm_count=sm_count) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            f, count = function(cuda, SPIN, "all_arrive"), zeros(cuda, 1)
            streams = [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
            for stream in streams:
                ok(launch(cuda, f, 4, 1024, (count, 8 * 1024), stream))
            assert code(cuda.cuCtxSynchronize()) == expected
            assert (expected == R.CUDA_SUCCESS) or "room for a block" in machine.reports[-1].message


@pytest.mark.parametrize("legacy_first", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_blocking_streams_and_the_legacy_stream_wait_for_each_other(
    cuda: Any, legacy_first: bool, blocking: bool
) -> None:
    primary(cuda)
    note, late = function(cuda, ORDER, "note"), function(cuda, ORDER, "late")
    log, stream = zeros(cuda, 16), ok(cuda.cuStreamCreate(0 if blocking else 1))
    ok(cuda.cuCtxSynchronize())
    order = (0, stream) if legacy_first else (stream, 0)
    ok(launch(cuda, late, 1, 1, (log, 1), order[0]))
    ok(launch(cuda, note, 1, 1, (log, 2), order[1]))
    ok(cuda.cuCtxSynchronize())
    assert log_entries(cuda, log) == ([1, 2] if blocking else [2, 1])


def test_a_launch_of_higher_priority_starts_first(cuda: Any) -> None:
    primary(cuda)
    note, log = function(cuda, ORDER, "note"), zeros(cuda, 16)
    ok(cuda.cuCtxSynchronize())
    for value, priority in ((1, 0), (2, -1), (3, -5)):
        stream = ok(cuda.cuStreamCreate(1))
        config = launch_config(1, 1, stream, attribute("PRIORITY", priority=priority))
        ok(cuda.cuLaunchKernelEx(config, note, ((log, value), (None, ctypes.c_int)), 0))
    ok(cuda.cuCtxSynchronize())
    assert log_entries(cuda, log) == [3, 2, 1]


def test_disabling_peer_access_waits_for_the_work_that_uses_it(cuda: Any) -> None:
    peer = primary(cuda, 1)
    pointer = device_array(cuda, np.array([42], np.uint32))
    primary(cuda, 0)
    f, out, stream = function(cuda, FAULTS, "reads"), zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
    ok(cuda.cuCtxEnablePeerAccess(peer, 0))
    ok(launch(cuda, f, 1, 1, (pointer, out), stream))
    ok(cuda.cuCtxDisablePeerAccess(peer))
    assert host_array(cuda, out, np.zeros(1, np.uint32))[0] == 42


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    def run() -> list[int]:
        with Machine(devices=1, seed=seed) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            note, log = function(cuda, ORDER, "note"), zeros(cuda, 64)
            for value in (30, 31):
                stream = ok(cuda.cuStreamCreate(1))
                ok(launch(cuda, note, 12, 1, (log, value), stream))
            ok(cuda.cuCtxSynchronize())
            return list(host_array(cuda, log, np.zeros(64, np.uint32)))

    assert run() == run()
