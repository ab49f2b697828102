# SPDX-License-Identifier: Apache-2.0
"""Chunks of calls over several nodes: they cover the tensor, fit the payload, and their regions do not overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drvfuse.plans.nodes import STATUS_BYTES, Share, chunks


@given(
    items=st.integers(1, 3000),
    packs=st.integers(1, 9),
    inside=st.integers(1, 8),
    places=st.integers(1, 12),
    staged=st.booleans(),
    payload=st.integers(4096, 1 << 18),
)
def test_chunks_cover_the_items_and_fit_the_payload(items, packs, inside, places, staged, payload):
    share = Share(packs, 8, packs * 16 + 32, inside, places, staged)
    try:
        found = chunks(items, share, payload)
    except ValueError as error:
        assert error.argument == "workspace_bytes"
        needed = int(str(error).split("at least ")[1].split()[0])
        assert payload < needed
        assert chunks(items, share, needed)[0].items == min(items, inside)
        return
    assert [chunk.first for chunk in found] == [sum(c.items for c in found[:i]) for i in range(len(found))]
    assert sum(chunk.items for chunk in found) == items
    assert len({chunk.items for chunk in found[:-1]}) <= 1
    for chunk in found:
        assert 0 < chunk.largest * share.result <= chunk.sums <= chunk.staging <= chunk.end <= payload
        assert chunk.sums % 16 == chunk.staging % 16 == 0
        counts = [chunk.count(place) for place in range(inside)]
        status = STATUS_BYTES // 4
        assert sum(counts) == chunk.items * packs * 8 + inside * status
        assert 4 * places * max(counts) <= chunk.staging - chunk.sums
        assert max(counts) == counts[0] == chunk.largest * packs * 8 + status


def test_a_tensor_that_fits_has_one_chunk():
    assert len(chunks(1000, Share(1, 8, 16, 4, 2, False), 1 << 20)) == 1
    assert len(chunks(1000, Share(1, 8, 16, 4, 2, True), 1 << 15)) == 2
