# SPDX-License-Identifier: Apache-2.0
"""Times of all-reduce, and of all-reduce + RMSNorm + FP8, by every algorithm, with the floors and the peers of the same
run.

A figure is the time of a CUDA graph of back-to-back calls over several sets of inputs in turn, divided by the calls;
"adds" is what a call adds to a chain of GEMVs, one before each call, that are launched with PDL. A peer of the fused op
is a sequence: the peer's all-reduce, then a compiled norm and quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from .. import config
from ..comm.group import Group
from ..errors import Unsupported
from ..ops.call.options import PDLLevel
from . import peers, stored_peers, timing
from .collective_calls import Calls, CollectiveCalls, chained, launches
from .floors import Links, launch_us, least_wire_bytes
from .gemv import Bench as Gemv
from .settings import Settings
from .timing import Timing, microseconds_per_call

LEVELS = {"off": PDLLevel.OFF, "early": PDLLevel.OVERLAP_AT_BEGINNING}


def measure(
    group: Group,
    op: str,
    shapes: Sequence[tuple[int, int]],
    algos: Sequence[str],
    residuals: Sequence[bool],
    settings: Settings,
    with_peers: bool,
    multicast: bool = False,
) -> Iterator[dict[str, Any]]:
    """A result for each shape, without and with a residual as asked for. The peers are measured first.

    With `multicast` inputs and sums lie in multicast memory, whatever the algorithm.

    Unsupported where a rank cannot access every other rank's memory.
    """
    if not group.peers_readable:
        raise Unsupported("the floors and most algorithms need peer access between all GPUs of the group")
    names = peers.names(op) if with_peers else ()
    found = {name: peers.measure(name, op, residuals, group.size, shapes, settings) for name in names}
    most = max(least_wire_bytes(op, True, group.size, 2 * rows * cols) for rows, cols in shapes)
    links = Links(group, max(most, settings.link_bytes))
    run = {
        "op": op,
        "gpus": group.size,
        "device": group[0].device.name,
        "driver": group.driver.name,
        "max_blocks": group.max_blocks,
        "spin_timeout": config.get("spin_timeout"),
        "replays": timing.REPLAYS,
        "settings": asdict(settings),
        "pdl": {name: level.name for name, level in LEVELS.items()},
        "launch_us": {name: _figure(launch_us(group, name != "off", settings.calls)) for name in LEVELS},
        "link_bytes_per_us": links.bytes_per_us(10),
    }
    gemvs = [Gemv(rank.device, rotated_bytes=settings.sets * settings.weight_bytes) for rank in group]
    for rows, cols in shapes:
        shape = _Shape(group, rows, cols, settings, gemvs, multicast)
        for residual in residuals:
            wire = least_wire_bytes(op, residual, group.size, 2 * rows * cols)
            yield {
                "run": run,
                "rows": rows,
                "cols": cols,
                "kib": 2 * rows * cols / 1024,
                "residual": residual,
                "wire_us": wire / run["link_bytes_per_us"],
                "push_us": _figure(links.push_us(wire, settings.calls)),
                "ours": {algo: shape.ours(op, algo, residual) for algo in algos},
                "peers": {name: found[name][rows, cols, residual] for name in names},
                "stored": stored_peers.fastest(op, group.size, rows, cols, residual),
            }


class _Shape:
    """The arrays of one shape, and the chain of its GEMVs alone."""

    def __init__(
        self, group: Group, rows: int, cols: int, settings: Settings, gemvs: Sequence[Gemv], multicast: bool
    ) -> None:
        self._group, self._settings = group, settings
        self._calls = CollectiveCalls(group, rows, cols, settings.sets, multicast)
        k = settings.gemv_columns(cols)
        weights = [gemv.weights(cols, k) for gemv in gemvs]
        self._gemvs = self._calls.gemvs(weights, [rank.zeros((k,), "bfloat16") for rank in group])
        self._gemv_us = self._time(self._gemvs).median

    def ours(self, op: str, algo: str, residual: bool) -> dict[str, Any]:
        """The figures of one of drvfuse's algorithms, by level of PDL."""
        prepare = partial(self._calls.prepared, op, algo, residual=residual)
        found: dict[str, Any] = {}
        for name, level in LEVELS.items():
            prepared = prepare(pdl_level=level)
            found[name] = _figure(self._time(launches(prepared)))
            found["algo"] = prepared[0].algo
        chain = self._time(chained(self._gemvs, launches(prepared)))
        found["adds_us"] = chain.median - self._gemv_us
        return found

    def _time(self, calls: Calls) -> Timing:
        return microseconds_per_call(self._group, calls, self._settings.calls)


def _figure(timing: Timing) -> dict[str, float]:
    return {"us": timing.median, "spread": timing.spread}
