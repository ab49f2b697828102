# SPDX-License-Identifier: Apache-2.0
"""How `rmsnorm_fp8` divides rows among threads. Results do not depend on a plan, bit for bit."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ArgumentError
from .limits import Limits, ceil_div
from .rows import MAX_COLUMNS, MAX_ROWS
from .shared import PACK_BYTES

MAX_THREADS = 512  # the maximum number of threads per block of cu/norm/rmsnorm_fp8.cu
CLUSTER_CAPABILITY = (9, 0)
_LANES_THREADS = 128  # threads of a block whose warps hold several rows each
# Floats of a row in a thread's registers. The numbers below were measured on an H200 (docs/performance.md).
_FLOATS = 32, 8  # floats per thread with many rows: without a residual, with a residual
_LANES_FLOATS = 16  # floats per thread with many rows, if several rows share a warp
_FEW_FLOATS = 8  # floats per thread with few rows
_MANY_ROWS = 2  # rows are many if there are more than this number per multiprocessor
_MAX_CLUSTER = 8  # the maximum number of blocks of a cluster
_FEW_THREADS = 128  # if a block has more packs of a row than this, more blocks may share the row


class NormShape(NamedTuple):
    """How threads hold rows in registers."""

    lanes: int
    """Lanes of a warp that hold a row; 0: blocks hold rows."""
    threads: int
    """Threads of a block."""
    packs: int
    """Packs of a row that a thread holds."""
    cluster: int
    """Blocks that hold a row together."""
    exact: bool
    """Whether every thread has `packs` packs of a row."""

    @classmethod
    def of(cls, limits: Limits, rows: int, columns: int, itemsize: int, residual: bool) -> NormShape:
        """The shape for 1 to MAX_ROWS rows of 1 to MAX_COLUMNS columns.

        Short rows are held by some lanes of a warp. With many rows a block works on one row at a time, with a few packs
        of it in each thread, so that the row's reduction costs little. Few rows that are long, and leave
        multiprocessors idle, are shared by clusters.
        """
        if rows > MAX_ROWS:
            raise ArgumentError("rows", rows, f"at most {MAX_ROWS}")
        if not 1 <= columns <= MAX_COLUMNS:
            raise ArgumentError("columns", columns, f"1 to {MAX_COLUMNS}")
        row_packs = ceil_div(columns * itemsize, PACK_BYTES)
        cluster, many = 1, rows > _MANY_ROWS * limits.sm_count
        if row_packs <= 32:
            all_packs = _power_of_two(row_packs)
            packs = min((_LANES_FLOATS if many else _FEW_FLOATS) * itemsize // PACK_BYTES, all_packs)
            return cls(all_packs // packs, _LANES_THREADS, packs, 1, row_packs == all_packs)
        packs = (_FLOATS[residual] if many else _FEW_FLOATS) * itemsize // PACK_BYTES
        if not many and row_packs > MAX_THREADS and limits.capability >= CLUSTER_CAPABILITY:
            while cluster < _MAX_CLUSTER and _shared_further(row_packs, rows, cluster, limits.sm_count):
                cluster *= 2
        packs = max(packs, _power_of_two(ceil_div(row_packs, cluster * MAX_THREADS)))
        threads = ceil_div(ceil_div(row_packs, cluster * packs), 32) * 32
        return cls(0, threads, packs, cluster, row_packs == cluster * threads * packs)

    def grid(self, rows: int, resident: int) -> int:
        """The number of blocks: at most `resident`, the number that can run at the same time."""
        if self.lanes:
            return max(1, min(ceil_div(rows * self.lanes, self.threads), resident))
        return max(1, min(rows, resident // self.cluster)) * self.cluster

    def phases(self, rows: int, grid: int) -> int:
        """The largest number of phases that a traced block records."""
        teams = grid * self.threads // self.lanes if self.lanes else grid // self.cluster
        return 2 + 3 * ceil_div(rows, teams)


def _shared_further(row_packs: int, rows: int, cluster: int, multiprocessors: int) -> bool:
    """Whether 2 * `cluster` blocks should hold a row together: each needs enough packs for whole warps, and a
    multiprocessor of its own."""
    return ceil_div(row_packs, cluster) > _FEW_THREADS and 2 * cluster * rows <= multiprocessors


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
