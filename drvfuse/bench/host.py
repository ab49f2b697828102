# SPDX-License-Identifier: Apache-2.0
"""The host time of a call: of its bare launches, of a prepared call, of a plain call, and of a graph that holds it.

Calls are given their outputs. A graph holds one call, and a collective has one graph per rank. The skew of a collective
is the time from the start of the first rank's kernel to the start of the last one's, on idle devices. It is measured by
the ranks' global timers, whose offsets are measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..ops.call.op import Op
from ..ops.call.prepared import Prepared
from ..ops.coat.rmsnorm_forward import fp8_rmsnorm_forward
from ..ops.collectives.rows.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.collectives.sums.allreduce import allreduce
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..runtime.device import Device
from ..runtime.driver import Driver
from ..runtime.graph import Graph
from ..runtime.stream import Stream
from ..trace import statistics
from ..trace.buffer import Trace

RESULTS = 4  # the cases of `cases`
BURST = 50  # the number of calls in a burst; their launches fit into a stream's queue
BURSTS = 41
COLUMNS = 4096
SKEWS = 21
_WAYS = ("bare", "prepared", "plain", "graph")
HEAD = ("call", "launches", "launches alone us", "prepared us", "plain us", "graph us", "prepared x", "plain x",
        "skew us", "in graphs us")  # fmt: skip
TEXT_COLUMNS = 1


class Case(NamedTuple):
    """A call with small arrays, which returns before its work is complete. `streams` are the streams of `prepared`, and
    `wait` waits for the end of a burst of calls.

    `prepare` prepares the call again, and `traced` prepares it with a trace.
    """

    name: str
    where: Group | Device
    prepared: Prepared[Any]
    plain: Callable[[], object]
    prepare: Callable[[], Prepared[Any]]
    traced: Callable[[Trace], Prepared[Any]]
    streams: Sequence[Stream]
    wait: Callable[[], None]

    def bare(self) -> None:
        for launches, stream in zip(self.prepared.launches, self.streams, strict=True):
            for launch in launches:
                launch(stream)


def _case(where: Group | Device, name: str, op: Op[..., Any], *arrays: Any, **options: Any) -> Case:
    streams = [rank.stream for rank in where] if isinstance(where, Group) else [where.stream]

    def traced(trace: Trace) -> Prepared[Any]:
        return op.prepare(*arrays, **options, trace=trace)

    prepare, plain = partial(op.prepare, *arrays, **options), partial(op, *arrays, **options)
    return Case(name, where, prepare(), plain, prepare, traced, streams, where.synchronize)


@contextmanager
def cases(driver: Driver, ranks: int) -> Iterator[list[Case]]:
    """Yield the list of all cases: two collectives on the given number of ranks, and two ops on the first device."""
    host = np.ones((1, COLUMNS), dtypes.get("bfloat16").numpy)
    with Group.local(ranks, driver=driver) as group:
        xs, gammas = ([rank.array(values) for rank in group] for values in (host, host[0]))
        ys = [rank.empty(host.shape, "bfloat16") for rank in group]
        quantised = [rank.empty(host.shape, "float8_e4m3fn") for rank in group]
        scales = [rank.empty(1, "float32") for rank in group]
        device = group[0].device
        act, weight, gamma = (device.zeros(shape, "bfloat16") for shape in (1024, (64, 1024), 48))
        normed, unnormed = device.empty(48, "bfloat16"), device.empty(16, "bfloat16")
        x, s_x, w = device.zeros((16, 1024), "float8_e4m3fn"), device.zeros((16, 64), "bfloat16"), act
        forward = [device.empty((16, 1024), x.dtype), device.empty((), "bfloat16")]
        forward += [device.empty((1024, 16), x.dtype), device.empty(16, "float32")]
        fused = {"epsilon": 1e-6, "outputs": quantised, "scales": scales}
        both = {"n_normed": 48, "epsilon": 1e-6, "normed_output": normed, "unnormed_output": unnormed}
        yield [
            _case(group, f"allreduce, {ranks} ranks", allreduce, group, xs, ys),
            _case(group, f"allreduce_rmsnorm_fp8, {ranks} ranks", allreduce_rmsnorm_fp8, group, xs, gammas, **fused),
            _case(device, "gemv_partial_norm", gemv_partial_norm, act, weight, gamma, **both),
            _case(device, "fp8_rmsnorm_forward", fp8_rmsnorm_forward, x, s_x, w, 16, 1e-6, outputs=forward),
        ]


def measure(driver: Driver, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield for each case, and each way of launching its call, the microseconds of one call. They are medians over
    bursts of calls; the bursts of the different ways alternate.
    """
    with cases(driver, ranks) as every:
        yield from map(_measured, every)


def _measured(case: Case) -> dict[str, Any]:
    ways: dict[str, Callable[[], object]] = {
        "bare": case.bare,
        "prepared": case.prepared.launch,
        "plain": case.plain,
        "graph": _graph(case.where, case.prepared),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(BURSTS + 1):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
            case.wait()
    medians = {name: float(np.median(found[1:])) for name, found in times.items()}
    found: dict[str, Any] = {"call": case.name, "launches": sum(map(len, case.prepared.launches)), **medians}
    if isinstance(case.where, Group):
        trace = Trace(case.where)
        traced = case.traced(trace)
        found["skew"] = {"prepared": _skew(traced.launch, trace), "graph": _skew(_graph(case.where, traced), trace)}
    return found


def _graph(where: Group | Device, call: Prepared[Any]) -> Callable[[], object]:
    """A function that launches a graph of one call."""
    if isinstance(where, Group):
        with where.capture() as graphs:
            call.launch()
        return graphs.launch
    with Graph.capture(where.stream) as graph:
        call.launch()
    return partial(graph.launch, where.stream)


def _skew(call: Callable[[], object], trace: Trace) -> float:
    """Microseconds from the first rank's start to the last one's, the median over calls."""
    found = []
    for _ in range(SKEWS):
        call()
        found.append(max(skew.first for skew in statistics.skews(trace.records())))
    return float(np.median(found))


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The row of a table under `HEAD`."""
    times = [result[name] for name in _WAYS]
    ratios = [f"{result[name] / result['bare']:.2f}" for name in ("prepared", "plain")]
    skews = [f"{skew:.1f}" for skew in result["skew"].values()] if "skew" in result else ["", ""]
    return [[result["call"], str(result["launches"]), *(f"{time:.1f}" for time in times), *ratios, *skews]]
