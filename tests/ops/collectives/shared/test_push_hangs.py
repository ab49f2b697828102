# SPDX-License-Identifier: Apache-2.0
"""A rank that is missing, or stops half way, in a call of a push algorithm: the report, and the group after a reset."""

from __future__ import annotations

import numpy as np
import pytest
import scenarios
from collective_support import PUSH, assert_bits, fill_late, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import config, reference
from drvfuse.comm import history, workspace
from drvfuse.errors import BarrierTimeout

pytestmark = pytest.mark.gpus(3)

OPS = ("allreduce", "allreduce_rmsnorm_fp8")
ABSENT = 0xFFFFFFFF
SMALL = 8192  # bytes of a workspace: one_shot then has 128 packs in a round of 3 ranks, two_shot 192
PATIENCE = {"cuda": 0.05, "emu": 10.0}
"""Time-outs in seconds, much longer than a poll, as on a GPU."""


@pytest.fixture(autouse=True)
def short_waits(driver):
    with config.override(spin_timeout=0.05 if driver == "cuda" else 0.001):  # the emulator's time is virtual
        yield


def prepared(group, op, hosts, algo, residual=None):
    """A prepared call, and a function that checks its results."""
    if op == "allreduce":
        call = df.allreduce.prepare(group, place(group, hosts), algo=algo)
        return call, lambda result: assert_bits(result, reference.allreduce(hosts))
    gamma = np.linspace(-2, 2, hosts[0].shape[-1]).astype(np.float32).astype(hosts[0].dtype)
    residuals = replicate(group, residual) if residual is not None else None
    call = df.allreduce_rmsnorm_fp8.prepare(
        group, place(group, hosts), replicate(group, gamma), epsilon=1e-6, residuals=residuals, algo=algo
    )

    def check(result):
        expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=residual)
        for arrays, wanted in zip(result, expected, strict=True):
            if wanted is not None:
                assert_bits(arrays, wanted)

    return call, check


def works(group, rng):
    """Calls of every push algorithm and op give the right bits, twice, so that both halves of the slots are used."""
    for _ in range(2):
        for op in OPS:
            for algo in PUSH:
                hosts = random_inputs(rng, 3, (3, 264), "bfloat16")
                call, check = prepared(group, op, hosts, algo)
                check(call.launch())
    group.synchronize()


def timed_out(group):
    with pytest.raises(BarrierTimeout, match="results since that call are undefined") as caught:
        group.synchronize()
    return caught.value


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("algo", "missing"), [(PUSH[0], 0), (PUSH[0], 2), *((PUSH[1], rank) for rank in range(3))])
def test_a_rank_that_is_never_launched_is_named(new_group, rng, driver, algo, op, missing):
    """By two shots, a rank may wait for a rank that itself waits for the missing one; the error names the missing
    rank."""
    group = new_group(3)
    with config.override(spin_timeout=PATIENCE[driver]):
        call, check = prepared(group, op, random_inputs(rng, 3, (3, 264), "bfloat16"), algo)
    for rank in range(3):
        if rank != missing:
            call.launch(rank=rank)
    error = timed_out(group)
    assert error.rank != missing and (error.peer, error.phase) == (missing, "push")
    assert (error.expected, error.seen) == (1, ABSENT)
    assert 128 // 16 <= error.word < group.workspace.half_bytes // 16
    assert f"{error.phase}: word {error.word} of its slots has not come" in str(error)
    assert f"block {error.block}, " in str(error)
    group.reset()
    group.check()
    check(call.launch())
    works(group, rng)


