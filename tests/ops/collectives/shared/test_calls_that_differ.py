# SPDX-License-Identifier: Apache-2.0
"""Kernels detect calls that differ between ranks: calls that would hang, and calls that would end with wrong results.
The groups here have one process, but their kernels compare calls as those of several processes do."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from collective_support import ALGOS, PUSH, assert_bits, place, random_inputs

import drvfuse as df
from drvfuse import config, reference
from drvfuse.check.differing import DIFFERENCES, GARBAGE, HANGING, SILENT, Differing
from drvfuse.check.substitutions import ANY_ORDER
from drvfuse.comm import workspace
from drvfuse.comm.calls import ENTRIES, TABLE_BYTES, CallTable, ComparedCalls, hash_of
from drvfuse.errors import BarrierTimeout, CallMismatch
from drvfuse.runtime.array import view


@pytest.fixture
def compared_group(new_group):
    """`compared_group(n)`: a group in one process whose kernels compare the calls of its ranks, as the kernels of
    groups over several processes do."""

    def make(n, **options):
        group = new_group(n, **options)
        group.calls = ComparedCalls.of_one_process(first=False)
        return group

    return make


def launch(calls_of_rank):
    """Launch the calls. On a GPU a kernel may report the difference before the last launch, which then raises."""
    with ANY_ORDER.made(), contextlib.suppress(CallMismatch):
        for rank, calls in enumerate(calls_of_rank):
            for call in calls:
                call.launch(rank=rank)


def differ(group, kind, odd):
    """Launch calls in which rank `odd` differs from the others. Returns the call of the others and that of `odd`."""
    usual, other = DIFFERENCES[kind](Differing(group))
    launch([other if rank == odd else usual for rank in range(group.size)])
    return usual[0], other[0]


def mismatch(group):
    with pytest.raises(CallMismatch, match="results since that call are undefined on every rank") as caught:
        group.synchronize()
    return caught.value


def works(group, rng):
    hosts = random_inputs(rng, group.size, (3, 264), "bfloat16")
    for algo in ALGOS:
        assert_bits(df.allreduce(group, place(group, hosts), algo=algo), reference.allreduce(hosts))
    group.synchronize()


def word_of(group, rank, offset, dtype="uint64"):
    return int(view(group.workspace.pointers[rank] + offset, 1, dtype, group[rank].device).numpy()[0])


# Each number of ranks needs kernels of its own. So, to save compile time, every difference is tested with 3 ranks and
# with only one of 2 and 8.
KINDS = [(n, kind) for number, kind in enumerate(DIFFERENCES) for n in (3, (2, 8)[number % 2])]


@pytest.mark.parametrize(("n", "kind"), [pytest.param(*case, marks=pytest.mark.gpus(case[0])) for case in KINDS])
def test_the_rank_that_makes_another_call_is_found_and_the_group_works_after_a_reset(compared_group, rng, n, kind):
    group = compared_group(n)
    for odd in {0, n - 1} if n < 8 else {5}:
        usual, other = differ(group, kind, odd)
        error = mismatch(group)
        assert odd in (error.rank, error.peer) and error.rank != error.peer
        texts = [error.call, error.peer_call] if error.rank == odd else [error.peer_call, error.call]
        assert texts[0].startswith(other.describe().replace(f"{n} x ", ""))
        assert texts[1].startswith(usual.describe().replace(f"{n} x ", ""))
        assert texts[0] != texts[1]
        assert all(word_of(group, rank, workspace.ABORT_OFFSET) for rank in range(n))
        group.reset()
        works(group, rng)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("kind", HANGING | SILENT)
def test_without_the_comparison_calls_that_differ_hang_or_go_unnoticed(new_group, driver, kind):
    group = new_group(3)
    with config.override(spin_timeout=0.05 if driver == "cuda" else 0.002):
        differ(group, kind, 1)
    with pytest.raises(BarrierTimeout) if kind in HANGING else contextlib.nullcontext():
        group.synchronize()
    group.reset()


def test_every_kind_of_difference_is_hanging_silent_or_reads_garbage():
    assert sorted([*HANGING, *SILENT, *GARBAGE]) == sorted(DIFFERENCES)


@pytest.mark.gpus(3)
def test_every_call_of_the_host_raises_until_the_group_is_reset(compared_group, rng):
    group = compared_group(3)
    xs = place(group, random_inputs(rng, 3, 64, "float32"))
    with group.capture() as graphs:
        df.allreduce(group, xs, xs)
    for raising in (
        group.check,
        graphs.launch,
        group.synchronize,
        group[0].synchronize,
        lambda: df.allreduce(group, xs),
    ):
        differ(group, "dtype", 2)
        for rank in group:
            rank.stream.synchronize()
        for first in (raising, group.check, group[1].synchronize):
            with pytest.raises(CallMismatch):
                first()
        df.allreduce(group, xs)  # this call resets the group
        graphs.launch()
        group.synchronize()


@pytest.mark.gpus(2)
def test_call_numbers_count_from_the_reset_and_include_replays_of_graphs(compared_group, rng):
    group = compared_group(2)
    xs = place(group, random_inputs(rng, 2, 64, "float32"))
    with group.capture() as graphs:
        for algo in ALGOS:
            df.allreduce(group, xs, xs, algo=algo)
    for _ in range(3):
        graphs.launch()
    df.allreduce(group, xs)
    differ(group, "shape", 1)
    assert f"as its call {3 * len(ALGOS) + 2} since the last reset" in str(mismatch(group))
    group.reset()
    differ(group, "shape", 1)
    assert "as its call 1 since the last reset" in str(mismatch(group))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("before", [2**16 - 5, 2**31 - 5])
def test_call_numbers_may_wrap_around(compared_group, rng, before):
    group = compared_group(2)
    for rank, pointer in zip(group, group.workspace.pointers, strict=True):
        words = view(pointer + workspace.NUMBERS_OFFSET, workspace.MAX_RANKS, "uint32", rank.device)
        words.copy_from(np.full(workspace.MAX_RANKS, before, np.uint32))
    for _ in range(3):
        works(group, rng)
    differ(group, "dtype", 0)
    mismatch(group)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("level", df.PDLLevel.__members__.values())
def test_in_a_chain_of_dependent_launches_the_call_that_differs_is_named(compared_group, rng, level):
    if level is df.PDLLevel.NO_WAIT_OVERLAP_AT_END:
        return
    group = compared_group(2)
    xs = place(group, random_inputs(rng, 2, (5, 264), "bfloat16"))
    calls = [df.allreduce.prepare(group, xs, algo=algo, pdl_level=level) for algo in ALGOS]
    other = df.allreduce.prepare(group, xs, algo=ALGOS[0], pdl_level=level, epilogue=df.Epilogue("x * 2.0f"))
    launch([[*calls, calls[0], *calls], [*calls, other, *calls]])
    error = mismatch(group)
    assert {error.rank, error.peer} == {0, 1} and "x * 2.0f" in str(error)
    assert f"as its call {len(ALGOS) + 1} since the last reset" in error.call


@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["dtype", "shape", "pull", "fused"])
def test_calls_by_multicast_that_differ_are_found(compared_group, kind):
    group = compared_group(3)
    of = Differing(group)
    usual = of.sum("two_stage", use_multimem=True)
    if kind == "fused":
        usual, other = (of.norm("two_stage", use_multimem=True, epsilon=epsilon) for epsilon in (0.5, 1.0))
    elif kind == "pull":
        other = of.sum("two_stage")
    else:
        changed = {"dtype": "float16"} if kind == "dtype" else {"shape": (10, 36)}
        other = of.sum("two_stage", use_multimem=True, **changed)
    for _ in range(2):
        usual.launch()
        group.synchronize()
        launch([[usual], [other], [usual]])
        error = mismatch(group)
        assert 1 in (error.rank, error.peer)
        group.reset()


@pytest.mark.gpus(2)
def test_an_empty_call_is_compared_too(compared_group):
    group = compared_group(2)
    full, empty = (df.allreduce.prepare(group, [rank.zeros((n, 8), "float32") for rank in group]) for n in (4, 0))
    for _ in range(3):
        empty.launch()
        full.launch()
    group.synchronize()
    launch([[full], [empty]])
    assert {"(4, 8)", "(0, 8)"} == {text.split(" of ")[1].split(" float32")[0] for text in calls_of(mismatch(group))}


def calls_of(error):
    return error.call, error.peer_call


@pytest.mark.gpus(3)
def test_a_rank_that_makes_no_call_is_missing_and_not_different(compared_group, driver):
    group = compared_group(3)
    with config.override(spin_timeout=0.05 if driver == "cuda" else 0.002):
        call = df.allreduce.prepare(group, [rank.zeros(64, "float32") for rank in group], algo="push_one_shot")
    launch([[call], [], [call]])
    with pytest.raises(BarrierTimeout) as caught:
        group.synchronize()
    assert caught.value.peer == 1


@pytest.mark.gpus(2)
def test_calls_whose_epilogues_have_different_types_are_found(compared_group):
    group = compared_group(2)
    xs = [rank.zeros(64, "float32") for rank in group]
    calls = [df.allreduce.prepare(group, xs, epilogue=df.Epilogue("x * k", k=k)) for k in (df.float32(2), df.int32(2))]
    launch([[call] for call in calls])
    assert "float k;" in str(mismatch(group)) and "int k;" in str(mismatch(group))


@pytest.mark.gpus(3)
@pytest.mark.parametrize("kind", ["push and pull", "dtype", "pull epsilon", "order"])
def test_with_comparison_first_no_data_moves_before_the_calls_agree(new_group, kind):
    with config.override(check_calls=True):
        group = new_group(3)
    assert group.calls is not None and group.calls.first
    slots = [pointer + group.workspace.slots_offset for pointer in group.workspace.pointers]
    usual, other = DIFFERENCES[kind](Differing(group))
    checks = [call._sequence._alone for call in (usual[0], other[0])]
    before = [view(pointer, 64, "uint32", rank.device).numpy() for rank, pointer in zip(group, slots, strict=True)]
    for rank in range(3):
        checks[rank == 2].launch([rank], [group[rank].stream])
    error = mismatch(group)
    assert 2 in (error.rank, error.peer)
    for rank, pointer, words in zip(group, slots, before, strict=True):
        assert np.array_equal(view(pointer, 64, "uint32", rank.device).numpy(), words)
    group.reset()
    launch([usual, usual, other])
    mismatch(group)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("level", [df.PDLLevel.OFF, df.PDLLevel.OVERLAP_AT_BEGINNING])
def test_with_comparison_first_every_algorithm_has_the_same_bits_in_calls_and_graphs(new_group, rng, level):
    with config.override(check_calls=True):
        group = new_group(2)
    hosts = random_inputs(rng, 2, (3, 264), "bfloat16")
    xs, outs = place(group, hosts), {algo: place(group, hosts) for algo in ALGOS}
    for _ in range(2):
        for algo in (*ALGOS, "naive"):
            assert_bits(df.allreduce(group, xs, algo=algo, pdl_level=level), reference.allreduce(hosts))
    with group.capture() as graphs:
        for algo in ALGOS:
            df.allreduce(group, xs, outs[algo], algo=algo, pdl_level=level)
    graphs.launch()
    graphs.launch()
    group.synchronize()
    for algo in ALGOS:
        assert_bits(outs[algo], reference.allreduce(hosts), algo)


@pytest.mark.gpus(2)
def test_ranks_that_compare_before_and_during_a_call_work_together(compared_group, rng):
    group = compared_group(2)
    hosts = random_inputs(rng, 2, (3, 264), "bfloat16")
    xs = place(group, hosts)
    calls = []
    for first in (False, True):
        group.calls.first = first
        calls.append([df.allreduce.prepare(group, xs, algo=algo) for algo in ALGOS])
    for _ in range(2):
        launch(calls)
        launch(calls[::-1])
        group.synchronize()
    for position, call in enumerate(calls):
        assert_bits([call[-1]._result[position]], reference.allreduce(hosts))


@pytest.mark.gpus(2)
def test_a_rank_that_never_comes_to_the_comparison_is_named(new_group, driver):
    with config.override(check_calls=True):
        group = new_group(2)
    with config.override(spin_timeout=0.05 if driver == "cuda" else 0.002):
        call = df.allreduce.prepare(group, [rank.zeros(64, "float32") for rank in group])
    call.launch(rank=1)
    with pytest.raises(BarrierTimeout, match="as its call 1 since the last reset") as caught:
        group.synchronize()
    assert (caught.value.rank, caught.value.peer, caught.value.phase) == (1, 0, "call")
    assert (caught.value.expected, caught.value.seen) == (1, 0)


@pytest.mark.gpus(2)
def test_a_group_of_one_process_compares_nothing(new_group):
    group = new_group(2)
    assert group.calls is None
    df.allreduce(group, [rank.zeros(64, "float32") for rank in group])
    group.synchronize()
    assert [word_of(group, rank, workspace.NUMBERS_OFFSET) for rank in range(2)] == [0, 0]


@pytest.mark.emulated
@pytest.mark.parametrize("algo", PUSH)
def test_a_call_sends_one_word_to_each_peer(algo):
    """The emulator counts 8 bytes to each peer, in one access."""
    moved = []
    with df.emu.Machine(devices=4) as machine, df.Group.local(4, driver=machine, max_blocks=4) as group:
        xs = [rank.zeros((9, 264), "bfloat16") for rank in group]
        for calls in (None, ComparedCalls.of_one_process(first=False)):
            group.calls = calls
            call = df.allreduce.prepare(group, xs, xs, algo=algo)
            group.synchronize()
            ended = len(machine.launches)
            call.launch()
            group.synchronize()
            moved.append(sum(record.counters.total.remote_written for record in list(machine.launches)[ended:]))
    assert moved[1] - moved[0] == 4 * 3 * 8


def test_call_tables_name_the_calls_of_all_ranks_and_drop_the_oldest():
    memories = [bytearray(TABLE_BYTES) for _ in range(2)]
    of_rank = [ComparedCalls(CallTable(memories[i]), [CallTable(memories[1 - i])]) for i in range(2)]
    words = [of_rank[i].announce(f"call of rank {i}") for i in range(2)]
    assert words[0] != words[1] and not any(word % 2**16 for word in words)
    assert [calls.name(word + 7) for calls in of_rank for word in words] == ["call of rank 0", "call of rank 1"] * 2
    for number in range(ENTRIES):
        of_rank[0].announce(f"call {number}")
        of_rank[0].announce("call 0")
    assert of_rank[1].name(words[1]) == "call of rank 1"
    assert of_rank[1].name(hash_of("call 9")) == "call 9"
    assert "that no table of this host names" in of_rank[1].name(words[0])
    assert of_rank[0].announce("call of rank 0") == words[0]
    assert of_rank[1].name(words[0]) == "call of rank 0"


def test_a_long_name_is_truncated_and_hashed_in_full():
    calls = ComparedCalls.of_one_process(first=False)
    names = ["é" * 300, "é" * 301]
    words = [calls.announce(name) for name in names]
    assert words[0] != words[1]
    assert [calls.name(word) for word in words] == ["é" * 122 + "..."] * 2
