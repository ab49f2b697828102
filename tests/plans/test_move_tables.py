# SPDX-License-Identifier: Apache-2.0
"""Tables of copies between ranks fill every output, and plans cover all copies, for any rows, ranks and workspace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drvfuse.errors import ArgumentError
from drvfuse.plans import moves
from drvfuse.plans.moves_scales import Arrangement, chunks_of_scales
from drvfuse.plans.push import GREETINGS_BYTES, half_bytes
from drvfuse.plans.quantisation import Quantisation

RANKS = st.integers(1, 8)
WORKSPACES = st.sampled_from([4096, 17_500, 80_000, 1 << 21, 1 << 26, 10 << 30])


@st.composite
def tables(draw):
    """A Hypothesis strategy: the `MoveWork` of a call, and the bytes of each rank's outputs."""
    n, row_bytes = draw(RANKS), draw(st.integers(1, 70) | st.integers(1, 1 << 22))
    few = st.integers(0, 40)
    kind = draw(st.sampled_from(["all_gather", "broadcast", "all_to_all"]))
    if kind == "all_gather":
        rows = draw(st.lists(few, min_size=n, max_size=n))
        found = (moves.all_gather(rows, row_bytes), moves.all_gather(rows, 4))[: draw(st.integers(1, 2))]
        return moves.MoveWork(found, True), [[sum(rows) * row_bytes] * n, [sum(rows) * 4] * n]
    if kind == "broadcast":
        root = draw(st.integers(0, n - 1))
        return moves.MoveWork((moves.broadcast(n, root, row_bytes),), True), [[row_bytes] * n]
    splits = draw(st.lists(st.lists(few, min_size=n, max_size=n), min_size=n, max_size=n))
    outputs = [sum(column) * row_bytes for column in zip(*splits, strict=True)]
    return moves.MoveWork((moves.all_to_all(splits, row_bytes),), False), [outputs]


@settings(max_examples=40)
@given(tables())
def test_every_byte_of_an_output_comes_from_one_place(drawn):
    work, outputs = drawn
    for table, expected in zip(work.tables, outputs, strict=False):
        for rank, nbytes in enumerate(expected):
            parts = sorted((of[rank].target, of[rank].nbytes) for of in table if of[rank].nbytes)
            assert [start for start, _ in parts] == [sum(size for _, size in parts[:i]) for i in range(len(parts))]
            assert sum(size for _, size in parts) == nbytes
    assert work.nbytes - work.remote == sum(table[i][i].nbytes for table in work.tables for i in range(work.ranks))


@settings(max_examples=40)
@given(tables(), WORKSPACES)
def test_rounds_hold_all_packs_and_fit_the_slots(drawn, workspace_bytes):
    work, _ = drawn
    try:
        shape = moves.push_shape(work, workspace_bytes)
    except ArgumentError as error:
        workspace_bytes = int(str(error).split("at least ")[1].split()[0])
        with pytest.raises(ArgumentError):
            moves.push_shape(work, workspace_bytes - 1)
        shape = moves.push_shape(work, workspace_bytes)
    assert shape.chunk % shape.threads == 0 and shape.chunk * shape.rounds >= max(work.most, 1)
    assert shape.rounds == 1 or shape.chunk * (shape.rounds - 1) < work.most
    sent = shape.chunk * shape.rounds if work.ranks > 1 else 0
    assert shape.units * shape.threads >= max(shape.chunk, work.most_own - sent)
    peers, warps = work.ranks - 1, shape.chunk // 32
    assert shape.slot_bytes == GREETINGS_BYTES + peers * (16 * shape.chunk + 4 * warps)
    assert shape.slot_bytes <= half_bytes(workspace_bytes)


@settings(max_examples=40)
@given(tables(), st.sampled_from(["pull", "put"]), st.integers(300, 1 << 20))
def test_staged_chunks_fit_half_of_the_payload(drawn, algo, payload):
    work, _ = drawn
    chunk = moves.staged_chunk(work, algo, payload)
    slots = 1 if work.same and algo == "pull" else max(1, work.ranks - 1)
    assert 1 <= chunk <= max(1, work.most) and 2 * slots * 16 * chunk <= payload
    assert moves.barriers(work, chunk) == 1 + -(-max(1, work.most) // chunk)


@pytest.mark.parametrize("layout", ["column", "tiles"])
def test_scales_by_column_or_tile_of_more_rows_than_kernels_can_count_are_refused(layout):
    """Kernels count the bytes of a column, padding included, in signed 32 bits."""
    made, most = Quantisation.mxfp8(layout=layout), (2**31 - 16) // 4
    Arrangement.of(made, [most - 5, 5], 32)
    with pytest.raises(ArgumentError, match=r"inputs.*of 536870909 rows in all.*at most 536870908 rows"):
        Arrangement.of(made, [most - 4, 5], 32)


@given(
    st.sampled_from(["column", "tiles"]),
    st.lists(st.integers(0, 700), min_size=2, max_size=6),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(16, 1 << 16),
)
def test_chunks_of_scales_fit_their_slots_and_hold_every_byte_once(layout, rows, groups, slots, payload):
    whole = Arrangement.of(Quantisation.mxfp8(layout=layout), rows, 32 * groups)
    try:
        found = chunks_of_scales(whole, payload, slots)
    except ArgumentError as error:
        needed = int(str(error).split("at least ")[1].split()[0])
        assert error.argument == "workspace_bytes" and payload < needed
        found = chunks_of_scales(whole, needed, slots)
        payload = needed
    begins = [0] * len(rows)
    for chunk in found:
        assert slots * chunk.slot_bytes <= payload and chunk.slot_bytes % 16 == 0
        for rank, (source, nbytes) in enumerate(zip(chunk.sources, chunk.nbytes, strict=True)):
            assert source == begins[rank] or not nbytes
            begins[rank] += nbytes
    assert tuple(begins) == whole.rank_bytes
