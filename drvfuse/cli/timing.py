# SPDX-License-Identifier: Apache-2.0
"""Time of a collective inside a CUDA graph; meaningful on real GPUs only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ..comm.group import Group
from ..runtime.graph import Graph
from ..runtime.stream import Event

REPLAYS = 9


def microseconds_per_call(
    group: Group, calls: Sequence[Callable[[], object]], calls_a_graph: int = 20
) -> tuple[float, float]:
    """(median, largest minus smallest) over replays of (time of a graph of back-to-back calls on all ranks) / calls.

    `calls` take turns inside the graph; each launches the work of all ranks on the ranks' own streams and must be
    capturable. A timed replay follows an untimed one directly, so the ranks are in step and the start of the graph is
    not counted.
    """
    streams = [rank.stream for rank in group]
    for call in calls:
        call()
    group.synchronize()
    with Graph.capture(streams) as graph:
        for turn in range(calls_a_graph):
            calls[turn % len(calls)]()
    device = group.ranks[0].device
    start, end = Event(device, timing=True), Event(device, timing=True)
    times = []
    for _ in range(REPLAYS):
        graph.launch(streams[0])
        start.record(streams[0])
        graph.launch(streams[0])
        end.record(streams[0])
        group.synchronize()
        times.append(end.elapsed_ms(start) * 1000 / calls_a_graph)
    graph.close()
    return statistics.median(times), max(times) - min(times)
