# SPDX-License-Identifier: Apache-2.0
"""How all-reduces and reduce-scatters divide their work: grids, chunks, and the part of a tensor that each rank owns
after a reduce-scatter, with the bytes that such a call moves.

In a reduce-scatter a rank sums its part as a one-stage all-reduce sums a whole tensor. So grids, chunks, rounds and
traces are those of an all-reduce of the largest part, which is the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .limits import ceil_div
from .push import GREETINGS_BYTES
from .shared import MAX_BLOCKS, MAX_THREADS, PACK_BYTES, LaunchShape, Work, chunk_of
from .traffic import NONE, Traffic
from .tuning import Costs


def launch(count: int, itemsize: int, ranks: int, algo: str, max_blocks: int, multimem: bool = False) -> LaunchShape:
    """Grid and block for `count` >= 1 elements: one thread per pack that the rank sums, if `max_blocks` allows that.

    A thread has up to eight loads in flight, and at most four sums. With `multimem` a sum takes one load.
    """
    packs = ceil_div(count * itemsize, PACK_BYTES)
    if algo == "two_stage":
        packs = ceil_div(packs, ranks)
    threads = 256 if packs <= 256 * 64 else MAX_THREADS
    blocks = min(ceil_div(packs, threads), max_blocks, MAX_BLOCKS)
    return LaunchShape(blocks, threads, min(4, max(1, 8 // (1 if multimem else ranks))))


def chunk(work: Work, count: int, payload_bytes: int) -> int:
    """The number of packs of a chunk: all packs, or as many as the payload holds; 1 for a kernel without chunks."""
    packs = ceil_div(count, work.width)
    out_bytes = work.width * work.out_itemsize
    if work.algo == "two_stage":
        packs = ceil_div(packs, work.ranks)
        if work.to_outputs:
            return packs
        each = work.ranks * PACK_BYTES + out_bytes if work.staged else 2 * out_bytes
        if work.multimem:
            each = work.ranks * PACK_BYTES * (1 if work.staged else 2)
    elif work.staged:
        each = 2 * PACK_BYTES
    else:
        return 1
    return chunk_of(packs, each, payload_bytes, "16-byte pack of every rank")


def split_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """The number of rows of each rank. The first (rows mod ranks) ranks have one row more than the others."""
    return tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks))


@dataclass(frozen=True)
class Parts:
    """The parts of a tensor, in elements: rank r owns [starts[r], starts[r + 1]), in the order of the ranks.

    A pack is `width` elements from a multiple of `width` on, so the parts of two ranks may share a pack.
    """

    starts: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, rows: Sequence[int], row_elements: int, width: int) -> Parts:
        """The parts for the given number of rows of each rank."""
        return cls(tuple(itertools.accumulate((count * row_elements for count in rows), initial=0)), width)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The elements [begin, end) of each rank's part."""
        return list(itertools.pairwise(self.starts))

    def first(self, rank: int) -> int:
        """The index of the pack in which the part of a rank begins."""
        return self.starts[rank] // self.width

    def packs(self, rank: int) -> int:
        """The number of packs that contain at least one element of a rank's part."""
        begin, end = self.starts[rank], self.starts[rank + 1]
        return ceil_div(end, self.width) - begin // self.width if begin < end else 0

    @property
    def largest(self) -> int:
        """Packs of the largest part."""
        return max(map(self.packs, range(len(self.starts) - 1)))

    @property
    def ragged(self) -> bool:
        """Whether a part begins or ends within a pack."""
        return any(start % self.width for start in self.starts)


def depth(packs: int) -> int:
    """The number of units that a block of a push call sends before it sums the first, for a largest part of `packs`
    packs: 0 if blocks have few units."""
    return 2 if packs >= 1 << 18 else 0


ROUND_US = 9.0
"""The time that each further round of a push call takes on 2 H200 (docs/performance.md)."""


def pulls(costs: Costs, received: int, half_bytes: int) -> bool:
    """Whether loading `received` bytes from peers takes less time than pushing them into slots, round by round."""
    rounds = max(1, ceil_div(received, half_bytes - GREETINGS_BYTES))
    pushed = costs.scatter_push.microseconds(received) + (rounds - 1) * ROUND_US
    return costs.scatter_pull.microseconds(received) < pushed


def naive_chunks(parts: Parts, rank: int, packs: int, chunks: int) -> list[tuple[int, int]]:
    """The elements [begin, end) of a rank's part in each of its chunks of `packs` packs; the last chunks may be
    empty.
    """
    begin, end = parts.starts[rank], parts.starts[rank + 1]
    bounds = [(parts.first(rank) + chunk * packs) * parts.width for chunk in range(chunks + 1)]
    bounds[0] = begin
    return [(min(low, end), min(high, end)) for low, high in itertools.pairwise(bounds)]


def traffic(algo: str, ranks: int, nbytes: int, staged: bool) -> Traffic:
    """Traffic of summing inputs of `nbytes`, where each rank sums its part; writing the results is not counted.

    The packs that a push call sends beyond the ends of parts are not counted either.
    """
    others = (ranks - 1) * nbytes  # what all ranks together take from their peers
    read = Traffic(ranks * nbytes, 0)
    if algo == "push":  # words are stored remotely, and polled and cleared locally
        return read + Traffic(2 * others, others)
    if algo == "naive":  # peers' inputs are copied to slots, which are then read
        return Traffic(nbytes + 2 * others, others)
    staging = Traffic(2 * others, 0) if staged else NONE
    return staging + Traffic(nbytes, others)
