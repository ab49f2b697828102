# SPDX-License-Identifier: Apache-2.0
"""Queries of the number of blocks of a kernel that are resident on a multiprocessor, and of clusters on a device."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R
from ..machine.objects import Function
from ..machine.process.process import Process
from ..machine.run import residency
from . import launch
from .entry import check, entry
from .module import function_of


def _blocks(proc: Process, function: Function, threads: int, smem: int) -> int:
    return residency.blocks_per_sm(proc.machine.limits, function, threads, smem)


@entry(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(proc: Process, func: Any, blockSize: int, dynamicSMemSize: int) -> int:
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(proc, func, blockSize, dynamicSMemSize, 0)


@entry(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    proc: Process, func: Any, blockSize: int, dynamicSMemSize: int, flags: int
) -> int:
    function = function_of(proc, func)
    check(blockSize > 0 and dynamicSMemSize >= 0 and flags in (0, 1))
    return _blocks(proc, function, blockSize, dynamicSMemSize)


@entry(2)
def cuOccupancyMaxPotentialBlockSize(
    proc: Process, func: Any, blockSizeToDynamicSMemSize: Any, dynamicSMemSize: int, blockSizeLimit: int
) -> tuple[int, int]:
    """Returns the block size with the most resident threads. If several sizes have equally many, it is the largest of
    these, as with the driver.
    """
    return cuOccupancyMaxPotentialBlockSizeWithFlags(
        proc, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit, 0
    )


@entry(2)
def cuOccupancyMaxPotentialBlockSizeWithFlags(
    proc: Process, func: Any, blockSizeToDynamicSMemSize: Any, dynamicSMemSize: int, blockSizeLimit: int, flags: int
) -> tuple[int, int]:
    check(flags in (0, 1))
    function = function_of(proc, func)
    limit = residency.max_threads(function)
    if blockSizeLimit > 0:
        limit = min(limit, blockSizeLimit)
    smem = _smem_function(blockSizeToDynamicSMemSize, dynamicSMemSize)
    best = (0, 0, 0)
    for threads in {limit, *range(32, limit + 1, 32)}:
        blocks = _blocks(proc, function, threads, smem(threads))
        best = max(best, (blocks * threads, threads, blocks))
    check(best[0])
    return best[2] * proc.machine.sm_count, best[1]


def _smem_function(callback: Any, fixed: int) -> Any:
    if callback == 0:
        return lambda threads: fixed
    return ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(callback)


@entry(1)
def cuOccupancyAvailableDynamicSMemPerBlock(proc: Process, func: Any, numBlocks: int, blockSize: int) -> int:
    function = function_of(proc, func)
    check(numBlocks > 0 and blockSize > 0)
    each = (
        proc.machine.limits.shared // numBlocks // 128 * 128 - residency.SHARED_RESERVED - function.code.shared_static
    )
    check(_blocks(proc, function, blockSize, 0) >= numBlocks)
    return max(0, min(each, proc.machine.limits.shared_block - function.code.shared_static))


def _config(config: Any) -> tuple[Any, int, int]:
    """(shape of clusters, or None; threads per block; bytes of dynamic shared memory) of a CUlaunchConfig."""
    check(config is not None)
    threads = config.blockDimX * config.blockDimY * config.blockDimZ
    check(threads > 0)
    return launch.attributes_of(config).cluster, threads, config.sharedMemBytes


@entry(1)
def cuOccupancyMaxPotentialClusterSize(proc: Process, func: Any, config: Any) -> int:
    """Returns the largest number of blocks of a cluster that fits on a device."""
    function = function_of(proc, func)
    _, threads, smem = _config(config)
    check(proc.machine.capability >= (9, 0), R.CUDA_ERROR_NOT_SUPPORTED)
    each, most = _blocks(proc, function, threads, smem), launch.most_blocks(function)
    return max(
        (n for n in (1, 2, 4, 8, 16) if n <= most and residency.clusters(proc.machine.sm_count, each, n)), default=0
    )


@entry(1)
def cuOccupancyMaxActiveClusters(proc: Process, func: Any, config: Any) -> int:
    """Returns how many clusters of the launch fit on an otherwise empty device. That may be 0."""
    function = function_of(proc, func)
    asked, threads, smem = _config(config)
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    x, y, z = launch.cluster_of(proc, function, grid, asked) or (1, 1, 1)
    return residency.clusters(proc.machine.sm_count, _blocks(proc, function, threads, smem), x * y * z)
