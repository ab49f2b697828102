# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tracing tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import drvfuse as df
from drvfuse import dtypes
from drvfuse.trace.decode import RECORD

PULL = ("one_stage", "two_stage")
PUSH = ("push_one_shot", "push_two_shot")
ALL_ALGOS = (*PULL, *PUSH, "naive")


def inputs(group: df.Group, rng: np.random.Generator, shape: Any, dtype: str = "bfloat16") -> list[df.Array]:
    """Signed random data on every rank."""
    element = dtypes.get(dtype).numpy
    return [rank.array(rng.standard_normal(shape, np.float32).astype(element)) for rank in group]


def bytes_of(result: Any) -> list[bytes]:
    """The bits of every array of a result."""
    lists = result if isinstance(result, tuple) else (result,)
    return [array.numpy().tobytes() for of_ranks in lists if of_ranks is not None for array in of_ranks]


def made(*rows: tuple[Any, ...]) -> np.ndarray:
    """Records made by hand: (rank, launch, block, role, peer, start, end), one cycle per nanosecond, all of one
    kernel.
    """
    return np.array(
        [
            (rank, launch, "kernel", block, 7, role, peer, start, end, start, end)
            for rank, launch, block, role, peer, start, end in rows
        ],
        RECORD,
    )
