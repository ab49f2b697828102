# SPDX-License-Identifier: Apache-2.0
"""Plans of the push algorithms cover all work of any shape, and fit the slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drvfuse.comm.workspace import EPOCH_UNIT, MAX_BLOCKS
from drvfuse.errors import ArgumentError
from drvfuse.plans.limits import ceil_div
from drvfuse.plans.push import (
    GREETINGS_BYTES,
    PushShape,
    half_bytes,
    rows_shape,
    sums_shape,
    trace_phases,
)
from drvfuse.plans.rows import MAX_COLUMNS, MAX_ROWS, RowsWork
from drvfuse.plans.shared import PACK_BYTES, Work

ALGOS = ("push_one_shot", "push_two_shot")
LARGE = 64 << 20
RANKS = st.integers(1, 8)
WORKSPACES = st.sampled_from([4096, 17_500, 80_000, 1 << 21, 1 << 26, 10 << 30])


@st.composite
def allreduces(draw):
    """A Hypothesis strategy: the `Work` of a plain all-reduce, its number of elements, and the bytes of a workspace."""
    itemsize = draw(st.sampled_from([2, 4]))
    work = Work(draw(st.sampled_from(ALGOS)), draw(RANKS), itemsize, itemsize)
    count = draw(st.integers(1, 2000) | st.integers(1, 1 << 34) | st.integers(1, 1 << 18).map(lambda k: 512 * k))
    return work, count, draw(WORKSPACES)


@st.composite
def norms(draw):
    """A Hypothesis strategy: the `Work` of a fused all-reduce, its rows and columns, the bytes of a workspace, and
    whether clusters may be used.
    """
    itemsize = draw(st.sampled_from([2, 4]))
    residual = draw(st.booleans())
    out = draw(st.sampled_from([1, itemsize]))
    work = RowsWork(draw(st.sampled_from(ALGOS)), draw(RANKS), itemsize, out, residual=residual)
    rows = draw(st.integers(1, 70) | st.integers(1, MAX_ROWS))
    columns = draw(st.integers(1, MAX_COLUMNS) | st.integers(1, 128).map(lambda k: 128 * k))
    return work, rows, columns, draw(WORKSPACES), draw(st.booleans())


def test_several_rounds_with_fewer_units_than_owners_are_refused():
    """Their greetings would use the same slots in consecutive calls (`greet` in cu/sync/push.cuh)."""
    work = Work("push_two_shot", 3, 2, 2)
    shape = sums_shape(work, 1 << 20, 80_000)
    assert shape.rounds > 1 and shape.owners == 3 <= shape.units
    assert replace(shape, rounds=1, units=2).units == 2
    with pytest.raises(ArgumentError, match="units is 2; it must be at least 3"):
        replace(shape, units=2)
    assert replace(sums_shape(replace(work, algo="push_one_shot"), 1 << 20, 80_000), units=1).owners == 0


def planned(find, workspace_bytes):
    """A plan made by `find`, and the bytes of its workspace: `workspace_bytes` or, if these are too few, the least
    number that the error names."""
    try:
        return find(workspace_bytes), workspace_bytes
    except ArgumentError as error:
        assert (error.argument, error.got) == ("workspace_bytes", workspace_bytes)
        needed = int(str(error).split("at least ")[1].split()[0])
    with pytest.raises(ArgumentError, match=f"at least {needed} "):
        find(needed - 1)
    return find(needed), needed


def check_rounds(shape: PushShape, total: int, step: int, per_step: int, workspace_bytes: int) -> None:
    """Check the rounds of `total` items, if every `step` items take `per_step` bytes in a half of the slots."""
    half = half_bytes(workspace_bytes)
    assert (shape.rounds - 1) * shape.chunk < total <= shape.rounds * shape.chunk
    assert shape.chunk % step == 0
    assert shape.slot_bytes == GREETINGS_BYTES + shape.chunk // step * per_step
    assert shape.slot_bytes <= half
    if shape.rounds > 1 and per_step:  # the plan has as few rounds as possible
        fits = (half - GREETINGS_BYTES) // per_step
        assert shape.rounds == ceil_div(ceil_div(total, step), ceil_div(shape.chunk, step))
        assert shape.rounds <= ceil_div(ceil_div(total, step), fits)


def check_shares(shape: PushShape, most: int) -> None:
    """Check the number of blocks, and the sum of the shares that all warps or all blocks of the grid add to the epoch.
    The sum must be EPOCH_UNIT for an odd number of rounds, else 0."""
    blocks = shape.blocks(most)
    assert blocks % shape.cluster == 0 and 1 <= blocks // shape.cluster <= shape.units
    assert blocks <= max(most, shape.cluster)
    for by_block in (False, True):
        first, each = shape.shares(blocks, EPOCH_UNIT, by_block)
        adders = blocks if by_block else blocks * shape.threads // 32
        assert first + (adders - 1) * each == (EPOCH_UNIT if shape.rounds % 2 else 0)
        assert first >= each >= 0 and (each > 0 or shape.rounds % 2 == 0)


def check_relays(shape, work):
    """Check that `relays` is set exactly for two-shot calls of several rounds among more than two ranks. In these a
    rank may learn through a third rank that a peer has cleared its slots.
    """
    assert shape.relays == (work.algo == "push_two_shot" and shape.rounds > 1 and work.ranks > 2)


@given(allreduces(), st.integers(1, 132 * 32))
@settings(max_examples=120)
def test_plans_of_allreduce_cover_all_packs_and_fit_the_slots(case, most):
    work, count, given = case
    shape, given = planned(lambda nbytes: sums_shape(work, count, nbytes), given)
    packs = ceil_div(count, work.width)
    peers = work.ranks - 1
    if work.algo == "push_one_shot":
        check_rounds(shape, packs, 1, peers * PACK_BYTES, given)
    # a half of the slots must hold at least one unit of inputs and one of results per rank; a unit has a pack per
    # thread
    else:
        check_rounds(shape, packs, work.ranks * shape.threads, peers * shape.threads * 2 * PACK_BYTES, given)
    check_shares(shape, most)
    assert shape.units == ceil_div(min(packs, shape.chunk), shape.threads)
    assert shape.threads % 32 == 0 and shape.threads <= 256 and (shape.packs, shape.cluster) == (1, 1)
    check_relays(shape, work)
    if shape.exact:  # every thread of every unit of every round has a pack
        assert packs % shape.threads == 0
        assert shape.rounds == 1 or (shape.chunk % shape.threads == 0 and packs == shape.rounds * shape.chunk)


@given(norms(), st.integers(1, 132 * 32))
@settings(max_examples=120)
def test_plans_of_the_fused_op_cover_all_rows_and_fit_the_slots(case, most):
    work, rows, columns, given, clusters = case
    shape, given = planned(lambda nbytes: rows_shape(work, rows, columns, nbytes, clusters), given)
    row_packs = ceil_div(columns, work.width)
    row, peers = row_packs * PACK_BYTES, work.ranks - 1
    result = row if work.residual else row_packs * work.width * work.out_itemsize
    if work.algo == "push_one_shot":
        check_rounds(shape, rows, 1, peers * row, given)
    else:  # half of the slots holds an input, a result and a scale per rank
        check_rounds(shape, rows, work.ranks, peers * (row + result + 4), given)
    check_shares(shape, most)
    assert shape.units == min(rows, shape.chunk)
    threads = shape.cluster * shape.threads
    assert threads * (shape.packs - 1) < row_packs <= threads * shape.packs
    assert shape.exact == (row_packs == threads * shape.packs)
    check_relays(shape, work)
    assert shape.threads % 32 == 0 and shape.threads <= (1024 if work.ranks <= 4 else 512)
    assert shape.cluster in ((1, 2, 4, 8) if clusters else (1,))


@given(allreduces() | norms(), st.integers(1, 300))
@settings(max_examples=50)
def test_a_traced_block_has_room_for_its_phases(case, most):
    """The plan reserves enough phases for every unit of a block: in each round the block sends it, and later reduces or
    gathers it."""
    work, *size, given = case[:-1] if len(case) == 5 else case
    if not isinstance(work, RowsWork):
        shape, _ = planned(lambda nbytes: sums_shape(work, *size, nbytes), given)
    else:
        shape, _ = planned(lambda nbytes: rows_shape(work, *size, nbytes, case[-1]), given)
    blocks = shape.blocks(most)
    each = ceil_div(shape.units, blocks // shape.cluster)
    assert trace_phases(shape, blocks) >= shape.rounds * 3 * each


def test_a_plan_has_as_few_rounds_as_the_slots_allow():
    work = Work("push_one_shot", 2, 2, 2)
    packs = (half_bytes(18_000) - GREETINGS_BYTES) // PACK_BYTES  # the packs that one round can send
    for rounds in (1, 2, 3, 4):
        assert sums_shape(work, 8 * packs * rounds, 18_000).rounds == rounds
        assert sums_shape(work, 8 * packs * rounds + 1, 18_000).rounds == rounds + 1


def test_one_rank_needs_no_slots():
    for algo in ALGOS:
        shape = sums_shape(Work(algo, 1, 2, 2), 1 << 34, 4096)
        assert (shape.rounds, shape.slot_bytes) == (1, GREETINGS_BYTES)
        shape = rows_shape(RowsWork(algo, 1, 2, 1), 10**6, MAX_COLUMNS, 4096, True)
        assert (shape.rounds, shape.slot_bytes) == (1, GREETINGS_BYTES)


@pytest.mark.parametrize("algo", ALGOS)
def test_the_number_of_packs_in_a_round_fits_32_bits(algo):
    """A single rank needs no slots, so slots do not bound its rounds: tensors of 64 GiB and more take several."""
    for count, rounds in ((1 << 34, 1), ((1 << 34) + 8, 2), (1 << 36, 4)):
        shape = sums_shape(Work(algo, 1, 2, 2), count, 4096)
        assert shape.rounds == rounds and shape.chunk + shape.threads < 1 << 32
        assert shape.chunk * rounds >= count // 8


@pytest.mark.parametrize("workspace_bytes", [4096, 1 << 21, LARGE, 10 << 30])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("algo", ALGOS)
def test_tensors_of_two_to_the_31_rows_or_more_are_refused(algo, ranks, workspace_bytes):
    """A kernel computes row numbers up to one step past the end of the last round. With MAX_ROWS rows even these
    numbers are below 2^31.
    """
    shape = rows_shape(RowsWork(algo, ranks, 2, 1), MAX_ROWS, 1, workspace_bytes, True)
    assert shape.rounds * shape.chunk + (1 + shape.depth) * 132 * 32 < 1 << 31


@pytest.mark.parametrize(("rows", "columns"), [(MAX_ROWS + 1, 8), (1, MAX_COLUMNS + 1), (1, 0)])
def test_rows_and_columns_beyond_the_limits_are_refused(rows, columns):
    with pytest.raises(ArgumentError, match="at most|1 to"):
        rows_shape(RowsWork("push_one_shot", 2, 2, 1), rows, columns, LARGE, True)


def test_a_row_is_shared_by_a_cluster_without_idle_threads_where_it_can():
    """A cluster shares a row of at least 128 packs, one for each thread. Without clusters one block holds a row."""
    for columns, cluster, threads in ((4096, 8, 64), (8192, 8, 128), (7168, 4, 224), (256, 1, 32)):
        shape = rows_shape(RowsWork("push_one_shot", 2, 2, 1), 1, columns, LARGE, True)
        assert (shape.cluster, shape.threads, shape.packs, shape.exact) == (cluster, threads, 1, True)
        alone = rows_shape(RowsWork("push_one_shot", 2, 2, 1), 1, columns, LARGE, False)
        assert (alone.cluster, alone.threads * alone.packs) == (1, columns // 8)


def test_blocks_are_counted_by_cluster():
    shape = rows_shape(RowsWork("push_one_shot", 2, 2, 1), 30, 8192, LARGE, True)
    assert shape.cluster == 8
    assert [shape.blocks(most) for most in (1, 7, 8, 17, MAX_BLOCKS)] == [8, 8, 8, 16, 240]


def test_half_a_workspace_can_be_addressed_with_32_bits():
    """A half of the slots is GREETINGS_BYTES larger than half of the bytes that the user asked for, except where it
    would reach 4 GiB."""
    for nbytes in (4096, 4351, 64 << 20, 8 << 30, 1 << 40):
        half = half_bytes(nbytes)
        assert half % 128 == 0 and half < 1 << 32
        assert nbytes / 2 + GREETINGS_BYTES <= half or half == (1 << 32) - 128
