# SPDX-License-Identifier: Apache-2.0
"""What a call costs the calling thread: its bare launches, a prepared call, and a plain one with outputs given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..ops.call.op import Op
from ..ops.call.prepared import Prepared
from ..ops.coat.rmsnorm_forward import fp8_rmsnorm_forward
from ..ops.collectives.allreduce import allreduce
from ..ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..runtime.device import Device
from ..runtime.driver import Driver
from ..runtime.stream import Stream

BURST = 50  # of calls, whose launches fit into a stream's queue
BURSTS = 41
COLUMNS = 4096
HEAD = ("call", "launches", "launches alone us", "prepared us", "plain us", "prepared x", "plain x")
TEXT_COLUMNS = 1


class Case(NamedTuple):
    """A call of small arrays, which no call waits for; `streams` are those of `prepared`, and `wait` ends a burst."""

    name: str
    prepared: Prepared[Any]
    plain: Callable[[], object]
    streams: Sequence[Stream]
    wait: Callable[[], None]

    def bare(self) -> None:
        for launches, stream in zip(self.prepared.launches, self.streams, strict=True):
            for launch in launches:
                launch(stream)


def _case(where: Group | Device, name: str, op: Op[..., Any], *arrays: Any, **options: Any) -> Case:
    streams = [rank.stream for rank in where] if isinstance(where, Group) else [where.stream]
    return Case(name, op.prepare(*arrays, **options), lambda: op(*arrays, **options), streams, where.synchronize)


@contextmanager
def cases(driver: Driver, ranks: int) -> Iterator[list[Case]]:
    """The collectives on so many ranks, and two ops on the first device."""
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
        both = {"n_normed": 48, "eps": 1e-6, "normed_output": normed, "unnormed_output": unnormed}
        yield [
            _case(group, f"allreduce, {ranks} ranks", allreduce, group, xs, ys),
            _case(group, f"allreduce_rmsnorm_fp8, {ranks} ranks", allreduce_rmsnorm_fp8, group, xs, gammas, **fused),
            _case(device, "gemv_partial_norm", gemv_partial_norm, act, weight, gamma, **both),
            _case(device, "fp8_rmsnorm_forward", fp8_rmsnorm_forward, x, s_x, w, 16, 1e-6, outputs=forward),
        ]


def measure(driver: Driver, ranks: int) -> list[dict[str, Any]]:
    """Of each case the microseconds of one call of each way: medians over bursts, whose ways take turns."""
    with cases(driver, ranks) as every:
        return [_measured(case) for case in every]


def _measured(case: Case) -> dict[str, Any]:
    ways: dict[str, Callable[[], object]] = {"bare": case.bare, "prepared": case.prepared.launch, "plain": case.plain}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(BURSTS + 1):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
            case.wait()
    medians = {name: float(np.median(found[1:])) for name, found in times.items()}
    return {"call": case.name, "launches": sum(map(len, case.prepared.launches)), **medians}


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The row of a table under `HEAD`."""
    times = [result[name] for name in ("bare", "prepared", "plain")]
    ratios = [f"{time / times[0]:.2f}" for time in times[1:]]
    return [[result["call"], str(result["launches"]), *(f"{time:.1f}" for time in times), *ratios]]
