# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a kernel fit on a multiprocessor, and how many clusters of them on a device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..objects import Function

REGISTERS_PER_THREAD = 32
"""The registers per thread that every kernel is assumed to use, as PTX does not determine them."""
SHARED_RESERVED = 1024  # bytes of shared memory that the system reserves in each block
SHARED_DEFAULT = 48 << 10
MAX_THREADS_PER_BLOCK = 1024
PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16
"""The most blocks of a cluster, without and with CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""
_GPCS = (18, 18, 18, 18, 18, 18, 16, 8)
"""How many multiprocessors each GPC of a device with 132 multiprocessors has. With these numbers, 66, 30, 15 and 7
clusters of 2, 4, 8 and 16 blocks are resident if each block fills a multiprocessor, as was measured on an H200. For
another number of multiprocessors, a device has as many of these GPCs as it needs, from the first on and repeatedly.
"""


@dataclass(frozen=True)
class Limits:
    """How many threads, blocks, bytes of shared memory and registers a multiprocessor has. `shared_block` is how many
    bytes of shared memory one block may have.
    """

    threads: int
    blocks: int
    shared: int
    shared_block: int
    registers: int = 65536


def max_threads(function: Function) -> int:
    """The most threads that a block of this kernel may have."""
    return int(function.code.max_threads or MAX_THREADS_PER_BLOCK)


def registers(limits: Limits, function: Function) -> int:
    """The registers per thread that a kernel is assumed to use: so few that a block of `max_threads` threads fits."""
    return min(REGISTERS_PER_THREAD, limits.registers // max_threads(function))


def blocks_per_sm(limits: Limits, function: Function, threads: int, smem: int) -> int:
    """The most resident blocks per multiprocessor, for blocks of `threads` threads with `smem` bytes of dynamic shared
    memory.
    """
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
    """The most clusters of `blocks` blocks that can be resident on a device, if a multiprocessor holds `each` blocks.
    All blocks of a cluster are in one GPC. For clusters of one block, GPCs do not matter.
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
