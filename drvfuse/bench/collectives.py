# SPDX-License-Identifier: Apache-2.0
"""Times of all-reduce, and of all-reduce + RMSNorm + FP8, by every algorithm, with the floors and the peers' times that
the same run measures.

A figure is the time of a CUDA graph of back-to-back calls, which use several sets of inputs in turn, divided by the
number of calls. For "adds" a chain of GEMVs, launched with PDL, is timed twice: alone, and with a call after each GEMV.
The difference, divided by the number of calls, is the time that a call adds. A peer of the fused op is a sequence: the
peer's all-reduce, then a compiled norm and quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .. import config
from ..comm.group import Group
from ..errors import Unsupported
from . import peers, stored_peers, timing
from .collective_calls import LEVELS, Calls, chained, figure, launches
from .floors import Links, launch_us, least_wire_bytes
from .forms import FORMS, PLAIN
from .gemv import Bench as Gemv
from .ops import calls_of
from .settings import Settings
from .timing import microseconds_per_call


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
    """Yield a result for each shape and each value in `residuals`, which says whether there is a residual. The peers
    are measured first.

    If `multicast` is true, inputs and sums lie in multicast memory for all algorithms.

    Raises Unsupported if a rank cannot access the memory of all other ranks.
    """
    if not group.peers_readable:
        raise Unsupported("this benchmark needs peer access between all GPUs of the group, to time copies between them")
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
        "launch_us": {name: figure(launch_us(group, name != "off", settings.calls)) for name in LEVELS},
        "link_bytes_per_us": links.bytes_per_us(10),
    }
    gemvs = [Gemv(rank.device, rotated_bytes=settings.sets * settings.weight_bytes) for rank in group]
    for rows, cols in shapes:
        for residual in residuals:
            shape = _Shape(group, op, rows, cols, residual, settings, gemvs, multicast)
            wire = least_wire_bytes(op, residual, group.size, 2 * rows * cols)
            yield {
                "run": run,
                "rows": rows,
                "cols": cols,
                "kib": 2 * rows * cols / 1024,
                "residual": residual,
                "wire_us": wire / run["link_bytes_per_us"],
                "push_us": figure(links.push_us(wire, settings.calls)),
                "ours": shape.ours(algos),
                "peers": {name: found[name][rows, cols, residual] for name in names},
                "stored": stored_peers.fastest(op, group.size, rows, cols, residual),
            }


class _Shape:
    """The calls of one shape."""

    def __init__(
        self,
        group: Group,
        op: str,
        rows: int,
        cols: int,
        residual: bool,
        settings: Settings,
        gemvs: Sequence[Gemv],
        multicast: bool,
    ) -> None:
        self._group, self._settings, self._gemvs = group, settings, gemvs
        self._cols = cols
        form = FORMS["residual" if residual else PLAIN]
        self._calls = calls_of(group, op, rows, cols, settings.sets, form, multicast)

    def ours(self, algos: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The figures of drvfuse's algorithms: their times, and the time that a call adds to a chain of GEMVs.

        The chains are measured last, since their GEMVs overwrite rows of the inputs, which the checks need.
        """
        found = {algo: self._calls.times(algo, self._settings.calls) for algo in algos}
        k = self._settings.gemv_columns(self._cols)
        weights = [gemv.weights(self._cols, k) for gemv in self._gemvs]
        gemvs = self._calls.gemvs(weights, [rank.zeros((k,), "bfloat16") for rank in self._group])
        alone = self._time(gemvs)
        for algo in algos:
            prepared = self._calls.prepared(algo, LEVELS["early"])
            found[algo]["adds_us"] = self._time(chained(gemvs, launches(prepared))) - alone
        return found

    def _time(self, calls: Calls) -> float:
        return microseconds_per_call(self._group, calls, self._settings.calls).median
