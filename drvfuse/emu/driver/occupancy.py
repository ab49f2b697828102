# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a kernel a multiprocessor holds."""

from __future__ import annotations

import ctypes
from typing import Any

from ..machine import residency
from ..machine.machine import Machine
from ..machine.objects import Function
from .entry import check, entry, number
from .module import function_of


def _blocks(m: Machine, function: Function, threads: int, smem: int) -> int:
    return residency.blocks_per_sm(m.limits, function, threads, smem)


@entry(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(m: Machine, func: Any, blockSize: int, dynamicSMemSize: int) -> int:
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(m, func, blockSize, dynamicSMemSize, 0)


@entry(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    m: Machine, func: Any, blockSize: int, dynamicSMemSize: int, flags: int
) -> int:
    function = function_of(m, func)
    check(blockSize > 0 and dynamicSMemSize >= 0 and int(flags) in (0, 1))
    return _blocks(m, function, blockSize, dynamicSMemSize)


@entry(2)
def cuOccupancyMaxPotentialBlockSize(
    m: Machine, func: Any, blockSizeToDynamicSMemSize: Any, dynamicSMemSize: int, blockSizeLimit: int
) -> tuple[int, int]:
    """The block size with the most resident threads; the larger one of equals, as the driver chooses."""
    function = function_of(m, func)
    limit = residency.max_threads(function)
    if blockSizeLimit > 0:
        limit = min(limit, blockSizeLimit)
    smem = _smem_function(blockSizeToDynamicSMemSize, dynamicSMemSize)
    best = (0, 0, 0)
    for threads in {limit, *range(32, limit + 1, 32)}:
        blocks = _blocks(m, function, threads, smem(threads))
        best = max(best, (blocks * threads, threads, blocks))
    check(best[0])
    return best[2] * m.sm_count, best[1]


def _smem_function(callback: Any, fixed: int) -> Any:
    address = number(callback)
    if address == 0:
        return lambda threads: fixed
    return ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(address)


@entry(1)
def cuOccupancyAvailableDynamicSMemPerBlock(m: Machine, func: Any, numBlocks: int, blockSize: int) -> int:
    function = function_of(m, func)
    check(numBlocks > 0 and blockSize > 0)
    each = m.limits.shared // numBlocks // 128 * 128 - residency.SHARED_RESERVED - function.code.shared_static
    check(_blocks(m, function, blockSize, 0) >= numBlocks)
    return max(0, min(each, m.limits.shared_block - function.code.shared_static))
