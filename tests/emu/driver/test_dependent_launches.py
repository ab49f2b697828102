# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launches on the emulated driver."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, function, ok, primary
from launch_helpers import ORDER, attribute, host_array, launch, launch_config, log_entries, zeros

from drvfuse.emu import Machine

CHAIN = """
__device__ void append(unsigned* log, unsigned value) { log[1 + atomicAdd(log, 1u)] = value; }
extern "C" __global__ void first(unsigned* log, unsigned* gate) {
  append(log, 10);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned v;
  if (gate) do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(gate) : "memory"); } while (!v);
  append(log, 11);
}
extern "C" __global__ void second(unsigned* log, unsigned* gate) {
  append(log, 20);
  if (gate) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(gate) : "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  append(log, 21);
}
extern "C" __global__ void third(unsigned* log) { append(log, 30); }
"""


def _chain(seed: int, gated: bool) -> tuple[Any, list[int]]:
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        first, second, third = (function(cuda, CHAIN, name) for name in ("first", "second", "third"))
        log, gate, stream = zeros(cuda, 16), zeros(cuda, 1), ok(cuda.cuStreamCreate(1))
        pointer = gate if gated else types.CUdeviceptr(0)
        serial = attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)
        params = ((log, pointer), (None, None))
        ok(cuda.cuLaunchKernel(first, 1, 1, 1, 1, 1, 1, 0, stream, params, 0))
        ok(cuda.cuLaunchKernelEx(launch_config(1, 1, stream, serial), second, params, 0))
        ok(cuda.cuLaunchKernel(third, 1, 1, 1, 1, 1, 1, 0, stream, ((log,), (None,)), 0))
        result = code(cuda.cuStreamSynchronize(stream))
        entries = host_array(cuda, log, np.zeros(16, np.uint32)) if result == R.CUDA_SUCCESS else np.zeros(1, np.uint32)
        return result, list(entries[1 : 1 + entries[0]])


@pytest.mark.parametrize("seed", range(6))
def test_a_dependent_launch_waits_for_the_whole_primary(seed: int) -> None:
    result, log = _chain(seed, gated=False)
    assert result == R.CUDA_SUCCESS
    assert log.index(11) < log.index(21) < log.index(30)
    assert log.index(10) < log.index(20)


def test_odd_seeds_start_dependents_early_and_even_ones_late() -> None:
    """If `gated`, the primary waits for a flag that its dependent stores, so it ends only if the dependent starts
    early. No program may do so, as nothing guarantees that the two overlap."""
    assert _chain(1, gated=True) == (R.CUDA_SUCCESS, [10, 20, 11, 21, 30])
    assert _chain(0, gated=True)[0] == R.CUDA_ERROR_LAUNCH_TIMEOUT


@pytest.mark.parametrize("seed", range(4))
def test_work_after_a_dependent_launch_waits_for_the_primary_too(seed: int) -> None:
    """The dependent launch has no griddepcontrol.wait, and ends long before its primary. The launch after it must wait
    for both."""
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        source = CHAIN + ORDER.replace("{\n  for", '{\n  asm volatile("griddepcontrol.launch_dependents;");\n  for')
        late, third, note = (function(cuda, source, name) for name in ("late", "third", "note"))
        log, stream = zeros(cuda, 16), ok(cuda.cuStreamCreate(1))
        ok(cuda.cuCtxSynchronize())
        serial = attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)
        ok(launch(cuda, late, 1, 1, (log, 1), stream))
        ok(cuda.cuLaunchKernelEx(launch_config(1, 1, stream, serial), third, ((log,), (None,)), 0))
        ok(launch(cuda, note, 1, 1, (log, 2), stream))
        ok(cuda.cuCtxSynchronize())
        assert log_entries(cuda, log) == ([30, 1, 2] if seed % 2 else [1, 30, 2])


def test_a_launch_without_the_attribute_never_overlaps() -> None:
    with Machine(devices=1, seed=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        first, second = (function(cuda, CHAIN, name) for name in ("first", "second"))
        log = zeros(cuda, 16)
        params = ((log, 0), (None, ctypes.c_void_p))
        for f in (first, second):
            ok(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, params, 0))
        assert list(host_array(cuda, log, np.zeros(16, np.uint32))[:5]) == [4, 10, 11, 20, 21]
