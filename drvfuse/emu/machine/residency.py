# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a kernel fit on a multiprocessor, and how many clusters of them on a device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .objects import Function

REGISTERS_PER_THREAD = 32
"""Registers per thread that every kernel is assumed to use, as PTX does not say."""
SHARED_RESERVED = 1024  # shared memory that the system takes in each block
SHARED_DEFAULT = 48 << 10
MAX_THREADS_PER_BLOCK = 1024
PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16
"""Blocks of a cluster, without and with CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""
_GPCS = (18, 18, 18, 18, 18, 18, 16, 8)
"""Multiprocessors of each GPC, so that 66, 30, 15 and 7 clusters of 2, 4, 8 and 16 blocks that fill a multiprocessor
each are resident on 132 of them, as was measured on an H200. Smaller devices have the first ones, larger ones these
again.
"""


@dataclass(frozen=True)
class Limits:
    """Resources of a multiprocessor: threads, blocks, bytes; `shared_block` is the most that a block may ask."""

    threads: int
    blocks: int
    shared: int
    shared_block: int
    registers: int = 65536


def max_threads(function: Function) -> int:
    """The most threads a block of this kernel may have."""
    return int(function.code.max_threads or MAX_THREADS_PER_BLOCK)


def registers(limits: Limits, function: Function) -> int:
    """Registers per thread."""
    return min(REGISTERS_PER_THREAD, limits.registers // max_threads(function))


def blocks_per_sm(limits: Limits, function: Function, threads: int, smem: int) -> int:
    """Resident blocks of one multiprocessor for a block of so many threads with so much dynamic shared memory."""
    if not 0 < threads <= max_threads(function):
        return 0
    warps = -(-threads // 32)
    shared = function.code.shared_static + smem
    if shared > limits.shared_block:
        return 0
    return min(
        limits.blocks,
        limits.threads // (warps * 32),
        limits.registers // (warps * 32 * registers(limits, function)),
        limits.shared // (-(-(shared + SHARED_RESERVED) // 128) * 128),
    )


def clusters(sm_count: int, each: int, blocks: int) -> int:
    """The number of clusters of `blocks` blocks that a device holds, if each multiprocessor holds `each` blocks. All
    blocks of a cluster are in one GPC. Without clusters (of one block) all multiprocessors count alike.
    """
    if blocks == 1:
        return sm_count * each
    found, left = 0, sm_count
    for gpc in itertools.cycle(_GPCS):
        found += min(gpc, left) * each // blocks
        left -= gpc
        if left <= 0:
            return found
    raise AssertionError
