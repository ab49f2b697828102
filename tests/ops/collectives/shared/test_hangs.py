# SPDX-License-Identifier: Apache-2.0
"""A missing or late rank ends in BarrierTimeout, and reset() makes the group work again."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
import scenarios
from collective_support import ALGOS, PULL, assert_bits, garbage, place, private_array, random_inputs

import drvfuse as df
from drvfuse import config, reference
from drvfuse.comm import history
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


@pytest.mark.parametrize("algo", PULL)
@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_is_never_launched_is_named(group, hosts, short_waits, algo, missing):
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
        rank.stream.synchronize()
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


def test_calls_after_the_time_out_end_at_once(group, hosts, short_waits):
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


def test_ranks_may_be_launched_in_any_order(group, hosts):
    prepared = df.allreduce.prepare(group, place(group, hosts), garbage(group, 1000, "bfloat16"))
    for order in ((2, 0, 1), (1, 2, 0), (0, 1, 2)):
        for rank in order:
            ys = prepared.launch(rank=rank)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))


def test_reset_is_allowed_at_any_time(group, hosts):
    group.reset()
    works(group, hosts)
    df.allreduce(group, place(group, hosts))
    group.reset()
    works(group, hosts)


def test_reset_is_refused_in_a_capture(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    df.allreduce.prepare(group, xs, ys).launch(rank=0)
    with pytest.raises(BarrierTimeout):
        group.synchronize()
    streams = [rank.stream for rank in group]
    with pytest.raises(CaptureError), df.Graph.capture(streams):
        df.allreduce(group, xs, ys)
    works(group, hosts)


def test_a_graph_replay_raises_an_earlier_time_out(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    prepared = df.allreduce.prepare(group, xs, ys)
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        prepared.launch()
    prepared.launch(rank=1)
    for rank in group:
        rank.stream.synchronize()
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
    with pytest.raises(
        LaunchError, match=r"allreduce push_one_shot of 3 x \(1000,\) \S+ must first be launched on rank 1"
    ):
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


def test_a_rank_and_the_group_raise_the_same_timeout_when_they_are_synchronised(group, hosts, short_waits):
    df.allreduce.prepare(group, place(group, hosts)).launch(rank=1)
    for wait in (group.ranks[1].synchronize, group.ranks[0].synchronize, group.synchronize):
        with pytest.raises(BarrierTimeout) as caught:
            wait()
        assert caught.value.rank == 1
    group.reset()
    group.ranks[1].synchronize()
    works(group, hosts)


def timed_out(group, prepared, rank=0):
    """Launch `prepared` on `rank` alone. Returns the call that the time-out names."""
    prepared.launch(rank=rank)
    with pytest.raises(BarrierTimeout) as caught:
        group.synchronize()
    assert f" in {caught.value.call} (block" in str(caught.value)
    return caught.value.call.replace(f"which rank {caught.value.peer} was", "which the peer was")


@pytest.mark.parametrize("algo", PULL)
@pytest.mark.parametrize("staged", [False, True])
def test_the_timeout_names_the_call(new_group, rng, short_waits, algo, staged):
    """The calls before the one that times out pass other numbers of barriers: algorithm, chunks or op differ."""
    group = new_group(3, workspace_bytes=4096)
    hosts = random_inputs(rng, 3, (30, 64), "bfloat16")
    xs = [
        private_array(rank.device, host)[0] if staged else rank.array(host)
        for rank, host in zip(group, hosts, strict=True)
    ]
    gammas = [rank.array(np.ones(64, hosts[0].dtype)) for rank in group]
    plain = {name: df.allreduce.prepare(group, xs, algo=name) for name in (*PULL, "naive")}
    fused = {name: df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1e-6, algo=name) for name in PULL}
    for call in (*plain.values(), *fused.values()):
        call.launch()
    missing = "which the peer was not launched with"
    call = f"call 6 of the group, allreduce_rmsnorm_fp8 {algo} of 3 x (30, 64) bfloat16"
    assert timed_out(group, fused[algo]) == f"{call}, {missing}"
    group.reset()
    plain["naive"].launch()
    assert timed_out(group, plain[algo]) == f"call 8 of the group, allreduce {algo} of 3 x (30, 64) bfloat16, {missing}"


def test_the_time_out_names_the_first_of_many_queued_calls_that_gave_up(group, hosts, short_waits):
    small, large = (df.allreduce.prepare(group, place(group, [h[:n] for h in hosts])) for n in (8, 1000))
    for _ in range(300):
        small.launch()
    large.launch(rank=0)
    large.launch(rank=1)
    for _ in range(200):
        small.launch(rank=0)
    with pytest.raises(BarrierTimeout) as caught:
        group.synchronize()
    assert caught.value.call == (
        "call 301 of the group, allreduce push_one_shot of 3 x (1000,) bfloat16, which rank 2 was not launched with"
    )


def test_the_time_out_names_a_range_of_calls_if_more_followed_than_are_recorded(group, hosts, short_waits):
    prepared = df.allreduce.prepare(group, place(group, [host[:8] for host in hosts]))
    prepared.launch()
    group.synchronize()
    for _ in range(history.KEPT + 1):
        prepared.launch(rank=0)
    with pytest.raises(BarrierTimeout) as caught:
        group.synchronize()
    assert caught.value.call == f"one of the calls 2 to {1 + history.KEPT // 2} of the group"


def test_the_timeout_names_the_call_in_a_graph(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    both = [df.allreduce.prepare(group, xs, ys, algo=algo) for algo in PULL]
    graphs = []
    for ranks in ([0, 1, 2], [0]):
        with df.Graph.capture([group.ranks[rank].stream for rank in ranks]) as graph:
            for call in both:
                for rank in ranks:
                    call.launch(rank=rank)
        graphs.append(graph)
    both[0].launch()
    graphs[0].launch(group.ranks[0].stream)
    group.synchronize()
    both[0].launch()
    graphs[0].launch(group.ranks[0].stream)
    assert timed_out(group, both[1]).startswith("call 7 of the group, allreduce two_stage of 3 x (1000,)")
    group.reset()
    both[1].launch()
    graphs[1].launch(group.ranks[0].stream)
    with pytest.raises(BarrierTimeout) as caught:
        group.synchronize()
    assert caught.value.call == (
        "call 9 of the group, allreduce one_stage of 3 x (1000,) bfloat16, call 1 of 2 in the replay of a graph, "
        f"which rank {caught.value.peer} was not launched with"
    )
    group.reset()
    for graph in graphs:
        graph.close()


def test_a_call_in_a_graph_of_another_library_is_named_by_a_range(group, hosts, short_waits):
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    prepared = df.allreduce.prepare(group, xs, ys)
    prepared.launch()
    group.synchronize()
    stream = group.ranks[0].stream
    mode = group.driver.types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with group.ranks[0].device.use():
        group.driver.cuStreamBeginCapture(stream.handle, mode)
        prepared.launch(rank=0)
        group.driver.cuGraphDestroy(group.driver.cuStreamEndCapture(stream.handle))
    group.synchronize()
    prepared.launch()
    assert timed_out(group, prepared) == (
        "one of the calls 2 to 3 of the group, or one in a graph whose replays the group cannot see"
    )


def test_the_record_of_calls_keeps_no_array_alive(group, hosts):
    kept = weakref.ref(df.allreduce(group, place(group, hosts))[0])
    gc.collect()
    assert kept() is None


@pytest.mark.emulated
@pytest.mark.parametrize("algo", PULL)
@pytest.mark.parametrize("op", scenarios.OPS)
def test_one_rank_that_gives_up_ends_the_wait_of_all_and_later_calls_write_nothing(op, algo):
    scenarios.one_timeout_ends_all(op, algo)
