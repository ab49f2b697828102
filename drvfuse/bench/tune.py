# SPDX-License-Identifier: Apache-2.0
"""Measures the constants of `plans.tuning` on a group: each algorithm at two sizes, after a check of its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..comm.group import Group
from ..ops.call.options import PDLLevel
from ..plans import tuning
from ..plans.tuning import Cost
from .collective_calls import launches
from .moves_calls import moves
from .ops import calls_of
from .timing import microseconds_per_call

COLUMNS = 4096


class Measurement(NamedTuple):
    """What is timed to compute one `Cost`: an op by an algorithm, once with each of two numbers of rows. If `private`
    is true, no peer can read the inputs, so they are staged.
    """

    op: str
    algo: str
    rows: tuple[int, int]
    private: bool = False


MEASUREMENTS = {
    "one_shot": Measurement("allreduce", "push_one_shot", (8, 128)),
    "two_shot": Measurement("allreduce", "push_two_shot", (64, 1024)),
    "fused_one_shot": Measurement("allreduce_rmsnorm_fp8", "push_one_shot", (8, 128)),
    "fused_two_shot": Measurement("allreduce_rmsnorm_fp8", "push_two_shot", (64, 1024)),
    "scatter_push": Measurement("reduce_scatter", "push", (512, 2048)),
    "scatter_pull": Measurement("reduce_scatter", "pull", (512, 2048)),
    "move_push": Measurement("all_gather", "push", (64, 2048)),
    "move_relay": Measurement("broadcast", "relay", (64, 2048)),
    "move_direct": Measurement("all_gather", "put", (64, 2048)),
    "move_staged": Measurement("all_gather", "pull", (64, 2048), private=True),
}
"""The measurements by the names of `tuning.Costs`. The numbers of rows are near those at which another algorithm
becomes the fastest."""


class Effort(NamedTuple):
    """How much is measured: `sets` sets of inputs, which calls use in turn, and at least `calls` calls in a graph. The
    numbers of rows of a measurement are divided by `fewer`."""

    sets: int
    calls: int
    fewer: int = 1


FULL = Effort(sets=4, calls=50)
LEAST = Effort(sets=1, calls=1, fewer=512)
"""The effort for emulated devices, whose times have no meaning."""


def measure(group: Group, effort: Effort = FULL) -> Iterator[tuple[str, Cost]]:
    """Yield each constant of `plans.tuning`, measured on this group. Calls run back to back in a graph with PDL, on
    inputs with COLUMNS columns of bfloat16.

    The algorithm "relay" is left out on fewer than three ranks. Raises DrvfuseError if the results of an algorithm on a
    rank differ in a bit from those of `drvfuse.reference`. All ranks get the same constants, since one process measures
    them.
    """
    for name, one in measured(group.size).items():
        yield name, _cost(group, one, effort)


def measured(ranks: int) -> dict[str, Measurement]:
    """The measurements on that number of ranks."""
    return {name: one for name, one in MEASUREMENTS.items() if ranks > 2 or one.algo != "relay"}


def _cost(group: Group, one: Measurement, effort: Effort) -> Cost:
    least, most = (max(1, rows // effort.fewer) for rows in one.rows)
    small, large = (
        (_received(group.size, one, rows), _microseconds(group, one, rows, effort))
        for rows in (least, max(most, least + 1))
    )
    rate = (large[0] - small[0]) / max(large[1] - small[1], 1e-3)
    return Cost(max(small[1] - small[0] / rate, 1e-3), rate)


def _received(ranks: int, one: Measurement, rows: int) -> float:
    """The number of bytes that each rank receives in a call with `rows` rows."""
    row_bytes = 2 * COLUMNS
    if one.op == "allreduce":
        return tuning.allreduce_received(ranks, rows * row_bytes)[tuning.ALGORITHMS.index(one.algo)]
    if one.op == "allreduce_rmsnorm_fp8":
        both = tuning.fused_received(ranks, row_bytes, COLUMNS, rows, False)
        return both[tuning.ALGORITHMS.index(one.algo)]
    return rows * row_bytes * (1 if one.op == "broadcast" else (ranks - 1) / ranks)


def _microseconds(group: Group, one: Measurement, rows: int, effort: Effort) -> float:
    if one.private:
        calls = moves(group, one.op, 2 * rows * COLUMNS, effort.sets, private=True)
    else:
        calls = calls_of(group, one.op, rows, COLUMNS, effort.sets)
    calls.check(one.algo)
    pdl = PDLLevel.OVERLAP_AT_BEGINNING if group.ranks[0].device.capability >= (9, 0) else PDLLevel.OFF
    return microseconds_per_call(group, launches(calls.prepared(one.algo, pdl)), effort.calls).median
