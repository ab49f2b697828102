# SPDX-License-Identifier: Apache-2.0
"""The cost of tracing, and the accuracy of the clocks.

Times are microseconds per call inside a CUDA graph of back-to-back calls, which use several sets of inputs in turn. One
graph has no trace, another one has a trace. Replays of the two graphs alternate, and the medians of their times are
compared; "spread" is the larger of the two interquartile ranges. The GEMV runs on the first GPU, with weights that are
larger than L2 in all. A row also shows the resolution and error of the clocks in its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from ..comm.group import Group
from ..runtime.device import Device
from ..trace.buffer import Trace
from . import gemv
from .collective_calls import CollectiveCalls, launches
from .ops import calls_of
from .timing import Replays

OPS = ("allreduce", "allreduce_rmsnorm_fp8")
SHAPES = ((1, 4096), (128, 4096), (512, 4096), (2048, 4096))
HEAD = ["op", "algo", "shape", "off", "on", "cost", "spread", "events", "timer step ns", "clock error ns"]
TEXT_COLUMNS = 3
_ALGORITHMS = ("one_stage", "two_stage")
_SETS = 4
_ROUNDS = 60
_TRACE_BYTES = 32 << 20

RESULTS = len(SHAPES) * len(OPS) * len(_ALGORITHMS) + 1
"""The number of results of `measure`."""
Calls = Sequence[Callable[[], object]]


def measure(group: Group) -> Iterator[dict[str, Any]]:
    """Yield a result for each op, algorithm and shape."""
    for rows, cols in SHAPES:
        for op in OPS:
            over = calls_of(group, op, rows, cols, _SETS)
            for algo in _ALGORITHMS:
                calls = partial(_calls, over, algo)
                times = _compared(group, calls, _calls_per_graph(rows, cols))
                yield {"op": op, "algo": algo, "rows": rows, "cols": cols, **times}
    device = group.ranks[0].device
    bench, (n, k, n_normed) = gemv.Bench(device), gemv.MODEL
    times = _compared(device, lambda trace: bench.calls(n, k, n_normed, trace=trace), gemv.CALLS)
    yield {"op": "gemv", "algo": "", "rows": n, "cols": k, **times}


def _calls(over: CollectiveCalls, algo: str, trace: Trace | None) -> Calls:
    return launches(over.prepared(algo, trace=trace))


def _calls_per_graph(rows: int, cols: int) -> int:
    """The number of calls per graph. It is smaller for large inputs, since the trace must hold the records of all
    calls, and a call on larger inputs has more records.
    """
    nbytes = 2 * rows * cols
    return 50 if nbytes <= 1 << 20 else 20 if nbytes <= 8 << 20 else 10


def _compared(where: Group | Device, calls: Callable[[Trace | None], Calls], per_graph: int) -> dict[str, Any]:
    trace = Trace(where, nbytes=_TRACE_BYTES)
    graphs = [Replays(where, calls(given), per_graph) for given in (None, trace)]
    times = np.array([[graph.microseconds() for graph in graphs] for _ in range(_ROUNDS)])
    (low_off, off, high_off), (low_on, on, high_on) = np.quantile(times, (0.25, 0.5, 0.75), axis=0).T.tolist()
    for graph in graphs:
        graph.close()
    events = int(trace.records().size)
    return {
        "off_us": off,
        "on_us": on,
        "overhead": on / off - 1,
        "spread_us": max(high_off - low_off, high_on - low_on),
        "events": events,
        "clocks": [asdict(clock) for clock in trace.clocks],
    }


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The one table line of a result, in a list; `HEAD` is the table's head."""
    step, error = (max(clock[name] for clock in result["clocks"]) for name in ("resolution_ns", "error_ns"))
    cells = [result["op"], result["algo"], f"{result['rows']}x{result['cols']}"]
    cells += [f"{result['off_us']:.2f}", f"{result['on_us']:.2f}", f"{result['overhead']:.1%}"]
    return [[*cells, f"{result['spread_us']:.2f}", str(result["events"]), f"{step:.0f}", f"{error:.0f}"]]
