# SPDX-License-Identifier: Apache-2.0
"""What a launch asked of memory: counts, never times.

Accesses are those of single threads; bytes are what the accesses named, whatever hardware would fetch for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .codegen import Site


@dataclass(frozen=True)
class Count:
    """Accesses and bytes. "local" is memory of the launch's own device, "remote" that of others, "host" pinned memory.

    An atomic counts as one access that reads and writes. Local memory and parameters are not counted in bytes.
    """

    accesses: int = 0
    local_read: int = 0
    local_written: int = 0
    remote_read: int = 0
    remote_written: int = 0
    host_read: int = 0
    host_written: int = 0
    shared_read: int = 0
    shared_written: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Counters:
    """Counts of one launch: `total`, `lines` by (file, line) of the source, and what its threads waited for.

    barriers    block and cluster barriers completed
    warp_ops    shuffles, votes and other warp operations completed
    resumes     times that a thread was run until it suspended; a measure of the emulator's own work
    """

    total: Count
    lines: dict[tuple[str, int], Count]
    barriers: int
    warp_ops: int
    resumes: int


def collect(rows: np.ndarray[Any, Any], sites: Sequence[Site], barriers: int, warp_ops: int, resumes: int) -> Counters:
    """Counters from the native rows, one a site: size, reads and writes by whose memory it was, as in `runtime.cu`."""
    total = Count()
    lines: dict[tuple[str, int], Count] = {}
    for i in np.flatnonzero(rows[: len(sites), 0]).tolist():
        key = (sites[i].file or "", int(sites[i].line or sites[i].ptx_line))
        size, *counts = (int(v) for v in rows[i, :9])
        reads, writes = counts[:4], counts[4:]
        pairs = (n * size for pair in zip(reads, writes, strict=True) for n in pair)
        count = Count(max(sum(reads), sum(writes)), *pairs)
        total += count
        lines[key] = lines.get(key, Count()) + count
    return Counters(total, lines, barriers, warp_ops, resumes)
