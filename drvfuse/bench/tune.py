# SPDX-License-Identifier: Apache-2.0
"""Measures the constants of `plans.tuning` on a group: each push algorithm at two sizes, after a check of its
results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes, reference
from ..comm.group import Group
from ..errors import DrvfuseError
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives.allreduce import allreduce
from ..ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..plans import tuning
from ..plans.tuning import Cost, Costs
from .timing import microseconds_per_call

COLUMNS = 4096


class Effort(NamedTuple):
    """The rows of the two inputs of each algorithm, how many sets of inputs take turns, and the calls of a graph."""

    rows: Mapping[str, tuple[int, int]]
    sets: int
    calls: int


FULL = Effort({"push_one_shot": (8, 128), "push_two_shot": (64, 1024)}, sets=4, calls=50)
LEAST = Effort({"push_one_shot": (1, 2), "push_two_shot": (2, 4)}, sets=1, calls=1)
"""For emulated devices, whose times mean nothing."""


def measure(group: Group, effort: Effort = FULL) -> Costs:
    """The constants on this group, back to back in a graph with PDL, from inputs of COLUMNS bfloat16 columns.

    An algorithm whose results are not those of `drvfuse.reference`, bit for bit on every rank, raises DrvfuseError. All
    ranks have one result, as one process measures.
    """
    return Costs(*(_cost(group, fused, algo, effort) for fused in (False, True) for algo in tuning.ALGORITHMS))


def _cost(group: Group, fused: bool, algo: str, effort: Effort) -> Cost:
    small, large = (
        (_received(group.size, fused, algo, rows), _microseconds(group, fused, algo, rows, effort))
        for rows in effort.rows[algo]
    )
    rate = (large[0] - small[0]) / max(large[1] - small[1], 1e-3)
    return Cost(max(small[1] - small[0] / rate, 1e-3), rate)


def _received(ranks: int, fused: bool, algo: str, rows: int) -> float:
    row_bytes = 2 * COLUMNS
    both = (
        tuning.fused_received(ranks, row_bytes, COLUMNS, rows, False)
        if fused
        else tuning.allreduce_received(ranks, rows * row_bytes)
    )
    return both[tuning.ALGORITHMS.index(algo)]


def _microseconds(group: Group, fused: bool, algo: str, rows: int, effort: Effort) -> float:
    random, bf16 = np.random.default_rng(rows), dtypes.get("bfloat16").numpy
    hosts = [
        [random.standard_normal((rows, COLUMNS), np.float32).astype(bf16) for _ in group] for _ in range(effort.sets)
    ]
    gamma = np.linspace(0.5, 1.5, COLUMNS, dtype=np.float32).astype(bf16)
    prepare: Callable[..., Prepared[Any]] = partial(allreduce.prepare, group)
    if fused:
        gammas = [rank.array(gamma) for rank in group]
        prepare = partial(allreduce_rmsnorm_fp8.prepare, group, gammas=gammas, epsilon=1e-6)
    pdl = PDLLevel.OVERLAP_AT_BEGINNING if group.ranks[0].device.capability >= (9, 0) else PDLLevel.OFF
    inputs = [[rank.array(host) for rank, host in zip(group, of_ranks, strict=True)] for of_ranks in hosts]
    calls = [prepare(inputs=xs, algo=algo, pdl_level=pdl) for xs in inputs]
    result = calls[0].launch()
    group.synchronize()
    pairs: list[tuple[Any, Any]] = []
    if fused:
        expected = reference.allreduce_rmsnorm_fp8(hosts[0], gamma, 1e-6)
        pairs = [(result.output, expected.output), (result.scales, expected.scales)]
    else:
        pairs = [(result, reference.allreduce(hosts[0]))]
    for arrays, wanted in pairs:
        for rank, array in enumerate(arrays):
            if array.numpy().tobytes() != wanted.tobytes():
                name = calls[0].describe()
                raise DrvfuseError(f"{name} has a wrong result on rank {rank}; nothing was stored")
    return microseconds_per_call(group, [call.launch for call in calls], effort.calls).median
