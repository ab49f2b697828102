# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-reduce through torch, in one process: the peer of the collectives' benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .timing import REPLAYS

_CALLS = 50
_WARM = 5


def nccl_us(devices: Sequence[int], rows: int, cols: int) -> float:
    """Median microseconds per call over replays of eager back-to-back calls; bfloat16, of each the slowest rank."""
    import torch

    inputs = [torch.randn(rows, cols, dtype=torch.bfloat16, device=f"cuda:{i}") for i in devices]
    outputs = [torch.empty_like(x) for x in inputs]
    times = []
    for _ in range(REPLAYS):
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in devices] for _ in range(2))
        for turn in range(_WARM + _CALLS):
            if turn == _WARM:
                for i, start in zip(devices, starts, strict=True):
                    start.record(torch.cuda.current_stream(i))
            torch.cuda.nccl.all_reduce(inputs, outputs)
        for i, end in zip(devices, ends, strict=True):
            end.record(torch.cuda.current_stream(i))
        for i in devices:
            torch.cuda.synchronize(i)
        times.append(max(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)) * 1000 / _CALLS)
    return statistics.median(times)
