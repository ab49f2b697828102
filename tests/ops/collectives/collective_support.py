# SPDX-License-Identifier: Apache-2.0
"""Helpers of the collectives' tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config, dtypes, reference
from drvfuse.comm import workspace
from drvfuse.errors import BarrierTimeout
from drvfuse.ops.collectives.shared.kernel import ALGOS, PULL, PUSH

__all__ = ["ALGOS", "ALL_ALGOS", "LEAST", "PULL", "PUSH"]
ALL_ALGOS = (*ALGOS, "naive")
ON_GPUS = os.environ.get("DRVFUSE_TEST_DRIVER") == "cuda"
LEAST = {algo: 8192 if algo == "push_two_shot" else 4096 for algo in ALL_ALGOS}
"""By algorithm, the least workspace_bytes of 3 ranks for any number of elements, or for rows of 264 columns. The slots
of push_two_shot hold a unit of every rank."""


def ranks(*numbers: int) -> list[Any]:
    """Parameters for numbers of ranks, each skipped where fewer devices are present."""
    return [pytest.param(n, marks=pytest.mark.gpus(n)) for n in numbers]


def every_number_of_ranks(forms: Sequence[Any], least: int = 1) -> list[Any]:
    """Parameters (number of ranks, entry of `forms`). On the emulated driver an entry is tested with only one of the
    numbers 5, 6 and 7, as every number of ranks needs a kernel of its own, which takes long to compile.
    """
    return [
        pytest.param(n, form, marks=pytest.mark.gpus(n))
        for n in range(least, 9)
        for number, form in enumerate(forms)
        if ON_GPUS or n not in (5, 6, 7) or number % 3 == n - 5
    ]


def random_inputs(rng: np.random.Generator, n: int, shape: int | Sequence[int], dtype: str) -> list[np.ndarray]:
    """One array per rank, signed, of several magnitudes, so that the order of additions matters."""
    element = dtypes.get(dtype).numpy
    values = []
    for _ in range(n):
        magnitude = np.exp2(rng.integers(-4, 5, size=shape)).astype(np.float32)
        values.append((rng.standard_normal(shape).astype(np.float32) * magnitude).astype(element))
    return values


def place(group: df.Group, hosts: Sequence[np.ndarray]) -> list[df.Array]:
    """The arrays on their ranks' devices."""
    return [rank.array(host) for rank, host in zip(group, hosts, strict=True)]


def codes_per_row(dtype: str, codes: str, scales: str = "float32") -> df.Quantisation:
    """The quantisation per row of inputs of `dtype` to `codes`, or none if that is the inputs' dtype."""
    return df.Quantisation.none() if codes == dtype else df.Quantisation.per_row(codes, scales)


def replicate(group: df.Group, host: np.ndarray) -> list[df.Array]:
    """A copy of one array on every rank."""
    return [rank.array(host) for rank in group]


def garbage(group: df.Group, shape: int | Sequence[int], dtype: str) -> list[df.Array]:
    """Arrays filled with a pattern that no test expects, to be overwritten as outputs."""
    arrays = [rank.empty(shape, dtype) for rank in group]
    for array in arrays:
        if array.nbytes:
            pattern = np.full(array.nbytes, 0xA5, np.uint8).view(array.dtype.numpy).reshape(array.shape)
            array.copy_from(pattern)
    return arrays


def assert_bits(arrays: Sequence[Any], expected: np.ndarray, what: str = "") -> None:
    """Check that every array equals `expected` bit for bit."""
    for position, array in enumerate(arrays):
        actual = array.numpy()
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, f"{what} rank {position}"
        wrong = np.flatnonzero(reference.bits(actual).reshape(-1) != reference.bits(expected).reshape(-1))
        if wrong.size:
            at = int(wrong[0])
            raise AssertionError(
                f"{what} rank {position}: {wrong.size} of {expected.size} elements differ, first at {at}: "
                f"{actual.reshape(-1)[at]!r} is not {expected.reshape(-1)[at]!r}"
            )


