# SPDX-License-Identifier: Apache-2.0
"""The parts of a tensor that ranks own, and when a rank loads them instead of receiving them."""

from __future__ import annotations

import numpy as np

from drvfuse.plans import sums as scatter
from drvfuse.plans.push import half_bytes
from drvfuse.plans.tuning import HOPPER


def test_rows_are_split_as_numpy_does():
    for rows in (0, 1, 5, 8, 1001):
        for ranks in range(1, 9):
            expected = tuple(len(part) for part in np.array_split(np.empty(rows), ranks))
            assert scatter.split_rows(rows, ranks) == expected


def test_packs_of_parts_cover_each_element_once():
    for counts, row in (((3, 2, 2), 3), ((0, 5, 0, 1), 7), ((1, 1, 1), 1), ((2, 2), 8)):
        parts = scatter.Parts.of(counts, row, 8)
        assert parts.ragged == any(start % 8 for start in parts.starts)
        for rank, count in enumerate(counts):
            elements = range(parts.starts[rank], parts.starts[rank + 1])
            assert len(elements) == count * row
            packs = {element // 8 for element in elements}
            assert parts.packs(rank) == len(packs) <= parts.largest
            if packs:
                assert parts.first(rank) == min(packs)


def test_chunks_of_copies_cover_a_part_in_order_and_break_at_packs():
    parts = scatter.Parts.of((3, 0, 4), 13, 8)
    for rank in range(3):
        for packs in (1, 2, 100):
            chunks = scatter.naive_chunks(parts, rank, packs, -(-parts.largest // packs))
            covered = [element for begin, end in chunks for element in range(begin, end)]
            assert covered == list(range(parts.starts[rank], parts.starts[rank + 1]))
            assert all(begin % 8 == 0 for begin, end in chunks[1:] if begin < end)
            assert all(-(-end // 8) - begin // 8 <= packs for begin, end in chunks if begin < end)


def test_parts_are_pulled_where_pushing_them_would_take_three_rounds():
    half, whole = half_bytes(64 << 20), 32 << 20
    assert not any(scatter.pulls(HOPPER, received, half) for received in (0, 1 << 10, 1 << 20, whole, 2 * whole))
    assert all(scatter.pulls(HOPPER, received, half) for received in (2 * whole + 4096, 3 * whole, 4 * whole))
