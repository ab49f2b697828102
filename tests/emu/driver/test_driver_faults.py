# SPDX-License-Identifier: Apache-2.0
"""Faults of kernels on the emulated driver: the error of the context, and the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, function, ok, primary
from launch_helpers import FAULTS, device_array, host_array, launch, zeros

from drvfuse import config
from drvfuse.emu import Machine


@pytest.mark.parametrize(
    ("name", "args", "expected", "kind"),
    [
        ("beyond", (16,), "ILLEGAL_ADDRESS", "out_of_bounds"),
        ("beyond", (-1,), "ILLEGAL_ADDRESS", "out_of_bounds"),
        ("odd", (), "MISALIGNED_ADDRESS", "misaligned"),
        ("trapped", (), "LAUNCH_FAILED", "trap"),
    ],
)
def test_a_fault_leaves_its_context_in_error(
    machine: Machine, cuda: Any, name: str, args: tuple[int, ...], expected: str, kind: str
) -> None:
    primary(cuda, 0)
    f = function(cuda, FAULTS, name)
    pointer = zeros(cuda, 16)
    stream = ok(cuda.cuStreamCreate(1))
    error = getattr(R, f"CUDA_ERROR_{expected}")
    ok(launch(cuda, f, 1, 1, (pointer, *args), stream))
    assert machine.reports == []
    assert code(cuda.cuStreamSynchronize(stream)) == error
    (report,) = machine.reports
    assert (report.kind, report.kernel, report.device, report.block, report.thread) == (
        kind,
        name,
        0,
        (0, 0, 0),
        (0, 0, 0),
    )
    line = next(i for i, text in enumerate(FAULTS.split("\n"), 1) if f" {name}(" in text)
    assert report.line == line
    assert "test.cu" in str(report)
    for call in (cuda.cuCtxSynchronize(), cuda.cuMemAlloc(16), cuda.cuStreamQuery(stream)):
        assert code(call) == error
    assert code(launch(cuda, f, 1, 1, (pointer, *args), stream)) == error
    primary(cuda, 1)
    ok(cuda.cuMemAlloc(16))
    ok(cuda.cuDevicePrimaryCtxReset(0))
    primary(cuda, 0)
    ok(cuda.cuMemAlloc(16))


def test_a_read_of_uninitialised_memory_is_found(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f = function(cuda, FAULTS, "reads")
    out = zeros(cuda, 1)
    ok(launch(cuda, f, 1, 1, (ok(cuda.cuMemAlloc(4)), out)))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "uninitialised"


def test_unwritten_memory_is_zero_where_it_is_not_checked() -> None:
    with Machine(devices=1, check_initialised=False) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f, out = function(cuda, FAULTS, "reads"), device_array(cuda, np.full(1, 9, np.uint32))
        ok(launch(cuda, f, 1, 1, (ok(cuda.cuMemAlloc(4)), out)))
        assert host_array(cuda, out, np.zeros(1, np.uint32))[0] == 0
        assert machine.reports == []


def test_access_to_peer_memory_must_be_enabled(machine: Machine, cuda: Any) -> None:
    peer = primary(cuda, 1)
    pointer = device_array(cuda, np.array([42], np.uint32))
    primary(cuda, 0)
    f, out = function(cuda, FAULTS, "reads"), zeros(cuda, 1)
    ok(cuda.cuCtxEnablePeerAccess(peer, 0))
    ok(launch(cuda, f, 1, 1, (pointer, out)))
    assert host_array(cuda, out, np.zeros(1, np.uint32))[0] == 42
    ok(cuda.cuCtxDisablePeerAccess(peer))
    ok(launch(cuda, f, 1, 1, (pointer, out)))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "no_access"
    primary(cuda, 1)
    ok(cuda.cuCtxSynchronize())


def test_a_use_of_freed_memory_is_found(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f, out, stream = function(cuda, FAULTS, "reads"), zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
    pointer = ok(cuda.cuMemAllocAsync(4, stream))
    ok(cuda.cuMemsetD32Async(pointer, 5, 1, stream))
    ok(launch(cuda, f, 1, 1, (pointer, out), stream))
    ok(cuda.cuMemFreeAsync(pointer, stream))
    ok(cuda.cuStreamSynchronize(stream))
    ok(launch(cuda, f, 1, 1, (pointer, out), stream))
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "use_after_free"


def test_freeing_waits_for_the_work_that_uses_it(cuda: Any) -> None:
    primary(cuda)
    f, out, stream = function(cuda, FAULTS, "reads"), zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
    pointer = device_array(cuda, np.array([9], np.uint32))
    ok(launch(cuda, f, 1, 1, (pointer, out), stream))
    ok(cuda.cuMemFree(pointer))
    assert host_array(cuda, out, np.zeros(1, np.uint32))[0] == 9


LOCAL = """
extern "C" __global__ void local(unsigned* out, int i) {
  volatile unsigned mine[1 << 14];
  mine[i] = 1; out[threadIdx.x] = mine[i];
}
"""


def test_a_window_too_small_for_local_memory_ends_the_launch() -> None:
    with config.override(emu_window_gib=1), Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f, out = function(cuda, LOCAL, "local"), zeros(cuda, 256)
        ok(launch(cuda, f, 1, 256, (out, 5)))
        ok(cuda.cuCtxSynchronize())
        ok(launch(cuda, f, 1000, 256, (out, 5)))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        assert machine.reports[-1].kind == "memory"
