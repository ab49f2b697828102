# SPDX-License-Identifier: Apache-2.0
"""The calls of ops that add, for the benchmark in `moves`: reduce-scatter, with and without norm, and many all-reduces
at once.

A size is that of a rank's input in bytes, of bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..ops.call.prepared import Prepared
from ..ops.collectives.allreduce_many import allreduce_many
from ..ops.collectives.reduce_scatter import reduce_scatter
from ..ops.collectives.reduce_scatter_rmsnorm_fp8 import reduce_scatter_rmsnorm_fp8
from ..runtime.array import Array
from .sum_worker import EPSILON, OPS, columns_of, tensors_of

ALGORITHMS = {
    "allreduce_many": ("push_one_shot", "push_two_shot", "auto"),
    "reduce_scatter": ("push", "pull", "auto"),
    "reduce_scatter_rmsnorm_fp8": ("push", "pull", "auto"),
}
__all__ = ["ALGORITHMS", "OPS", "Sums"]


class Sums:
    """Random inputs of a size in several sets, and outputs that the calls share. The fused op has a residual."""

    def __init__(self, group: Group, op: str, nbytes: int, sets: int) -> None:
        self._group, self._op = group, op
        columns = columns_of(nbytes, group.size)
        rows = nbytes // 2 // columns
        random, bf16 = np.random.default_rng(nbytes), dtypes.get("bfloat16").numpy
        host = random.standard_normal((rows, columns), np.float32).astype(bf16)

        def arrays() -> list[Array]:
            return [rank.array(np.roll(host, rank.index)) for rank in group]

        self.sets: list[Any] = [arrays() for _ in range(sets)]
        own = rows // group.size
        self._outputs: list[Any] = [rank.empty((own, columns), "bfloat16") for rank in group]
        if op == "allreduce_many":
            self.sets = [self._cut(members, nbytes) for members in self.sets]
            self._outputs = self._cut([rank.empty((rows, columns), "bfloat16") for rank in group], nbytes)
        self._norm: dict[str, Any] = {}
        if op == "reduce_scatter_rmsnorm_fp8":
            self._norm = {
                "gammas": [rank.array(np.linspace(0.5, 1.5, columns, dtype=np.float32).astype(bf16)) for rank in group],
                "epsilon": EPSILON,
                "residuals": [rank.zeros((own, columns), "bfloat16") for rank in group],
                "residual_outputs": self._outputs,
                "outputs": [rank.empty((own, columns), "float8_e4m3fn") for rank in group],
                "scales": [rank.empty((own,), "float32") for rank in group],
            }

    @staticmethod
    def _cut(arrays: list[Array], nbytes: int) -> list[list[Array]]:
        """Each array as several tensors of equal size."""
        count = tensors_of(nbytes)
        return [[rows[i] for i in range(count)] for rows in (array.reshape((count, -1)) for array in arrays)]

    def prepare(self, inputs: Any, **options: Any) -> Prepared[Any]:
        """A call of one of `sets`."""
        if self._op == "allreduce_many":
            return allreduce_many.prepare(self._group, inputs, self._outputs, **options)
        if self._op == "reduce_scatter":
            return reduce_scatter.prepare(self._group, inputs, self._outputs, **options)
        return reduce_scatter_rmsnorm_fp8.prepare(self._group, inputs, **self._norm, **options)
