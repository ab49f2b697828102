# SPDX-License-Identifier: Apache-2.0
"""Prepared calls of the collectives over sets of random bfloat16 inputs, alone and behind a GEMV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives import multimem
from ..ops.collectives.allreduce import allreduce
from ..ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..runtime.array import Array
from ..trace.buffer import Trace
from .timing import together

OPS = ("allreduce", "allreduce_rmsnorm_fp8")
EPSILON = 1e-6

Calls = list[Callable[[], object]]


class CollectiveCalls:
    """Random inputs of a shape on each rank, in several sets; outputs, gammas and residuals that the calls share.

    The fused op has float32 scales, FP8 output (e4m3) and, where asked for, residuals in and out. With `multicast`
    inputs and sums lie in multicast memory of the group, which lives as long as they do.
    """

    def __init__(self, group: Group, rows: int, cols: int, sets: int, multicast: bool = False) -> None:
        random, bf16 = np.random.default_rng(rows * 65536 + cols), dtypes.get("bfloat16").numpy
        self._group = group

        def values() -> Any:
            return random.standard_normal((rows, cols), np.float32).astype(bf16)

        def arrays() -> list[Array]:
            if multicast:
                return group.symmetric(2 * rows * cols, multicast=True).arrays((rows, cols), "bfloat16")
            return [rank.empty((rows, cols), "bfloat16") for rank in group]

        self._sets = [arrays() for _ in range(sets)]
        for members in self._sets:
            for array in members:
                array.copy_from(values())
        self._sums = arrays()
        gamma = np.linspace(0.5, 1.5, cols, dtype=np.float32).astype(bf16)
        self._norm: dict[str, Any] = {
            "gammas": [rank.array(gamma) for rank in group],
            "epsilon": EPSILON,
            "outputs": [rank.empty((rows, cols), "float8_e4m3fn") for rank in group],
            "scales": [rank.empty((rows,), "float32") for rank in group],
        }
        self._residuals = [rank.zeros((rows, cols), "bfloat16") for rank in group]

    def prepared(
        self,
        op: str,
        algo: str,
        *,
        residual: bool = False,
        pdl_level: PDLLevel = PDLLevel.OFF,
        trace: Trace | None = None,
    ) -> list[Prepared[Any]]:
        """A call of one of `OPS` on each set of inputs, by an algorithm whose name may be one of multimem's."""
        prepare: Callable[..., Prepared[Any]] = allreduce.prepare
        options: dict[str, Any] = {"outputs": self._sums}
        if op != "allreduce":
            prepare, options = allreduce_rmsnorm_fp8.prepare, self._norm
            if residual:
                options = {**options, "residuals": self._residuals, "residual_outputs": self._sums}
        forms = {name: form for form, name in multimem.NAMES.items()}
        chosen = {"algo": forms.get(algo, algo), "use_multimem": algo in forms}
        options = {**options, **chosen, "pdl_level": pdl_level, "trace": trace}
        return [prepare(self._group, inputs=inputs, **options) for inputs in self._sets]

    def gemvs(self, weights: Sequence[Sequence[Array]], acts: Sequence[Array]) -> Calls:
        """For each set a GEMV on every rank that writes the first row of its input, with PDL.

        `weights` are, for each rank, one or more [columns, K] that take turns, and `acts` a [K] for each rank.
        """
        return [
            together(
                gemv_partial_norm.prepare(
                    act,
                    of_rank[number % len(of_rank)],
                    None,
                    n_normed=0,
                    eps=0.0,
                    unnormed_output=x[0],
                    pdl_level=PDLLevel.OVERLAP_AT_BEGINNING,
                ).launch
                for act, of_rank, x in zip(acts, weights, members, strict=True)
            )
            for number, members in enumerate(self._sets)
        ]


def launches(prepared: Sequence[Prepared[Any]]) -> Calls:
    return [one.launch for one in prepared]


def chained(gemvs: Calls, calls: Calls) -> Calls:
    """Each GEMV with the call behind it."""
    return [together(pair) for pair in zip(gemvs, calls, strict=True)]
