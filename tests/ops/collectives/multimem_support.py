# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of multimem: where inputs and outputs lie, and values whose sums are exact in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from collective_support import garbage, place

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.trace import decode, layout

PLACES = ("staged", "direct", "to_outputs")
"""Inputs in other memory; inputs in multicast memory; inputs and outputs in multicast memory."""


class Arrays:
    """Inputs that hold `hosts`, and outputs that hold garbage, in one of the placements PLACES.

    Arrays in multicast memory begin at `offset`, and garbage follows the inputs.
    """

    def __init__(self, group: df.Group, hosts: Sequence[np.ndarray], where: str, offset: int = 4096) -> None:
        shape, dtype = hosts[0].shape, dtypes.get(hosts[0].dtype).name
        self._buffers = []
        if where == "staged":
            self.inputs = place(group, hosts)
        else:
            self.inputs = self._multicast(group, shape, dtype, offset)
            for array, host in zip(self.inputs, hosts, strict=True):
                array.copy_from(host)
        self.outputs = garbage(group, shape, dtype)
        if where == "to_outputs":
            self.outputs = self._multicast(group, shape, dtype, offset)

    def _multicast(self, group: df.Group, shape: Any, dtype: str, offset: int) -> list[df.Array]:
        nbytes = int(np.prod(shape)) * dtypes.get(dtype).itemsize
        buffer = group.symmetric(offset + nbytes + 64, multicast=True)
        self._buffers.append(buffer)
        for rank, whole in zip(group, buffer.arrays(offset + nbytes + 64, "uint8"), strict=True):
            whole.copy_from(np.random.default_rng(rank.index).integers(0, 256, whole.shape, np.uint8))
        return buffer.arrays(shape, dtype, offset)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()


def exact_inputs(rng: np.random.Generator, n: int, shape: int | Sequence[int], dtype: str) -> list[np.ndarray]:
    """One array per rank of multiples of 1/64 below 8 in magnitude: all their sums are exact in float32."""
    element = dtypes.get(dtype).numpy
    return [(np.round(rng.uniform(-8, 8, shape) * 64) / 64).astype(np.float32).astype(element) for _ in range(n)]


def cancelling_inputs(rng: np.random.Generator, n: int, shape: int | Sequence[int], dtype: str) -> list[np.ndarray]:
    """One array per rank, of magnitudes from 2**-8 to 2**8. Half of the values of odd ranks nearly cancel those of the
    preceding rank.
    """
    element = dtypes.get(dtype).numpy
    hosts = []
    for _ in range(n):
        magnitude = np.exp2(rng.integers(-8, 9, size=shape)).astype(np.float32)
        hosts.append((rng.standard_normal(shape).astype(np.float32) * magnitude).astype(element))
    for first, second in zip(hosts[::2], hosts[1::2], strict=False):
        cancel = rng.random(shape) < 0.5
        second[cancel] = (-first[cancel].astype(np.float32) * np.float32(1 + 2.0**-7)).astype(element)
    return hosts


def assert_within_bounds(arrays: Sequence[df.Array], hosts: Sequence[np.ndarray]) -> None:
    """Check that every array holds sums within the bounds for any order of fp32 additions."""
    low, high = (bound.astype(np.float32) for bound in reference.sum_bounds(hosts))
    for rank, array in enumerate(arrays):
        values = array.numpy().astype(np.float32)
        wrong = np.flatnonzero(~((low <= values) & (values <= high)))
        assert not wrong.size, f"rank {rank}: {wrong.size} of {values.size} sums are too far off, first at {wrong[0]}"


def assert_equal_on_ranks(arrays: Sequence[df.Array]) -> None:
    first = reference.bits(arrays[0].numpy())
    for array in arrays[1:]:
        assert (reference.bits(array.numpy()) == first).all()


def assert_room(trace: df.Trace) -> None:
    """Check that every block has recorded phases, and that the trace has room for the most phases of a block, but for
    no more than about twice as many.
    """
    for section in trace._sections:
        table = decode._words(section, section.array.numpy())
        counts = 1 + (table[:, layout.HEADER_WORDS + section.rounds * section.peers :] != 0).sum(axis=1)
        assert counts.min() > 1
        assert counts.max() <= section.phases <= 2 * counts.max() + 8
