# SPDX-License-Identifier: Apache-2.0
"""The collectives that only move bytes, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Host = npt.NDArray[Any]


def all_gather(inputs: Sequence[Host]) -> Host:
    """What every rank has: the ranks' rows, one behind the other."""
    return np.concatenate(inputs)


def broadcast(inputs: Sequence[Host], root: int = 0) -> Host:
    """What every rank has: the root's array."""
    return inputs[root].copy()


def all_to_all(inputs: Sequence[Host], splits: Sequence[Sequence[int]] | None = None) -> list[Host]:
    """What each rank has: from every rank the rows for it. `splits[i][j]` rows go from i to j; None: equally many."""
    ranks = len(inputs)
    cuts = [np.cumsum(splits[i])[:-1] if splits is not None else ranks for i in range(ranks)]
    parts = [np.split(values, cut) for values, cut in zip(inputs, cuts, strict=True)]
    return [np.concatenate([of_rank[j] for of_rank in parts]) for j in range(ranks)]
