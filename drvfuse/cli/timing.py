# SPDX-License-Identifier: Apache-2.0
"""Time of a collective inside a CUDA graph; meaningful on real GPUs only."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from ..comm.group import Group
from ..runtime.graph import Graph
from ..runtime.stream import Event

CALLS_A_GRAPH = 20
REPEATS = 9


def microseconds_per_call(group: Group, call: Callable[[], object]) -> float:
    """Median over replays of (time of a graph of back-to-back calls on all ranks) / calls.

    `call` launches the work of all ranks on the ranks' own streams and must be capturable. Each timed replay follows
    an untimed one directly, so the ranks are in step and the start of the graph is not counted.
    """
    streams = [rank.stream for rank in group]
    call()
    group.synchronize()
    with Graph.capture(streams) as graph:
        for _ in range(CALLS_A_GRAPH):
            call()
    device = group.ranks[0].device
    start, end = Event(device, timing=True), Event(device, timing=True)
    times = []
    for _ in range(REPEATS):
        graph.launch(streams[0])
        start.record(streams[0])
        graph.launch(streams[0])
        end.record(streams[0])
        group.synchronize()
        times.append(end.elapsed_ms(start) * 1000 / CALLS_A_GRAPH)
    graph.close()
    return statistics.median(times)
