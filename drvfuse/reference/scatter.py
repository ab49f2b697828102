# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter in numpy, bit for bit: each rank's part of the result of the all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..dtypes import DTypeLike
from ..errors import ArgumentError
from ..plans.quantisation import PER_ROW, Quantisation
from ..plans.scatter import split_rows
from .arithmetic import Floats, NDArray
from .collectives import Normalised, allreduce, allreduce_rmsnorm_fp8


def _rows(rows: int, ranks: int, splits: Sequence[int] | None) -> Sequence[int]:
    if splits is None:
        return split_rows(rows, ranks)
    if len(splits) != ranks or sum(splits) != rows or min(splits) < 0:
        raise ArgumentError("splits", list(splits), f"{ranks} numbers of rows, each 0 or more, with the sum {rows}")
    return splits


def _parts(values: NDArray, splits: Sequence[int]) -> list[NDArray]:
    return np.split(values, np.cumsum(splits)[:-1])


def reduce_scatter(
    inputs: Sequence[NDArray],
    splits: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[[Floats], NDArray] | None = None,
    *,
    nodes: int | Sequence[int] = 1,
) -> list[NDArray]:
    """For each rank, its rows of `allreduce(inputs, dtype, epilogue, nodes=nodes)`.

    `splits` has the number of rows, along dimension 0, of each rank. If `splits` is None, the numbers are as equal as
    possible, and the first (rows mod ranks) ranks have one row more than the others.
    """
    total = allreduce(inputs, dtype, epilogue, nodes=nodes)
    if not total.ndim:
        raise ArgumentError("inputs[0]", "of shape ()", "of at least one dimension")
    return _parts(total, _rows(total.shape[0], len(inputs), splits))


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
    counts = _rows(math.prod(shape[:-1]), len(inputs), splits)
    by_rank = zip(*(_parts(np.asarray(values).reshape(-1, *shape[-1:]), counts) for values in inputs), strict=True)
    options: dict[str, Any] = {"norm": norm, "beta": beta, "head_columns": head_columns, "quantisation": quantisation}
    options["nodes"] = nodes
    added = [None] * len(inputs) if residuals is None else residuals
    return [
        allreduce_rmsnorm_fp8(own, gamma, epsilon, weight_offset, residual, **options)
        for own, residual in zip(by_rank, added, strict=True)
    ]