@pytest.mark.emulated
@pytest.mark.parametrize(("algo", "ranks"), [("push_one_shot", 4), ("push_one_shot", 8), ("push_two_shot", 4)])
def test_with_the_default_bound_one_missing_rank_of_many_is_named(rng, algo, ranks):
    """The error comes although a thread that polls the words of many peers reads its clock rarely."""
    hosts = random_inputs(rng, ranks, (2, 64), "float16")
    with df.emu.Machine(devices=ranks) as machine, df.Group.local(ranks, driver=machine, max_blocks=4) as group:
        inputs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        with config.override(spin_timeout=PATIENCE["emu"]):
            call = df.allreduce.prepare(group, inputs, algo=algo)
        for rank in range(ranks - 1):
            call.launch(rank=rank)
        assert timed_out(group).peer == ranks - 1
        assert_bits(call.launch(), reference.allreduce(hosts))
        group.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sleeper", range(3))
def test_a_sleeping_rank_of_three_is_named(new_group, rng, driver, op, sleeper):
    """Other ranks wait for results of ranks that wait for the sleeping one, and must not give up first.

    This needs a GPU: on the emulated driver a sleeping kernel would stop virtual time for the other ranks.
    """
    group = new_group(3)
    with config.override(spin_timeout=PATIENCE[driver]):
        call, check = prepared(group, op, random_inputs(rng, 3, (3, 264), "bfloat16"), "push_two_shot")
    fill_late(group, group[sleeper].empty(8, "bfloat16"), 0, ns=300_000_000)(group[sleeper].stream)
    call.launch()
    error = timed_out(group)
    assert (error.peer, error.phase) == (sleeper, "push")
    check(call.launch())


def test_the_raised_report_is_one_whose_peer_has_not_reported(new_group):
    """Rank 0 waits for rank 1, which waits for rank 2. If the waits form a cycle, the first report is raised."""
    owner = new_group(3).workspace
    for chain, raised in (
        ((1, 2, None), 1),
        ((1, None, None), 0),
        ((2, 0, None), 0),
        ((1, 2, 0), 0),
        ((2, 2, None), 0),
    ):
        for rank, peer in enumerate(chain):
            owner.reports[rank]["rank"], owner.reports[rank]["peer"] = rank, peer or 0
            owner.reports[rank]["magic"] = 0 if peer is None else workspace.REPORT_MAGIC
        assert owner.first_report()["rank"] == raised
    owner.reports["magic"] = 0


def test_the_address_of_the_reported_word_follows_from_the_block_and_the_peers_rank(new_group, rng):
    """In one shot, the slots of a rank hold first the words of the next higher rank, then those of the one after it."""
    group = new_group(3)
    call, _ = prepared(group, "allreduce", random_inputs(rng, 3, 8 * 64 * 3, "bfloat16"), "push_one_shot")
    for missing in (2, 1, 0):
        for position in {0, 1, 2} - {missing}:
            call.launch(rank=position)
        for local in group:
            local.stream.synchronize()
        error = timed_out(group)
        report = group.workspace.reports[error.rank]  # either rank may give up first, and only the first one reports
        assert report["magic"] == workspace.REPORT_MAGIC and report["peer"] == missing == error.peer
        distance = (error.rank - missing) % 3
        first = 128 // 16 + (distance - 1) * 3 * 64 + 64 * int(report["block"])
        assert first <= report["word"] < first + 64
        group.reset()


@pytest.mark.parametrize(("algo", "residual"), [(PUSH[0], False), (PUSH[1], True)])
def test_a_peer_that_stops_half_way_is_a_time_out_and_the_group_recovers(new_group, rng, algo, residual):
    """Rank 2 is launched with a smaller call, so only some of the words that the others expect arrive."""
    group = new_group(3)
    large, small = ([host[:rows] for host in random_inputs(rng, 3, (9, 264), "bfloat16")] for rows in (9, 3))
    added = large[0] if residual else None
    call, check = prepared(group, "allreduce_rmsnorm_fp8", large, algo, added)
    part, check_part = prepared(group, "allreduce_rmsnorm_fp8", small, algo, added[:3] if residual else None)
    call.launch(rank=0)
    call.launch(rank=1)
    part._sequence.launches[2][0](group.ranks[2].stream)  # launch(rank=2) would refuse this
    error = timed_out(group)
    assert 2 in (error.rank, error.peer)  # rank 2 itself waits for words that arrive elsewhere
    group.reset()
    check(call.launch())
    check_part(part.launch())
    works(group, rng)


