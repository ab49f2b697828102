# SPDX-License-Identifier: Apache-2.0
"""A rank that is missing in a call that moves bytes, and calls that differ between processes."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import assert_bits, launch_without, place, random_inputs, short_spins
from connected import connected, outcomes

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import CallMismatch, GroupError
from drvfuse.ops.collectives.moves.kernel import ALGOS
from drvfuse.plans.moves import PUSH

ABSENT = 0xFFFFFFFF


def prepared(group, op, algo):
    hosts = [np.full((3, 40), rank, np.uint8) for rank in range(3)]
    return hosts, getattr(df, op).prepare(group, place(group, hosts), algo=algo)


CALLS = [(op, algo) for op in ("all_gather", "broadcast", "all_to_all") for algo in ALGOS] + [("broadcast", "relay")]


@pytest.mark.gpus(3)
@pytest.mark.parametrize(("op", "algo"), CALLS)
@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_is_never_launched_is_named(new_group, rng, driver, op, algo, missing):
    """The missing rank may have no bytes for the waiting rank, or its bytes may come by way of another rank."""
    group = new_group(3)
    with short_spins(driver):
        hosts, call = prepared(group, op, algo)
    error = launch_without(group, missing, call)
    assert error.phase == ("push" if algo in PUSH else "start")
    if algo in PUSH:
        assert (error.expected, error.seen) == (1, ABSENT)
        assert 128 // 16 <= error.word < group.workspace.half_bytes // 16
    found = call.launch()
    ys = found.output if op == "all_gather" else found
    wanted = {
        "all_gather": lambda: [reference.all_gather(hosts)] * 3,
        "broadcast": lambda: [reference.broadcast(hosts)] * 3,
        "all_to_all": lambda: reference.all_to_all(hosts),
    }[op]()
    for y, expected in zip(ys, wanted, strict=True):
        assert_bits([y], expected)
    sums = random_inputs(rng, 3, (3, 264), "bfloat16")
    for _ in range(2):  # two calls, which use both halves of the slots
        assert_bits(df.allreduce(group, place(group, sums), algo="push_one_shot"), reference.allreduce(sums))
    group.synchronize()


@pytest.fixture(scope="module")
def two():
    with connected(2) as found:
        yield found


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ["auto", "pull"])
def test_ranks_in_separate_processes_have_the_same_bytes(two, rng, algo):
    """Each rank passes an array, not a list. `put` and `pull` use the workspaces, which other processes have mapped."""
    hosts = [rng.integers(0, 256, (4, 1000), np.uint8) for _ in range(2)]
    scales = [rng.standard_normal(4).astype(np.float32) for _ in range(2)]

    def calls(group):
        rank = group[0]
        x, factors = rank.array(hosts[rank.index]), rank.array(scales[rank.index])
        found = [*df.all_gather(group, x, scales=factors, algo=algo)]
        found.append(df.broadcast(group, x, root=1, algo=algo))
        found.append(df.all_to_all(group, x, x, algo=algo))
        group.synchronize()
        return found

    for rank, found in enumerate(two.each(calls)):
        wanted = [
            reference.all_gather(hosts),
            reference.all_gather(scales),
            hosts[1],
            reference.all_to_all(hosts)[rank],
        ]
        for array, expected in zip(found, wanted, strict=True):
            assert_bits([array], expected)


@pytest.mark.emulated
def test_different_roots_are_reported_as_different_calls():
    with connected(2) as ranks:

        def call(group):
            x = group[0].zeros((8,), "uint8")
            df.broadcast(group, x, root=group[0].index)
            group.synchronize()

        found = outcomes([lambda group=group: call(group) for group in ranks.groups])
        assert all(isinstance(error, (CallMismatch, GroupError)) for error in found)
        assert "from rank 0" in str(found[0]) and "from rank 1" in str(found[0])
