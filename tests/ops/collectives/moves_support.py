# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of collectives that move bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.ops.collectives.moves.kernel import ALGOS
from drvfuse.plans.quantisation import Quantisation as Q

ALL_ALGOS = (*ALGOS, "naive")
SEVERAL = 2 if os.environ.get("DRVFUSE_TEST_DRIVER") == "cuda" else 3
"""The number of ranks of most tests: 2 on GPUs, as most machines have no more."""
LAYOUTS = {
    "FP8, columns of floats": (Q.per_group(64, layout="column"), 320),
    "FP8, columns of E8M0": (Q.per_group(64, scales="float8_e8m0fnu", layout="column"), 320),
    "MXFP8, columns": (Q.mxfp8("float8_e5m2", layout="column"), 96),
    "MXFP8, tiles": (Q.mxfp8(layout="tiles"), 416),
    "NVFP4, tiles": (Q.nvfp4(0.5, layout="tiles"), 144),
    "NVFP4, rows": (Q.nvfp4(0.5), 144),
    "FP8, a scale for each row": (Q.per_row(), 48),
}


def words(rng: np.random.Generator, shape: int | Sequence[int], dtype: str = "uint8") -> np.ndarray:
    """Random bytes; every fourth word is 0xFFFFFFFF, the sentinel of an empty slot."""
    element = dtypes.get(dtype).numpy
    nbytes = int(np.prod(shape)) * element.itemsize
    found = rng.integers(0, 2**32, -(-nbytes // 4), np.uint32)
    found[rng.random(found.size) < 0.25] = 0xFFFFFFFF
    return found.view(np.uint8)[:nbytes].view(element).reshape(shape)


def off(rank: df.Rank, host: np.ndarray, by: int) -> df.Array:
    """The array at an address `by` bytes above a multiple of 16."""
    memory = rank.array(np.zeros(host.nbytes + 16, np.uint8))
    array = df.view(memory.ptr + by, host.shape, dtypes.get(host.dtype), rank.device, owner=memory)
    array.copy_from(host)
    return array


def exchange_table(rng: np.random.Generator, n: int, most: int = 9) -> list[list[int]]:
    """A random table whose entry [i][j] is the number of rows from rank i to rank j, below `most`; some are 0."""
    return (rng.integers(0, most, (n, n)) * (rng.random((n, n)) < 0.8)).tolist()


def quantised(rng, rows, columns, made):
    """Codes and scales of the rows of each rank. All scales differ, and the padding is 0xFF."""
    codes, scales = [], []
    for count in rows:
        y = rng.standard_normal((count, columns)) * np.exp2(rng.integers(-20, 20, (count, columns // 16))).repeat(16, 1)
        found = reference.quantise(y.astype(np.float32), made)
        kept = found.scales.copy()
        if made.layout != "row":
            used = reference.quantised.arrange(np.ones((count, made.groups(columns)), np.uint8), made) != 0
            kept.view(np.dtype(f"u{kept.itemsize}"))[~used] = np.iinfo(np.dtype(f"u{kept.itemsize}")).max
        codes.append(found.output)
        scales.append(kept)
    return codes, scales


def on_ranks(group, hosts, dtype):
    """Host arrays as arrays on the ranks' devices, of a dtype that numpy may not have."""
    arrays = [rank.empty(host.shape, dtype) for rank, host in zip(group, hosts, strict=True)]
    for array, host in zip(arrays, hosts, strict=True):
        if host.size:
            array.copy_from(host)
    return arrays
