# SPDX-License-Identifier: Apache-2.0
"""Time of a torch function inside torch's own CUDA graph: the peers of the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from .timing import REPLAYS


def torch_us_per_call(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> float:
    """Median over replays of (time of a graph of one call with each of `arguments`) / calls."""
    import torch

    for values in arguments:
        function(*values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for values in arguments:
            function(*values)
    times = []
    for _ in range(REPLAYS):
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(arguments))
    return statistics.median(times)