def private_array(device: Any, host: np.ndarray) -> tuple[df.Array, Any]:
    """An array that only its own device can access, and the memory that must be kept for it."""
    memory = df.SymmetricBuffer([device], max(host.nbytes, 1))
    array = df.view(memory.ptrs[0], host.shape, dtypes.get(host.dtype), device, owner=memory)
    array.copy_from(host)
    return array, memory


HELPERS = r"""
__device__ void wait_ns(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

// Lets its dependents start at once, waits, then writes.
extern "C" __global__ void produce(unsigned short* x, int count, unsigned short value, unsigned long long ns) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    wait_ns(ns);
    for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = value;
}

// Waits for the preceding kernel, then copies.
extern "C" __global__ void consume(const unsigned short* from, unsigned short* to, int count) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


def _helpers(driver: Any) -> df.Module:
    return df.compile(HELPERS, driver=driver)


def helper(group: df.Group, name: str) -> Any:
    """A kernel of HELPERS, loaded on all devices of the group, so that no launch of a rank loads it."""
    module = group.driver.part(_helpers)
    for rank in group:
        module[name].load(rank.device)
    return module[name]


def fill_late(group: df.Group, array: df.Array, value: int, ns: int = 200_000) -> Any:
    """A launch that fills a 16-bit array with the bit pattern `value` after `ns`."""
    return helper(group, "produce").prepare(1, 32, array, array.size, value, ns)


def launch_without(group: df.Group, missing: int, call: df.Prepared[Any]) -> BarrierTimeout:
    """Launch the call on every rank but `missing` and reset the group. Returns the error, which names that rank."""
    for rank in set(range(group.size)) - {missing}:
        call.launch(rank=rank)
    with pytest.raises(BarrierTimeout, match=f"{call.op} {call.algo} of {group.size} x") as caught:
        group.synchronize()
    assert caught.value.peer == missing and caught.value.rank != missing
    group.reset()
    return caught.value


def short_spins(driver: str) -> Any:
    """Return a context manager. Calls that are prepared in its `with` block have a short time-out, which is even
    shorter on the emulated driver, where time is virtual.
    """
    return config.override(spin_timeout=0.05 if driver == "cuda" else 0.005)


def epochs(group: df.Group) -> list[int]:
    """The epoch of every rank, in multiples of EPOCH_UNIT. Each warp adds a part of EPOCH_UNIT, and after a call these
    parts sum to a multiple of it.
    """
    group.synchronize()
    words = [
        int(df.view(pointer + workspace.EPOCH_OFFSET, 1, "uint64", rank.device).numpy()[0])
        for pointer, rank in zip(group.workspace.pointers, group, strict=True)
    ]
    assert all(word % workspace.EPOCH_UNIT == 0 for word in words)
    return [word // workspace.EPOCH_UNIT for word in words]


def slots_are_empty(group: df.Group) -> None:
    """Check that every word of the slots that calls may use is empty, as it must be between calls."""
    group.synchronize()
    for pointer, rank in zip(group.workspace.pointers, group, strict=True):
        for half in range(2):
            at = pointer + group.workspace.slots_offset + half * group.workspace.half_bytes
            words = df.view(at, group.workspace._filled // 4, "uint32", rank.device).numpy()
            assert np.array_equal(words, np.full_like(words, 0xFFFFFFFF))


TENSORS = [(5,), (3, 7), (0, 4), (), (16, 8), (1,), (2, 3, 41), (257,)]
"""Shapes of the tensors of a call of `allreduce_many`."""


def hosts_of(rng, n, shapes, dtype="bfloat16"):
    return [random_inputs(rng, n, shape, dtype) for shape in shapes]


def placed(group, hosts):
    """For each rank a list with an array per tensor. `hosts` has, for each tensor, the values of all ranks."""
    return [list(of_rank) for of_rank in zip(*(place(group, of_tensor) for of_tensor in hosts), strict=True)]
