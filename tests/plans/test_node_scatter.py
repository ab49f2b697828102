# SPDX-License-Identifier: Apache-2.0
"""Chunks of a reduce-scatter over several nodes: they cover all parts and fit the payload."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drvfuse.plans import nodes_parts as node_scatter
from drvfuse.plans import sums as scatter

COUNTS = st.lists(st.integers(0, 60), min_size=2, max_size=8).filter(any)


def covered(chunks, starts, payload_bytes, area):
    for rank in range(len(starts) - 1):
        ranges = [chunk.parts[rank] for chunk in chunks]
        assert ranges[0][0] == starts[rank] and ranges[-1][1] == starts[rank + 1]
        assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:], strict=False))
    for chunk in chunks:
        assert area <= chunk.received(0) and chunk.sent(chunk.nodes - 1) + chunk.stride == chunk.end <= payload_bytes
        for rank, (begin, end) in enumerate(chunk.parts):
            assert begin <= end
            if begin < end:
                assert chunk.sum_bytes(rank) == 4 * (end - begin)
                assert chunk.skew(rank) + chunk.sum_bytes(rank) <= 32 * chunk.packs(rank) <= chunk.stride


@given(COUNTS, st.integers(1, 20), st.integers(2, 5), st.sampled_from([0, 2048]), st.integers(4096, 1 << 15))
def test_chunks_of_packs_cover_all_parts(counts, columns, nodes, area, payload_bytes):
    parts = scatter.Parts.of(counts, columns, 8)
    covered(node_scatter.pack_chunks(parts, nodes, area, payload_bytes), parts.starts, payload_bytes, area)


@given(COUNTS, st.integers(1, 100), st.integers(2, 4), st.sampled_from([0, 2048]), st.integers(8192, 1 << 15))
def test_chunks_of_rows_cover_all_parts(counts, columns, nodes, area, payload_bytes):
    starts = scatter.Parts.of(counts, columns, 8).starts
    found = node_scatter.row_chunks(counts, columns, 8, nodes, area, payload_bytes)
    covered([chunk for _, chunk in found], starts, payload_bytes, area)
    for first, chunk in found:
        for rank, (begin, _) in enumerate(chunk.parts):
            assert begin == starts[rank] + min(first, counts[rank]) * columns


@given(st.integers(1, 100), st.integers(2, 5), st.integers(0, 4096))
def test_the_error_for_a_small_payload_says_what_is_enough(columns, nodes, payload_bytes):
    try:
        node_scatter.row_chunks([3, 0, 5], columns, 8, nodes, 0, payload_bytes)
    except ValueError as error:
        needed = int(str(error).split("at least ")[1].split()[0])
        assert payload_bytes < needed
        node_scatter.row_chunks([3, 0, 5], columns, 8, nodes, 0, needed)
