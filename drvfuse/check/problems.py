# SPDX-License-Identifier: Apache-2.0
"""Inputs of collectives, and the results that the references compute from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes, reference
from ..plans.quantisation import E8M0, Quantisation
from ..plans.sums import split_rows

Host = npt.NDArray[Any]

EPSILON = 1e-6
QUANTISATIONS = {
    "mxfp8": Quantisation.mxfp8(layout="tiles"),
    "nvfp4": Quantisation.nvfp4(0.125, layout="column"),
    "static": Quantisation.static(0.25),
    "row-e5m2": Quantisation.per_row("float8_e5m2", "bfloat16", 3.0),
    "group-64": Quantisation.per_group(64, layout="column"),
    "group-128-e8m0": Quantisation.per_group(128, scales=E8M0, layout="tiles"),
    "mxfp8-rows": Quantisation.mxfp8("float8_e5m2"),
    "nvfp4-tiles": Quantisation.nvfp4(0.125, layout="tiles"),
}
FORMS = (*QUANTISATIONS, "layer", "heads", "float32")
"""Forms of the fused ops: the quantisations; "layer" is LayerNorm with beta, normed outputs and a float32 residual;
"heads" has heads of `HEAD` columns, and "float32" gamma and residual of float32."""
HEAD = 128
MAIN = (32, 1024)


@dataclass(frozen=True)
class Problem:
    """A collective with its inputs, which are the same under every seed. Problems of one shape differ by `number`.

    With `multimem` the sums of the inputs are exact in any order. `form` is "" or one of FORMS. With "nvfp4" all codes
    are 6 or -6, equal in blocks of eight: a block of -6 is the word 0xFFFFFFFF. With "mxfp8" the scales of
    the first row are NaN, the byte 0xFF, so four of them are this word too. In a slot this word means that nothing has
    arrived. `splits[r]` is the number of rows of rank r, for an op whose results stay with the owners of the rows.
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

    def own(self, of_all_rows: Host, rank: int) -> Host:
        """Return those rows of `of_all_rows` that a rank gets."""
        if not self.op.startswith("reduce_scatter"):
            return of_all_rows
        rows = self.splits or split_rows(self.shape[0], self.ranks)
        return of_all_rows[sum(rows[:rank]) : sum(rows[: rank + 1])]

    @property
    def quantisation(self) -> Quantisation:
        return QUANTISATIONS.get(self.form, Quantisation.per_row())

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a fused op that follow from its form, except arrays."""
        found: dict[str, Any] = {"quantisation": self.quantisation}
        found |= {"norm": "layer"} if self.form == "layer" else {}
        return found | ({"head_columns": HEAD} if self.form == "heads" else {})


class Solution(NamedTuple):
    """The inputs and results of a problem. `hosts` has one input for each rank. `vector` is gamma, beta or the bias of
    the epilogue; it is the same for all problems of a shape. `residual` has all rows. `results[r]` are those of rank r,
    by the names of the op's arguments for them, such as "scales"."""

    hosts: list[Host]
    vector: Host
    residual: Host | None
    results: list[dict[str, Host]]


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
    elif problem.form == "mxfp8":
        hosts[0][0, 0] = np.nan
    vector = values(np.random.default_rng(problem.shape), problem.shape[1])
    order: dict[str, Any] = {"multimem": problem.multimem, "nodes": problem.nodes}
    ranks = range(problem.ranks)
    if problem.reduces:
        added = vector.astype(np.float32)
        after = (lambda x: x * np.float32(0.5) + added) if problem.epilogue else None
        total = reference.allreduce(hosts, epilogue=after, **order)
        return Solution(hosts, vector, None, [{"outputs": problem.own(total, rank)} for rank in ranks])
    residual = values(own, *problem.shape) if problem.residual else None
    if residual is not None and problem.form in ("layer", "float32"):
        residual = residual.astype(np.float32) * np.float32(1.1)
    if problem.form == "nvfp4":
        vector = np.ones_like(vector)
    elif problem.form == "heads":
        vector = vector[:HEAD]
    elif problem.form == "float32":
        vector = vector.astype(np.float32) * np.float32(1.1)
    of_rank = functools.partial(_normalised, problem, hosts, vector, residual, order)
    results = (
        [of_rank(rank) for rank in ranks] if problem.op.startswith("reduce_scatter") else [of_rank(0)] * len(ranks)
    )
    return Solution(hosts, vector, residual, results)


def _normalised(
    problem: Problem, hosts: list[Host], vector: Host, residual: Host | None, order: dict[str, Any], rank: int
) -> dict[str, Host]:
    """Return the reference's norm and quantisation of a rank's rows, by the names of the op's arguments."""
    rows = [problem.own(host, rank) for host in hosts]
    options = problem.options | order | {"residual": None if residual is None else problem.own(residual, rank)}
    if problem.form == "layer":
        options["beta"] = vector
    found = reference.allreduce_rmsnorm_fp8(rows, vector, EPSILON, **options)
    results = {"outputs": found.output, "scales": found.scales, "residual_outputs": found.residual}
    if problem.form == "layer":
        options["quantisation"] = Quantisation.none()
        results["normed_outputs"] = reference.allreduce_rmsnorm_fp8(rows, vector, EPSILON, **options).output
    return {name: array for name, array in results.items() if array is not None}
