# SPDX-License-Identifier: Apache-2.0
"""The collectives that only move bytes, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from ..errors import ArgumentError, shown
from ..plans.quantisation import Quantisation
from .arithmetic import NDArray
from .quantised import arrange, scales_by_row


@overload
def all_gather(inputs: Sequence[NDArray], scales: None = None, quantisation: Quantisation | None = None) -> NDArray: ...
@overload
def all_gather(
    inputs: Sequence[NDArray], scales: Sequence[NDArray], quantisation: Quantisation | None = None
) -> tuple[NDArray, NDArray]: ...
def all_gather(
    inputs: Sequence[NDArray], scales: Sequence[NDArray] | None = None, quantisation: Quantisation | None = None
) -> NDArray | tuple[NDArray, NDArray]:
    """The result on every rank: the rows of all ranks, in the order of the ranks; with `scales` it is (rows, scales).

    Scales have one row for each row of the inputs, or, with `quantisation`, its layout. The gathered scales have the
    same layout.
    """
    rows = np.concatenate(inputs)
    if scales is None:
        return rows
    if quantisation is None or quantisation.layout == "row":
        return rows, np.concatenate(scales)
    lanes = 1 if quantisation.dtype is None else quantisation.dtype.lanes
    by_row = [
        scales_by_row(of_rank, quantisation, codes.shape[:-1], codes.shape[-1] * lanes)
        for codes, of_rank in zip(inputs, scales, strict=True)
    ]
    return rows, arrange(np.concatenate(by_row), quantisation)


def broadcast(inputs: Sequence[NDArray], root: int = 0) -> NDArray:
    """The result on every rank: the root's array."""
    if root not in range(len(inputs)):
        raise ArgumentError("root", shown(root), f"a rank, 0 to {len(inputs) - 1}")
    return inputs[root].copy()


def all_to_all(inputs: Sequence[NDArray], splits: Sequence[Sequence[int]] | None = None) -> list[NDArray]:
    """The result on each rank: the rows that all ranks send to it. Rank i sends `splits[i][j]` rows to rank j;
    without `splits` it sends equally many rows to every rank."""
    ranks = len(inputs)
    if splits is None:
        if any(len(values) % ranks for values in inputs):
            raise ArgumentError("inputs", f"of {[*map(len, inputs)]} rows", f"of a multiple of {ranks} rows each")
        splits = [[len(values) // ranks] * ranks for values in inputs]
    elif [(len(row), sum(row), min(row) >= 0) for row in splits] != [(ranks, len(values), True) for values in inputs]:
        wanted = f"for each of {ranks} ranks a list of {ranks} numbers of rows, with the sums {[*map(len, inputs)]}"
        raise ArgumentError("splits", shown(splits), wanted)
    cuts = [np.cumsum(row)[:-1] for row in splits]
    parts = [np.split(values, cut) for values, cut in zip(inputs, cuts, strict=True)]
    return [np.concatenate([of_rank[j] for of_rank in parts]) for j in range(ranks)]
