# SPDX-License-Identifier: Apache-2.0
"""The steps of collectives that move bytes over several nodes: simulated for any division of the ranks into nodes, they
bring every byte to the place that the collective's definition gives it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drvfuse.errors import ArgumentError
from drvfuse.plans import moves, moves_over_nodes
from drvfuse.plans.moves_over_nodes import Inside, NodeRanks, Place

LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2), (0, 0, 0, 1, 1, 1), (0, 1, 1, 0, 2, 2)]


def run(steps, of, inputs, outputs, payload_bytes=0):
    """Execute the steps on arrays of bytes: `inputs[part][rank]`, `outputs[part][rank]`."""
    payloads = [np.zeros(payload_bytes, np.uint8) for _ in of]

    def memory(place, part, rank):
        return {Place.INPUT: inputs[part], Place.OUTPUT: outputs[part], Place.PAYLOAD: payloads}[place][rank]

    ranks, crossed = NodeRanks(of), set()
    for step in steps:
        copies = []
        if isinstance(step, Inside):
            for part, table in enumerate(step.tables):
                for i, row in enumerate(table):
                    for j, (at, to, nbytes) in enumerate(row):
                        if nbytes:
                            assert of[i] == of[j]
                            copies.append((step.source, i, step.target, j, part, at, to, nbytes))
        else:
            for one in step:
                assert of[one.sender] != of[one.receiver]
                assert ranks.place(one.sender) == ranks.place(one.receiver)
                key = one.receiver, one.part, one.target_offset
                assert key not in crossed
                crossed.add(key)
                offsets = one.source_offset, one.target_offset, one.nbytes
                copies.append((one.source, one.sender, Place.OUTPUT, one.receiver, one.part, *offsets))
        found = [memory(where, part, i)[at : at + n].copy() for where, i, _, _, part, at, _, n in copies]
        for values, (_, _, place, j, part, _, to, nbytes) in zip(found, copies, strict=True):
            assert values.size == nbytes
            memory(place, part, j)[to : to + nbytes] = values


def random_bytes(rng, sizes):
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("of", LAYOUTS)
def test_the_steps_of_an_all_gather_bring_every_byte_of_two_arrays(of, rng):
    rows = rng.integers(0, 4, len(of)).tolist()
    tables = [moves.all_gather(rows, nbytes) for nbytes in (24, 4)]
    inputs = [random_bytes(rng, [count * nbytes for count in rows]) for nbytes in (24, 4)]
    outputs = [[np.zeros(sum(rows) * nbytes, np.uint8) for _ in of] for nbytes in (24, 4)]
    run(moves_over_nodes.all_gather(tables, NodeRanks(of)), of, inputs, outputs)
    for part, arrays in zip(inputs, outputs, strict=True):
        assert all((array == np.concatenate(part)).all() for array in arrays)


@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("nbytes", [1, 40, 1000])
def test_the_steps_of_a_broadcast_bring_every_byte_from_any_root(of, nbytes, rng):
    for root in range(len(of)):
        inputs, outputs = random_bytes(rng, [nbytes] * len(of)), [np.zeros(nbytes, np.uint8) for _ in of]
        run(moves_over_nodes.broadcast(nbytes, root, NodeRanks(of)), of, [inputs], [outputs])
        assert all((array == inputs[root]).all() for array in outputs)


@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("payload_bytes", [192, 4096])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_steps_of_an_all_to_all_bring_every_byte_with_any_payload_size(of, payload_bytes, in_place, rng):
    n = len(of)
    splits = rng.integers(0, 5, (n, n)) * (rng.random((n, n)) < 0.8)
    if in_place:
        splits = splits + splits.T
    inputs = random_bytes(rng, (splits.sum(1) * 24).tolist())
    outputs = inputs if in_place else [np.zeros(size, np.uint8) for size in (splits.sum(0) * 24).tolist()]
    cuts = [np.split(values, np.cumsum(row[:-1]) * 24) for values, row in zip(inputs, splits, strict=True)]
    expected = [np.concatenate([of_rank[j] for of_rank in cuts]) for j in range(n)]
    steps = moves_over_nodes.all_to_all(moves.all_to_all(splits.tolist(), 24), NodeRanks(of), payload_bytes)
    run(steps, of, [inputs], [outputs], payload_bytes)
    assert all((array == wanted).all() for array, wanted in zip(outputs, expected, strict=True))


def test_a_payload_without_room_for_a_pack_of_every_rank_is_refused():
    table = moves.all_to_all([[1] * 4] * 4, 24)
    with pytest.raises(ArgumentError, match="at least 32"):
        moves_over_nodes.all_to_all(table, NodeRanks((0, 0, 1, 1)), 31)


def test_steps_without_bytes_are_left_out():
    ranks = NodeRanks((0, 0, 1, 1))
    only_inside = [[5 if i // 2 == j // 2 else 0 for j in range(4)] for i in range(4)]
    assert len(moves_over_nodes.all_to_all(moves.all_to_all(only_inside, 3), ranks, 4096)) == 1
    assert len(moves_over_nodes.all_gather([moves.all_gather([0, 0, 3, 0], 8)], ranks)) == 3
    assert [type(step) for step in moves_over_nodes.broadcast(8, 0, NodeRanks((0, 1)))] == [Inside, tuple]


@given(of=st.sampled_from(LAYOUTS), data=st.data())
def test_a_kernel_is_planned_for_the_largest_work_of_any_node(of, data):
    ranks = NodeRanks(of)
    n = len(of)
    splits = data.draw(st.lists(st.lists(st.integers(0, 40), min_size=n, max_size=n), min_size=n, max_size=n))
    row_bytes = data.draw(st.sampled_from([3, 16]))
    steps = moves_over_nodes.all_to_all(moves.all_to_all(splits, row_bytes), ranks, 1 << 20)
    for step in steps:
        if isinstance(step, Inside):
            work = moves_over_nodes.work_of(step, ranks)
            each = [moves.MoveWork((ranks.of_node(step.tables[0], node),), False) for node in range(ranks.count)]
            assert work.ranks == ranks.inside
            assert work.most == max(one.most for one in each)
            assert work.most_own == max(one.most_own for one in each)
            for algo in ("put", "pull"):
                assert work.aligned(algo) == all(one.aligned(algo) for one in each)
