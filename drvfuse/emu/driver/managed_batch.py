# SPDX-License-Identifier: Apache-2.0
"""Calls that prefetch or discard several ranges of managed memory. They exist since CUDA 13. The ranges of one call are
not ordered with one another.
"""

from __future__ import annotations

from typing import Any

from ..machine.objects import Stream
from ..machine.process.process import Process
from ..machine.run.work import Command, Fill
from .batch import batch_stream
from .entry import check, entry
from .managed import managed_range, place_of


def _ranges(dptrs: Any, sizes: Any, count: int, flags: int) -> list[tuple[int, int]]:
    check(count > 0 and flags == 0)
    return list(zip(dptrs[:count], sizes[:count], strict=True))


def _prefetch(proc: Process, ranges: list[tuple[int, int]], locations: Any, starts: Any, count: int) -> None:
    """Prefetch ranges. Location i applies to the ranges from index `starts[i]` up to the start of the next location."""
    begins = starts[:count]
    check(0 < count <= len(ranges) and begins[0] == 0)
    check(all(a < b for a, b in zip(begins, [*begins[1:], len(ranges)], strict=True)))
    places = [place_of(proc, location) for location in locations[:count]]
    ranges_of = [managed_range(proc, *one) for one in ranges]
    for i, parts in enumerate(ranges_of):
        for advice, start, end in parts:
            advice.prefetched.set(start, end, places[sum(begin <= i for begin in begins) - 1])


def _discard(proc: Process, ranges: list[tuple[int, int]], stream: Stream) -> None:
    """Discard ranges. Their contents are undefined afterwards; here the bytes are zero, and count as written."""
    for one in ranges:
        managed_range(proc, *one)
    fills = [Fill(stream.context, address, 0, 1, nbytes) for address, nbytes in ranges]
    proc.machine.progress.enqueue_together(stream, fills)


@entry(bindings=13)
def cuMemPrefetchBatchAsync(
    proc: Process,
    dptrs: Any,
    sizes: Any,
    count: int,
    prefetchLocs: Any,
    prefetchLocIdxs: Any,
    numPrefetchLocs: int,
    flags: int,
    hStream: Any,
) -> None:
    """Sets the prefetch locations of ranges, which cuMemRangeGetAttribute returns. Nothing is moved."""
    stream = batch_stream(proc, hStream)
    _prefetch(proc, _ranges(dptrs, sizes, count, flags), prefetchLocs, prefetchLocIdxs, numPrefetchLocs)
    proc.enqueue(stream, Command(stream.context))


@entry(bindings=13)
def cuMemDiscardBatchAsync(proc: Process, dptrs: Any, sizes: Any, count: int, flags: int, hStream: Any) -> None:
    """Declares that the contents of ranges of managed memory are no longer needed."""
    stream = batch_stream(proc, hStream)
    _discard(proc, _ranges(dptrs, sizes, count, flags), stream)


@entry(bindings=13)
def cuMemDiscardAndPrefetchBatchAsync(
    proc: Process,
    dptrs: Any,
    sizes: Any,
    count: int,
    prefetchLocs: Any,
    prefetchLocIdxs: Any,
    numPrefetchLocs: int,
    flags: int,
    hStream: Any,
) -> None:
    """Discards and prefetches the same ranges."""
    stream, ranges = batch_stream(proc, hStream), _ranges(dptrs, sizes, count, flags)
    _prefetch(proc, ranges, prefetchLocs, prefetchLocIdxs, numPrefetchLocs)
    _discard(proc, ranges, stream)
