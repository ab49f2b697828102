# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernels in drvfuse/check/cu with protocols that other libraries use, and drvfuse does not."""

from __future__ import annotations

import ctypes

import numpy as np

from ..structures import laid_out
from .run import Run

_MAX_RANKS, _SLOTS = 8, 8


@laid_out("../check/cu/slots.cu", sizes={"MAX_RANKS": _MAX_RANKS})
class Peers(ctypes.Structure):
    """The memory of all ranks."""


def slots(run: Run, ranks: int = 2, count: int = 300) -> None:
    """Check the kernel `slots`: launches with one block alternate with launches with several blocks, and the host waits
    only at the end."""
    with run.group(ranks, workspace_bytes=4096, max_blocks=1) as group:
        kernel = run.kernel(group.driver, "slots")
        data = [rank.zeros(count, "uint32") for rank in group]
        flags = [rank.zeros(_SLOTS * _MAX_RANKS, "uint32") for rank in group]
        peers = Peers()
        peers.data[:ranks] = [array.ptr for array in data]
        peers.flags[:ranks] = [array.ptr for array in flags]
        grids = (1, int(run.choice((2, 3, 4))), 1, _SLOTS)
        sums = [[rank.zeros(count, "uint32") for rank in group] for _ in grids]
        for rank in group:
            kernel.load(rank.device)
        group.synchronize()
        for number, blocks in enumerate(grids):
            for rank in run.shuffled(list(group)):
                value = 1000 * number + 100 * rank.index
                arguments = (peers, sums[number][rank.index], count, rank.index, ranks, value, 2 * number % 3)
                kernel.prepare(blocks, 64, *arguments, device=rank.device)(rank.stream)
        group.synchronize()
        for number, of_call in enumerate(sums):
            values = sum(np.arange(count) + 1000 * number + 100 * rank for rank in range(ranks))
            for index, array in enumerate(of_call):
                run.compare(f"slots, call {number}, rank {index}", array.numpy(), np.asarray(values, np.uint32))


def last_block(run: Run, count: int = 5000) -> None:
    """Check the kernel `last_block`: grids of different sizes compute the same sum."""
    with run.group(1, workspace_bytes=4096, max_blocks=1) as group:
        (rank,) = group
        kernel = run.kernel(group.driver, "last_block")
        host = np.random.default_rng(7).integers(0, 1 << 16, count, np.uint32)
        x, partial, counter = rank.array(host), rank.zeros(8, "uint32"), rank.zeros(1, "uint32")
        sums = [rank.zeros(1, "uint32") for _ in range(3)]
        for total in sums:
            blocks = int(run.random.integers(2, 9))
            kernel.prepare(blocks, 32, x, count, partial, counter, total, device=rank.device)(rank.stream)
        group.synchronize()
        for number, total in enumerate(sums):
            run.compare(f"last_block, call {number}", total.numpy(), np.array([host.sum()], np.uint32))
