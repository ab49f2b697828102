# SPDX-License-Identifier: Apache-2.0
"""What a launch asked of memory: counts, never times.

Accesses are those of single threads; bytes are what the accesses named, whatever hardware would fetch for them.
"""

from __future__ import annotations

import functools
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


class Counters:
    """Counts of one launch: `total`, and `lines` by (file, line) of the source; and what its threads waited for:

    barriers    block and cluster barriers completed
    warp_ops    shuffles, votes and other warp operations completed
    resumes     times that a thread was run until it suspended; a measure of the emulator's own work

    Made of the native rows, one a site: size, reads and writes by whose memory it was, as in `runtime.cu`.
    """

    def __init__(
        self, rows: np.ndarray[Any, Any], sites: Sequence[Site], barriers: int, warp_ops: int, resumes: int
    ) -> None:
        self.barriers, self.warp_ops, self.resumes = barriers, warp_ops, resumes
        self._used = np.flatnonzero(rows[: len(sites), 0])
        self._rows = rows[self._used, :9]
        self._sites = sites

    @functools.cached_property
    def lines(self) -> dict[tuple[str, int], Count]:
        lines: dict[tuple[str, int], Count] = {}
        for i, row in zip(self._used.tolist(), self._rows.tolist(), strict=True):
            site = self._sites[i]
            key = (site.file or "", int(site.line or site.ptx_line))
            size, reads, writes = row[0], row[1:5], row[5:9]
            pairs = (n * size for pair in zip(reads, writes, strict=True) for n in pair)
            lines[key] = lines.get(key, Count()) + Count(max(sum(reads), sum(writes)), *pairs)
        return lines

    @functools.cached_property
    def total(self) -> Count:
        return sum(self.lines.values(), Count())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Counters):
            return NotImplemented
        mine, theirs = (self.barriers, self.warp_ops, self.resumes), (other.barriers, other.warp_ops, other.resumes)
        return mine == theirs and self.lines == other.lines

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Counters(total={self.total}, barriers={self.barriers}, warp_ops={self.warp_ops})"
