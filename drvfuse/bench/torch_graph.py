# SPDX-License-Identifier: Apache-2.0
"""Times of a torch function inside torch's own CUDA graph, for the comparisons of the benchmarks with torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from .timing import REPLAYS


def torch_us_per_call(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> float:
    """The median of `torch_times`: microseconds per call."""
    return statistics.median(torch_times(function, arguments))


def torch_times(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[float]:
    """Capture a graph of calls of `function`, one call for each entry of `arguments`. Replay the graph, and return the
    microseconds per call of each replay.

    An untimed replay directly precedes each timed one. So processes whose functions wait for one another begin the
    timed replay at about the same time.
    """
    import torch

    for values in arguments:
        function(*values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In the default mode, a query of an event by any thread would make the capture fail, and NCCL's watchdog thread
    # queries events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
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
    return times


def compiled_norm(residual: Any, gamma: Any, epsilon: float) -> Callable[[Any], Any]:
    """A compiled function that adds the residual, if there is one, and computes RMSNorm and FP8 with a scale per
    row."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes

    def quantised(x: Any) -> Any:
        y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + epsilon) * gamma.float()
        scale = y.abs().amax(1, keepdim=True) / 448.0
        return (y / scale).to(torch.float8_e4m3fn), scale

    def added(x: Any, residual: Any) -> Any:
        total = (x.float() + residual.float()).bfloat16()
        return *quantised(total.float()), total

    if residual is None:
        return torch.compile(lambda x: quantised(x.float()), dynamic=False)
    compiled = torch.compile(added, dynamic=False)
    return lambda x: compiled(x, residual)
