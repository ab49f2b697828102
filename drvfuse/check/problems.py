# SPDX-License-Identifier: Apache-2.0
"""Collectives of given inputs, and their results."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes, reference
from ..plans.scatter import split_rows

Host = npt.NDArray[Any]

EPSILON = 1e-6
MAIN = (32, 1024)


@dataclass(frozen=True)
class Problem:
    """A collective of given inputs: `number` tells problems of one shape apart. The same under every seed.

    With `multimem` the sums of its inputs are exact in any order. `splits` are the rows of each rank, of an op that
    leaves rows to their owners.
    """

    op: str
    ranks: int
    shape: tuple[int, int] = MAIN
    dtype: str = "bfloat16"
    residual: bool = False
    epilogue: bool = False
    number: int = 0
    multimem: bool = False
    nodes: int = 1
    splits: tuple[int, ...] | None = None

    @property
    def reduces(self) -> bool:
        """Whether the results are sums, and not rows that are normalised."""
        return "rmsnorm" not in self.op

    def own(self, result: Host, rank: int) -> Host:
        """What a rank gets of a result of all rows."""
        if not self.op.startswith("reduce_scatter"):
            return result
        rows = self.splits or split_rows(self.shape[0], self.ranks)
        return result[sum(rows[:rank]) : sum(rows[: rank + 1])]


class Solution(NamedTuple):
    """`hosts`: one input per rank. `vector`: gamma, or the epilogue's bias, the same for every problem of a shape.
    `outputs`: the results of all rows (`Problem.own`)."""

    hosts: list[Host]
    vector: Host
    residual: Host | None
    outputs: list[Host]


@functools.lru_cache(maxsize=128)
def solved(problem: Problem) -> Solution:
    element = dtypes.get(problem.dtype).numpy

    def values(random: np.random.Generator, *shape: int) -> Host:
        magnitude = np.exp2(random.integers(-4, 5, shape)).astype(np.float32)
        return (random.standard_normal(shape, np.float32) * magnitude).astype(element)

    own = np.random.default_rng([problem.ranks, problem.number, *problem.shape])

    def exact(random: np.random.Generator, *shape: int) -> Host:
        return (np.round(random.uniform(-8, 8, shape) * 64) / 64).astype(np.float32).astype(element)

    hosts = [(exact if problem.multimem else values)(own, *problem.shape) for _ in range(problem.ranks)]
    vector = values(np.random.default_rng(problem.shape), problem.shape[1])
    order: dict[str, Any] = {"multimem": problem.multimem, "nodes": problem.nodes}
    if problem.reduces:
        added = vector.astype(np.float32)
        after = (lambda x: x * np.float32(0.5) + added) if problem.epilogue else None
        return Solution(hosts, vector, None, [reference.allreduce(hosts, epilogue=after, **order)])
    residual = values(own, *problem.shape) if problem.residual else None
    found = reference.allreduce_rmsnorm_fp8(hosts, vector, EPSILON, residual=residual, **order)
    return Solution(hosts, vector, residual, [array for array in found if array is not None])
