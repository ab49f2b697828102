# SPDX-License-Identifier: Apache-2.0
"""Inputs of collectives, and the results that the references compute from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes, reference
from ..plans.quantisation import Quantisation
from ..plans.scatter import split_rows

Host = npt.NDArray[Any]

EPSILON = 1e-6
QUANTISATIONS = {"mxfp8": Quantisation.mxfp8(layout="tiles"), "nvfp4": Quantisation.nvfp4(0.125, layout="column")}
FORMS = ("layer", *QUANTISATIONS)
"""Forms of the fused op: "layer" is LayerNorm with beta, normed outputs and a float32 residual; the others are
quantisations."""
MAIN = (32, 1024)


@dataclass(frozen=True)
class Problem:
    """A collective with its inputs, which are the same under every seed. Problems of one shape differ by `number`.

    With `multimem` the sums of the inputs are exact in any order. `form` is "" or one of FORMS. With "nvfp4" all codes
    are 6 or -6, equal in blocks of eight; eight codes of -6 are the word 0xFFFFFFFF. `splits` are the numbers of rows
    of the ranks, for an op whose results stay with the owners of the rows.
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
    form: str = ""
    splits: tuple[int, ...] | None = None

    @property
    def reduces(self) -> bool:
        """Whether the results are sums, not normalised rows."""
        return "rmsnorm" not in self.op

    def own(self, result: Host, rank: int) -> Host:
        """The part of a result of all rows that a rank gets."""
        if not self.op.startswith("reduce_scatter"):
            return result
        rows = self.splits or split_rows(self.shape[0], self.ranks)
        return result[sum(rows[:rank]) : sum(rows[: rank + 1])]


class Solution(NamedTuple):
    """The inputs and results of a problem. `hosts` has one input for each rank. `vector` is gamma, beta or the bias of
    the epilogue; it is the same for all problems of a shape. `outputs` are the results of all rows (see `Problem.own`);
    with the form "layer" the normed rows come last."""

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
    if problem.form == "nvfp4":
        signs = own.choice([-1.0, 1.0], (problem.shape[0], problem.shape[1] // 8)).repeat(8, axis=1)
        hosts = [(signs * (1 + rank)).astype(np.float32).astype(element) for rank in range(problem.ranks)]
    vector = values(np.random.default_rng(problem.shape), problem.shape[1])
    order: dict[str, Any] = {"multimem": problem.multimem, "nodes": problem.nodes}
    if problem.reduces:
        added = vector.astype(np.float32)
        after = (lambda x: x * np.float32(0.5) + added) if problem.epilogue else None
        return Solution(hosts, vector, None, [reference.allreduce(hosts, epilogue=after, **order)])
    residual = values(own, *problem.shape) if problem.residual else None
    if problem.form == "layer":
        residual = None if residual is None else residual.astype(np.float32) * np.float32(1.1)
        order |= {"norm": "layer", "beta": vector}
    elif problem.form == "nvfp4":
        vector = np.ones_like(vector)
    quantisation = QUANTISATIONS.get(problem.form)
    found = reference.allreduce_rmsnorm_fp8(
        hosts, vector, EPSILON, residual=residual, quantisation=quantisation, **order
    )
    outputs = [array for array in found if array is not None]
    if problem.form == "layer":
        plain = {"residual": residual, "quantisation": Quantisation.none(), **order}
        outputs.append(reference.allreduce_rmsnorm_fp8(hosts, vector, EPSILON, **plain).output)
    return Solution(hosts, vector, residual, outputs)