@pytest.mark.parametrize("algo", PUSH)
def test_a_peer_that_stops_after_a_round_is_named_with_the_next_round(new_group, rng, algo):
    """The other ranks wait in a later round, which the message names."""
    group = new_group(3, workspace_bytes=SMALL)
    packs = 128 if algo == "push_one_shot" else 192
    large = random_inputs(rng, 3, 8 * packs * 3, "bfloat16")
    call, check = prepared(group, "allreduce", large, algo)
    part, check_part = prepared(group, "allreduce", [host[: 8 * packs] for host in large], algo)
    call.launch(rank=0)
    call.launch(rank=1)
    part._sequence.launches[2][0](group.ranks[2].stream)
    error = timed_out(group)
    assert error.rank in (0, 1) and error.expected == 2
    assert (error.phase, error.peer) == ("push of round 2", 2) or (algo, error.phase) == (PUSH[1], "gather of round 2")
    assert f"{error.phase}: word" in str(error)
    group.reset()
    check(call.launch())
    check_part(part.launch())
    works(group, rng)


@pytest.mark.parametrize("algo", PUSH)
def test_a_call_of_an_even_number_of_rounds_is_named(new_group, rng, algo):
    """A call of an even number of rounds leaves the epoch unchanged, so several calls may begin with one epoch. The
    error names the call that began with the epoch in the report or, if there are several, the range of their numbers.
    """
    group = new_group(3, workspace_bytes=SMALL)
    two = prepared(group, "allreduce", random_inputs(rng, 3, 8 * 200, "bfloat16"), algo)[0]
    one = prepared(group, "allreduce", random_inputs(rng, 3, 8 * 3, "bfloat16"), algo)[0]
    naive = df.allreduce.prepare(group, place(group, random_inputs(rng, 3, 10, "bfloat16")), algo="naive")
    assert (two.note.barriers, one.note.barriers, naive.note.barriers) == (0, 1, 0)
    assert (two.note.waits, one.note.waits, naive.note.waits) == (True, True, False)
    for call in (two, two, one, naive):
        call.launch()
    two.launch(rank=0)
    error = timed_out(group)
    assert error.call == (
        f"call 5 of the group, allreduce {algo} of 3 x (1600,) bfloat16, which rank {error.peer} was not launched with"
    )
    group.reset()
    for call in (one, two, naive, two):
        call.launch()
    two.launch(rank=0)
    one.launch(rank=0)
    error = timed_out(group)
    assert error.call == "one of the calls 7 to 11 of the group"
    group.reset()
    two.launch()
    group.synchronize()  # completes the calls so far
    two.launch(rank=0)
    assert timed_out(group).call.startswith("call 13 of the group, ")


def test_a_call_that_may_be_one_of_the_unrecorded_ones_is_named_by_a_range(new_group, rng):
    """The report names the epoch at which the call began. If several calls that are no longer recorded may have
    begun at this epoch, the error names the range of these calls."""
    group = new_group(3, workspace_bytes=SMALL)
    hosts = random_inputs(rng, 3, 8 * 200, "bfloat16")
    two, one = (prepared(group, "allreduce", [h[:n] for h in hosts], "push_one_shot")[0] for n in (8 * 200, 8))
    one.launch()
    one.launch()
    for _ in range(history.KEPT):
        two.launch(rank=0)
    assert timed_out(group).call == f"one of the calls 3 to {2 + history.KEPT} of the group"


