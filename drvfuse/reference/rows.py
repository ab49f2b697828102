# SPDX-License-Identifier: Apache-2.0
"""The collectives that add the ranks' rows, norm and quantise them, in numpy, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..plans.quantisation import PER_ROW, Quantisation
from .arithmetic import NDArray
from .norm import norm_rows
from .sums import own_parts, owned_rows, total_of


class Normalised(NamedTuple):
    """The fused op's results: `scales` is None without quantisation, `residual` without a residual."""

    output: NDArray
    scales: NDArray | None
    residual: NDArray | None


def allreduce_rmsnorm_fp8(
    inputs: Sequence[NDArray],
    gamma: NDArray,
    epsilon: float,
    weight_offset: float = 0.0,
    residual: NDArray | None = None,
    *,
    norm: str = "rms",
    beta: NDArray | None = None,
    head_columns: int | None = None,
    quantisation: Quantisation = PER_ROW,
    multimem: bool = False,
    nodes: int | Sequence[int] = 1,
) -> Normalised:
    """Sum of the ranks' inputs [..., columns], plus residual, norm and quantisation of each row.

    Without a residual the norm reads the fp32 sum. With a residual it reads `residual` of the result: the sum plus the
    residual, rounded to the residual's dtype, which is that of the inputs or float32. `norm.normalise` describes
    `norm`, gamma and `beta`. With `Quantisation.none()` the result is what the op stores to `normed_outputs`.

    With `head_columns` the last dimension is split into heads of that number of columns, and each head is normalised as
    a row. gamma and `beta` have that number of elements, and the scales have one more dimension, for the heads.

    `multimem` and `nodes` are those of `allreduce`; sums by multimem are rounded to the inputs' dtype first.

    Inputs without rows give empty results. Rows without columns are refused, as by the op, since they have no mean.
    """
    found = norm_rows(
        "inputs[0]",
        total_of(inputs, multimem, nodes),
        dtypes.get(inputs[0].dtype),
        gamma,
        epsilon,
        weight_offset,
        residual,
        norm,
        beta,
        head_columns,
        quantisation,
    )
    return Normalised(found.output, found.scales, found.residual)


def reduce_scatter_rmsnorm_fp8(
    inputs: Sequence[NDArray],
    gamma: NDArray,
    epsilon: float,
    weight_offset: float = 0.0,
    residuals: Sequence[NDArray] | None = None,
    *,
    splits: Sequence[int] | None = None,
    norm: str = "rms",
    beta: NDArray | None = None,
    head_columns: int | None = None,
    quantisation: Quantisation = PER_ROW,
    nodes: int | Sequence[int] = 1,
) -> list[Normalised]:
    """For each rank, its rows of `allreduce_rmsnorm_fp8` of inputs [..., columns]; all leading dimensions count as
    rows.

    `residuals[i]` [rows of rank i, columns] is the residual of rank i.
    """
    shape = np.shape(inputs[0])
    counts = owned_rows(math.prod(shape[:-1]), len(inputs), splits)
    by_rank = zip(*(own_parts(np.asarray(values).reshape(-1, *shape[-1:]), counts) for values in inputs), strict=True)
    options: dict[str, Any] = {"norm": norm, "beta": beta, "head_columns": head_columns, "quantisation": quantisation}
    options["nodes"] = nodes
    added = [None] * len(inputs) if residuals is None else residuals
    return [
        allreduce_rmsnorm_fp8(own, gamma, epsilon, weight_offset, residual, **options)
        for own, residual in zip(by_rank, added, strict=True)
    ]
