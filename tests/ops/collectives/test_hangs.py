# SPDX-License-Identifier: Apache-2.0
"""A missing or late rank ends in BarrierTimeout, and reset() makes the group work again."""

from __future__ import annotations

import time

import numpy as np
import pytest
import scenarios
from collective_support import ALGOS, assert_bits, garbage, place, random_inputs

import drvfuse as df
from drvfuse import config, reference
from drvfuse.errors import BarrierTimeout, CaptureError, LaunchError

pytestmark = pytest.mark.gpus(3)


@pytest.fixture
def short_waits():
    with config.override(spin_timeout=0.05):
        yield


@pytest.fixture
def group(new_group):
    return new_group(3)


@pytest.fixture
def hosts(rng):
    return random_inputs(rng, 3, 1000, "bfloat16")


def works(group, hosts):
    for algo in (*ALGOS, "naive"):
        assert_bits(df.allreduce(group, place(group, hosts), algo=algo), reference.allreduce(hosts))
    group.synchronize()


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("missing", [0, 2])
def test_rank_never_launched(group, hosts, short_waits, algo, missing):
    prepared = df.allreduce.prepare(group, place(group, hosts), algo=algo)
    for rank in range(3):
        if rank != missing:
            prepared.launch(rank=rank)
    with pytest.raises(BarrierTimeout, match="results since that call are undefined") as caught:
        group.synchronize()
    error = caught.value
    assert error.peer == missing and error.rank != missing
    assert (error.block, error.phase, error.expected, error.seen) == (0, "start", 1, 0)
    group.reset()
    group.check()
    works(group, hosts)


def test_error_is_raised_once_and_the_next_call_resets(group, hosts, short_waits):
    xs = place(group, hosts)
    df.allreduce.prepare(group, xs).launch(rank=1)
    for rank in group:
        rank.synchronize()
    with pytest.raises(BarrierTimeout):
        df.allreduce(group, xs)
    with pytest.raises(BarrierTimeout):
        group.check()
    assert_bits(df.allreduce(group, xs), reference.allreduce(hosts))
    group.check()
    works(group, hosts)


def test_check_does_not_wait(group, hosts):
    prepared = df.allreduce.prepare(group, place(group, hosts))
    prepared.launch(rank=0)
    start = time.perf_counter()
    group.check()
    assert time.perf_counter() - start < 1
    prepared.launch(rank=2)
    prepared.launch(rank=1)
    group.synchronize()
    assert_bits(prepared.launch(), reference.allreduce(hosts))


def test_calls_after_the_timeout_end_at_once(group, hosts, short_waits):
    xs = place(group, hosts)
    prepared = [df.allreduce.prepare(group, xs, algo=algo) for algo in ALGOS * 5]
    for call in prepared:
        call.launch(rank=0)
    with pytest.raises(BarrierTimeout):
        group.synchronize()
    works(group, hosts)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_fused_op_times_out_and_recovers(group, rng, short_waits, algo, residual):
    hosts = random_inputs(rng, 3, (7, 64), "bfloat16")
    gamma = np.ones(64, np.float32).astype(hosts[0].dtype)
    added = random_inputs(rng, 1, (7, 64), "bfloat16")[0] if residual else None
    call = df.allreduce_rmsnorm_fp8.prepare(
        group,
        place(group, hosts),
        [rank.array(gamma) for rank in group],
        epsilon=1e-6,
        residuals=[rank.array(added) for rank in group] if residual else None,
        algo=algo,
    )
    call.launch(rank=2)
    with pytest.raises(BarrierTimeout) as caught:
        group.synchronize()
    assert caught.value.rank == 2
    result = call.launch()
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)
    group.check()


def test_ranks_launched_in_any_order(group, hosts):
    prepared = df.allreduce.prepare(group, place(group, hosts), garbage(group, 1000, "bfloat16"))
    for order in ((2, 0, 1), (1, 2, 0), (0, 1, 2)):
        for rank in order:
            ys = prepared.launch(rank=rank)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))


def test_reset_is_harmless_at_any_time(group, hosts):
    group.reset()
    works(group, hosts)
    df.allreduce(group, place(group, hosts))
    group.reset()
    works(group, hosts)


def test_reset_is_impossible_in_a_capture(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    df.allreduce.prepare(group, xs, ys).launch(rank=0)
    with pytest.raises(BarrierTimeout):
        group.synchronize()
    streams = [rank.stream for rank in group]
    with pytest.raises(CaptureError), df.Graph.capture(streams):
        df.allreduce(group, xs, ys)
    works(group, hosts)


def test_graph_replay_raises_what_happened_before(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    prepared = df.allreduce.prepare(group, xs, ys)
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        prepared.launch()
    prepared.launch(rank=1)
    for rank in group:
        rank.synchronize()
    with pytest.raises(BarrierTimeout):
        graph.launch(streams[0])
    graph.launch(streams[0])
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    graph.close()


def test_ranks_launched_alone_must_be_launched_with_the_same_calls(group, hosts):
    xs, ys, zs = place(group, hosts), garbage(group, 1000, "bfloat16"), garbage(group, 1000, "bfloat16")
    first, second = df.allreduce.prepare(group, xs, ys), df.allreduce.prepare(group, ys, zs)
    for call in (first, second):
        call.launch(rank=0)
    with pytest.raises(LaunchError, match="rank 1"):
        second.launch(rank=1)
    with pytest.raises(LaunchError, match="rank 1"):
        second.launch()
    for call in (first, second):
        call.launch(rank=1)
    for call in (first, second):
        call.launch(rank=2)
    group.synchronize()
    once = reference.allreduce(hosts)
    assert_bits(ys, once)
    assert_bits(zs, reference.allreduce([once] * 3))
    second.launch()
    works(group, hosts)


def test_reset_forgets_unfinished_calls(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    first, second = df.allreduce.prepare(group, xs, ys), df.allreduce.prepare(group, xs, ys)
    first.launch(rank=0)
    group.reset()
    for rank in (2, 1, 0):
        second.launch(rank=rank)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))


@pytest.mark.emu
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("op", scenarios.OPS)
def test_one_rank_that_gives_up_ends_the_wait_of_all_and_later_calls_write_nothing(op, algo):
    scenarios.one_timeout_ends_all(op, algo)