@pytest.mark.parametrize("algo", PUSH)
@pytest.mark.parametrize("calls", [2**32 - 1, 2**32, 2**40 + 3])
def test_a_call_is_named_after_more_than_two_to_the_32_calls(new_group, rng, algo, calls):
    """The kernels compare 32 bits of the epoch; the report has all 64."""
    group = new_group(3)
    call, _ = prepared(group, "allreduce", random_inputs(rng, 3, 2000, "bfloat16"), algo)
    group.synchronize()
    for pointer, rank in zip(group.workspace.pointers, group, strict=True):
        word = df.view(pointer + workspace.EPOCH_OFFSET, 1, "uint64", rank.device)
        word.copy_from(np.array([calls * workspace.EPOCH_UNIT], np.uint64))
    group.state.history._older = [history.Totals(calls, calls) for _ in group]
    call.launch()
    call.launch(rank=0)
    call.launch(rank=1)
    error = timed_out(group)
    assert error.expected == calls + 2
    assert error.call.startswith(f"call {calls + 2} of the group, allreduce {algo}")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algo", PUSH)
def test_calls_after_the_time_out_end_at_once(new_group, rng, algo, op):
    group = new_group(3)
    call, _ = prepared(group, op, random_inputs(rng, 3, (3, 264), "bfloat16"), algo)
    for _ in range(4):
        call.launch(rank=0)
        call.launch(rank=1)
    error = timed_out(group)
    assert error.call.startswith("call 1 of the group")
    works(group, rng)


@pytest.mark.emulated
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algo", PUSH)
def test_one_rank_that_gives_up_ends_the_wait_of_all(op, algo):
    """Rank 0 has a short time-out. When it gives up, the wait of rank 1, whose time-out is far longer, ends too. A
    second call on both ranks ends without waiting.
    """
    with scenarios.opened(3, workspace_bytes=1 << 16) as (machine, group):
        hosts = random_inputs(np.random.default_rng(3), 3, (4, 256), "bfloat16")
        with config.override(spin_timeout=0.001):
            hasty, check = prepared(group, op, hosts, algo)
        with config.override(spin_timeout=1000.0):
            patient, second = (prepared(group, op, hosts, algo)[0] for _ in range(2))
        patient._sequence.launches[0] = hasty._sequence.launches[0]  # the time-out is a launch parameter
        patient.launch(rank=0)
        patient.launch(rank=1)
        second.launch(rank=0)
        second.launch(rank=1)
        for rank in group:
            rank.stream.synchronize()
        assert machine.clock() < 100_000_000_000
        assert list(group.workspace.reports["magic"]) == [workspace.REPORT_MAGIC, 0, 0]
        for pointer, rank in zip(group.workspace.pointers, group, strict=True):
            assert df.view(pointer + workspace.ABORT_OFFSET, 1, "uint64", rank.device).numpy()[0] == 1
        group.reset()
        check(hasty.launch())


@pytest.mark.emulated
@pytest.mark.parametrize("residual", [False, True])
def test_threads_of_a_cluster_that_give_up_exit_together(residual):
    """A store to the shared memory of a block that has exited is a fault."""
    for seed in (1, 2):
        with df.emu.Machine(devices=2, seed=seed, race="strict") as machine:
            group = df.Group.local(2, driver=machine, max_blocks=4, workspace_bytes=1 << 17)
            hosts = random_inputs(np.random.default_rng(seed), 2, (3, 2048), "bfloat16")
            for algo in PUSH:
                call, check = prepared(group, "allreduce_rmsnorm_fp8", hosts, algo, hosts[0] if residual else None)
                assert call._ready[0].planned.cluster == 8
                call.launch(rank=seed % 2)
                timed_out(group)
                check(call.launch())
            group.close()
        assert machine.reports == []


def test_a_time_out_in_a_graph_replay_is_raised(new_group, rng):
    group = new_group(3)
    hosts = random_inputs(rng, 3, 1000, "bfloat16")
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys, algo="push_one_shot")
    graphs = []
    for position, rank in enumerate(group):
        with df.Graph.capture([rank.stream]) as graph:
            call.launch(rank=position)
        graphs.append(graph)
    for rank, graph in list(zip(group, graphs, strict=True))[:2]:
        graph.launch(rank.stream)
    assert timed_out(group).peer == 2
    group.reset()
    for rank, graph in zip(group, graphs, strict=True):
        graph.launch(rank.stream)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    for graph in graphs:
        graph.close()
