# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatters and all-reduces of many tensors: a missing rank, ranks in separate processes, and ranks whose calls
differ."""

from __future__ import annotations

import pytest
from collective_support import assert_bits, launch_without, place, random_inputs, replicate, short_spins
from connected import connected, outcomes

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import CallMismatch, GroupError

CALLS = (
    ("reduce_scatter", "push"),
    ("reduce_scatter", "pull"),
    ("reduce_scatter_rmsnorm_fp8", "push"),
    ("reduce_scatter_rmsnorm_fp8", "pull"),
    ("allreduce_many", "push_one_shot"),
)


def prepared(group, rng, op, algo):
    """A call of 3 ranks of which rank 1 owns no rows, and the bits that each rank must get."""
    hosts = random_inputs(rng, 3, (5, 264), "bfloat16")
    xs = place(group, hosts)
    if op == "allreduce_many":
        call = df.allreduce_many.prepare(group, [[x] for x in xs], algo=algo)
        return call, lambda found: ([of_rank[0] for of_rank in found], [reference.allreduce(hosts)] * 3)
    splits = [4, 0, 1]
    if op == "reduce_scatter":
        call = df.reduce_scatter.prepare(group, xs, splits=splits, algo=algo)
        return call, lambda found: (found, reference.reduce_scatter(hosts, splits))
    (gamma,) = random_inputs(rng, 1, 264, "bfloat16")
    call = df.reduce_scatter_rmsnorm_fp8.prepare(
        group, xs, replicate(group, gamma), epsilon=1e-6, splits=splits, algo=algo
    )
    expected = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-6, splits=splits)
    return call, lambda found: (found.output, [part.output for part in expected])


@pytest.mark.gpus(3)
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(("op", "algo"), CALLS)
def test_a_rank_that_is_never_launched_is_named(new_group, rng, driver, op, algo, missing):
    """The missing rank, or the one that reports it, may own no rows. The group works again after a reset."""
    group = new_group(3)
    with short_spins(driver):
        call, results = prepared(group, rng, op, algo)
    error = launch_without(group, missing, call)
    assert error.phase == ("start" if algo == "pull" else "push")
    for _ in range(3):  # so that both halves of the slots are used
        for array, expected in zip(*results(call.launch()), strict=True):
            assert_bits([array], expected)
    group.synchronize()


@pytest.fixture(scope="module")
def two():
    with connected(2) as found:
        yield found


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ["auto", "pull"])
def test_ranks_in_separate_processes_have_the_bits_of_the_reference(two, rng, algo):
    """Each process passes its array, not a list. Algorithm "pull" stages the parts, as no process can read the inputs
    of another process."""
    hosts = random_inputs(rng, 2, (5, 264), "bfloat16")
    (gamma,) = random_inputs(rng, 1, 264, "bfloat16")

    def calls(group):
        rank = group[0]
        x = rank.array(hosts[rank.index])
        part = df.reduce_scatter(group, x, algo=algo)
        normed = df.reduce_scatter_rmsnorm_fp8(group, x, rank.array(gamma), epsilon=1e-6, algo=algo)
        sums = df.allreduce_many(group, [x, x[1]])
        group.synchronize()
        return part, normed.output, normed.scales, *sums

    total = reference.allreduce(hosts)
    parts = reference.reduce_scatter(hosts)
    norms = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-6)
    for rank, found in enumerate(two.each(calls)):
        wanted = parts[rank], norms[rank].output, norms[rank].scales, total, total[1]
        for array, expected in zip(found, wanted, strict=True):
            assert_bits([array], expected)


@pytest.mark.emulated
def test_different_splits_are_reported_as_different_calls():
    with connected(2) as ranks:

        def call(group):
            x = group[0].zeros((8,), "bfloat16")
            df.reduce_scatter(group, x, splits=[4, 4] if group[0].index else [5, 3])
            group.synchronize()

        found = outcomes([lambda group=group: call(group) for group in ranks.groups])
        assert all(isinstance(error, (CallMismatch, GroupError)) for error in found)
        assert "splits [5, 3]" in str(found[0]) and "splits [4, 4]" in str(found[0])
