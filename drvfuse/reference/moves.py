# SPDX-License-Identifier: Apache-2.0
"""The collectives that only move bytes, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

Host = npt.NDArray[Any]


def all_gather(inputs: Sequence[Host]) -> Host:
    """The result on every rank: the rows of all ranks, in the order of the ranks."""
    return np.concatenate(inputs)


def broadcast(inputs: Sequence[Host], root: int = 0) -> Host:
    """The result on every rank: the root's array."""
    if root not in range(len(inputs)):
        raise ArgumentError("root", repr(root), f"a rank, 0 to {len(inputs) - 1}")
    return inputs[root].copy()


def all_to_all(inputs: Sequence[Host], splits: Sequence[Sequence[int]] | None = None) -> list[Host]:
    """The result on each rank: the rows that all ranks send to it. Rank i sends `splits[i][j]` rows to rank j; None
    stands for equal numbers of rows."""
    ranks = len(inputs)
    if splits is None:
        if any(len(values) % ranks for values in inputs):
            raise ArgumentError("inputs", f"of {[*map(len, inputs)]} rows", f"of a multiple of {ranks} rows each")
        splits = [[len(values) // ranks] * ranks for values in inputs]
    elif [(len(row), sum(row), min(row) >= 0) for row in splits] != [(ranks, len(values), True) for values in inputs]:
        wanted = f"{ranks} rows of {ranks} numbers of rows, with the sums {[*map(len, inputs)]}"
        raise ArgumentError("splits", repr(splits), wanted)
    cuts = [np.cumsum(row)[:-1] for row in splits]
    parts = [np.split(values, cut) for values, cut in zip(inputs, cuts, strict=True)]
    return [np.concatenate([of_rank[j] for of_rank in parts]) for j in range(ranks)]
