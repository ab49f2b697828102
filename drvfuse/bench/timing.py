# SPDX-License-Identifier: Apache-2.0
"""Measures the time of calls inside a CUDA graph, and the bandwidth of a copy, from which memory floors are computed.
Only the times of real GPUs have a meaning."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..comm.group import Group
from ..comm.rank_graphs import RankGraphs
from ..runtime.array import Array
from ..runtime.device import Device
from ..runtime.graph import Graph
from ..runtime.launch import Launch
from ..runtime.module import compile
from ..runtime.stream import Event

REPLAYS = 9


class Timing(NamedTuple):
    """Microseconds per call: the median over replays, and the largest minus the smallest."""

    median: float
    spread: float


class Replays:
    """CUDA graphs of back-to-back calls, one graph per rank of a group or one for a device, that can be replayed.

    The calls in a graph alternate between those of `calls`; each occurs the same number of times, and there are at
    least `calls_a_graph` in all. Each call launches its work on the streams of all ranks, or on the device's stream,
    and must be capturable. With `joined` one graph holds the work of all ranks, as the algorithm "naive" requires.
    """

    def __init__(
        self,
        where: Group | Device,
        calls: Sequence[Callable[[], object]],
        calls_a_graph: int = 20,
        *,
        joined: bool = False,
    ) -> None:
        self._where = where
        devices = [rank.device for rank in where] if isinstance(where, Group) else [where]
        for call in calls:
            call()
        where.synchronize()
        self._calls = -(-calls_a_graph // len(calls)) * len(calls)
        capture: contextlib.AbstractContextManager[RankGraphs | Graph]
        if isinstance(where, Group) and not joined:
            capture = where.capture()
        else:
            capture = Graph.capture([device.stream for device in devices])
        with capture as self._graphs:
            for turn in range(self._calls):
                calls[turn % len(calls)]()
        self._marks = [(device.stream, Event(device, timing=True), Event(device, timing=True)) for device in devices]

    def microseconds(self) -> float:
        """Microseconds per call of one replay, on the slowest rank.

        An untimed replay directly precedes the timed one. So all ranks begin the timed replay at about the same time,
        and the time does not include the start of a graph.
        """
        self._launch()
        for stream, start, _ in self._marks:
            start.record(stream)
        self._launch()
        for stream, _, end in self._marks:
            end.record(stream)
        self._where.synchronize()
        return max(end.elapsed_ms(start) for _, start, end in self._marks) * 1000 / self._calls

    def _launch(self) -> None:
        if isinstance(self._graphs, Graph):
            self._graphs.launch(self._marks[0][0])
        else:
            self._graphs.launch()

    def close(self) -> None:
        self._graphs.close()


def microseconds_per_call(
    where: Group | Device, calls: Sequence[Callable[[], object]], calls_a_graph: int = 20, *, joined: bool = False
) -> Timing:
    """The time of a graph of back-to-back calls, divided by the number of calls. The arguments are those of
    `Replays`."""
    with contextlib.closing(Replays(where, calls, calls_a_graph, joined=joined)) as replays:
        times = [replays.microseconds() for _ in range(REPLAYS)]
    return Timing(statistics.median(times), max(times) - min(times))


def together(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """A function that makes all of `calls`, in their order."""
    every = tuple(calls)

    def run() -> None:
        for call in every:
            call()

    return run


_COPY = """
extern "C" __global__ void __launch_bounds__(512) copy(const uint4* from, uint4* to, long long count) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * step) {
        uint4 v[4];
        for (int k = 0; k < 4; ++k) {
            if (i + k * step < count) v[k] = from[i + k * step];
        }
        for (int k = 0; k < 4; ++k) {
            if (i + k * step < count) to[i + k * step] = v[k];
        }
    }
}
"""


def copy_launch(source: Array, target: Array, blocks: int) -> Launch:
    """The launch of a kernel that copies `source` to `target` by 16-byte accesses, on the device of `source`.

    The size of `source` must be a multiple of 16 bytes, and its device must be able to access `target`. The caller
    keeps `target` alive.
    """
    kernel = compile(_COPY, driver=source.device.driver)["copy"]
    return kernel.prepare(blocks, 512, source, target.ptr, source.nbytes // 16, device=source.device)


def copy_bandwidth(device: Device) -> float:
    """The bytes per microsecond that a copy of 1 GiB reads and writes, with the best of several grids.

    The copy is a kernel, which reaches 4.4 TB/s on an H200; cuMemcpyDtoDAsync as a graph node reached 2.7 TB/s.
    """
    nbytes = 1 << 30
    source, target = device.empty(nbytes, "uint8"), device.empty(nbytes, "uint8")
    source.copy_from(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
    times = []
    # Numbers of blocks per multiprocessor. With 248 on 132 multiprocessors, nearly all threads make one pass of the
    # kernel's loop, in which they copy four vectors.
    for blocks in (4, 8, 32, 248):
        launch = copy_launch(source, target, blocks * device.sm_count)
        times.append(microseconds_per_call(device, [partial(launch, device.stream)]).median)
    return 2 * nbytes / min(times)
