# SPDX-License-Identifier: Apache-2.0
"""Floors, which no collective can beat: the time of a launch, and the time in which bytes cross the links."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..comm.group import Group
from ..ops.call.specialisation import CU
from ..runtime.module import compile
from .timing import Timing, copy_launch, microseconds_per_call, together

_EMPTY = """
#include "sync/pdl.cuh"
extern "C" __global__ void empty() {
    launch_dependents();
    wait_for_producer();
}
"""
_THREADS = 128
_COPY_BYTES = 16 * 512  # bytes that a block copies with one vector per thread


def launch_us(group: Group, pdl: bool, calls: int) -> Timing:
    """The time of an empty kernel of one block on every rank."""
    kernel = compile(_EMPTY, driver=group.driver, include=[CU])["empty"]
    launches = [kernel.prepare(1, _THREADS, device=rank.device, pdl=pdl) for rank in group]
    every = [partial(launch, rank.stream) for launch, rank in zip(launches, group, strict=True)]
    return microseconds_per_call(group, [together(every)], calls)


def least_wire_bytes(op: str, residual: bool, ranks: int, nbytes: int) -> int:
    """The fewest bytes that a rank can receive for `nbytes` of input per rank.

    For an all-reduce it is the smaller of two numbers: that of an algorithm of one shot, and that of an algorithm of
    two. For the fused op without residual output there is a third number, that of two shots whose second one gathers
    FP8 rows in place of sums.
    """
    one, two = (ranks - 1) * nbytes, 2 * (ranks - 1) * nbytes // ranks
    gathered = 3 * (ranks - 1) * nbytes // (2 * ranks)
    return min(one, two) if op == "allreduce" or residual else min(one, two, gathered)


class Links:
    """Copies by a kernel from every rank to the next one, all at the same time."""

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group, self._nbytes = group, _whole(nbytes)
        zeros = np.zeros(self._nbytes, np.uint8)
        self._sources = [rank.array(zeros) for rank in group]
        self._targets = [rank.empty(self._nbytes, "uint8") for rank in group]

    def push_us(self, nbytes: int, calls: int) -> Timing:
        """The time to push `nbytes` bytes, at most as many as the constructor was given, with the fastest of several
        grids."""
        most = -(-nbytes // _COPY_BYTES)
        sms = self._group[0].device.sm_count
        grids = sorted({max(1, min(most, times * sms)) for times in (1, 2, 4)})
        return min(self._pushed(_whole(nbytes), blocks, calls) for blocks in grids)

    def bytes_per_us(self, calls: int) -> float:
        """The rate, in one direction of a link, at which the largest push moves its bytes."""
        return self._nbytes / self.push_us(self._nbytes, calls).median

    def _pushed(self, nbytes: int, blocks: int, calls: int) -> Timing:
        targets = [*self._targets[1:], self._targets[0]]
        launches = [
            partial(copy_launch(source[:nbytes], target, blocks), rank.stream)
            for source, target, rank in zip(self._sources, targets, self._group, strict=True)
        ]
        return microseconds_per_call(self._group, [together(launches)], calls)


def _whole(nbytes: int) -> int:
    """The bytes rounded up to whole vectors."""
    return -(-nbytes // 16) * 16
