# SPDX-License-Identifier: Apache-2.0
"""Traced collectives: the same results as without a trace, and records of what happened."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from trace_support import ALL_ALGOS, PULL, PUSH, bytes_of, inputs

import drvfuse as df
from drvfuse import config
from drvfuse.errors import ArgumentError, BarrierTimeout, CaptureError
from drvfuse.trace import decode, layout, statistics

pytestmark = pytest.mark.gpus(2)


def private(group, rng, shape):
    """Inputs that peers cannot read. Each array keeps its memory allocated."""
    hosts = [array.numpy() for array in inputs(group, rng, shape)]
    memory = [df.SymmetricBuffer([rank.device], hosts[0].nbytes) for rank in group]
    arrays = [
        df.view(m.ptrs[0], shape, "bfloat16", rank.device, owner=m) for m, rank in zip(memory, group, strict=True)
    ]
    for array, host in zip(arrays, hosts, strict=True):
        array.copy_from(host)
    return arrays


KINDS = ("plain", "ragged", "epilogue", "staged", "fused", "fused ragged", "fused residual", "fused staged")


def calls(group, rng):
    """For each of `KINDS` a function that takes an algorithm and a trace and makes a call."""
    xs, rows, odd = inputs(group, rng, 20_000), inputs(group, rng, (11, 520)), inputs(group, rng, (5, 33))
    gammas, odd_gammas = inputs(group, rng, 520), inputs(group, rng, 33)
    staged = private(group, rng, (11, 520))
    half = df.Epilogue("x * half", half=df.float32(0.5))

    def fused(*arrays, **rest):
        return lambda algo, trace: df.allreduce_rmsnorm_fp8(
            group, *arrays, epsilon=1e-6, algo=algo, trace=trace, **rest
        )

    return {
        "plain": lambda algo, trace: df.allreduce(group, xs, algo=algo, trace=trace),
        "ragged": lambda algo, trace: df.allreduce(group, odd, algo=algo, trace=trace),
        "epilogue": lambda algo, trace: df.allreduce(group, xs, algo=algo, epilogue=half, trace=trace),
        "staged": lambda algo, trace: df.allreduce(group, staged, algo=algo, trace=trace),
        "fused": fused(rows, gammas),
        "fused ragged": fused(odd, odd_gammas),
        "fused residual": fused(rows, gammas, residuals=rows),
        "fused staged": fused(staged, gammas),
    }


@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize("name", KINDS)
def test_tracing_changes_no_result_bit_and_every_event_is_recorded(group, rng, name, algo):
    if algo == "naive" and "staged" in name:
        pytest.skip("naive copies its inputs, and stages none")
    trace = df.Trace(group)
    call = calls(group, rng)[name]
    plain = bytes_of(call(algo, None))
    assert bytes_of(call(algo, trace)) == plain
    group.synchronize()
    for section in trace._sections:
        table = decode._words(section, section.array.numpy())
        counts = 1 + (table[:, layout.HEADER_WORDS + section.rounds * section.peers :] != 0).sum(axis=1)
        assert counts.min() > 1
        assert counts.max() <= section.phases <= 2 * counts.max() + 8
    consistent(trace.records(), group.size)


def consistent(records, ranks):
    """Check that each block begins and ends once, its phases are contiguous, and waits lie within barriers."""
    assert records.size
    for launch, rank in sorted(set(records[["launch", "rank"]].tolist())):
        own = records[(records["launch"] == launch) & (records["rank"] == rank)]
        blocks = own[own["role"] == "block"]
        assert blocks["block"].tolist() == list(range(len(blocks)))
        for whole in blocks:
            mine = own[own["block"] == whole["block"]]
            laps = mine[~np.isin(mine["role"], ("block", "wait"))]
            waits = mine[mine["role"] == "wait"]
            assert (mine["sm"] == whole["sm"]).all() and (mine["end"] >= mine["start"]).all()
            assert laps["role"][0] == "producer" and laps["start"][0] == 0
            assert (laps["start"][1:] == laps["end"][:-1]).all()
            assert laps["role"][-1] == "finish" and laps["end"][-1] == whole["end"] > whole["start"] == 0
            assert (laps["peer"] == -1).all()
            for barrier in laps[laps["role"] == "barrier"]:
                inside = waits[waits["start"] == barrier["start"]]
                assert sorted(inside["peer"]) == list(range(ranks))
                assert (inside["end"] <= barrier["end"]).all()
            assert len(waits) == ranks * (laps["role"] == "barrier").sum()
    times = records["end_ns"] - records["start_ns"]
    assert (times >= 0).all() and records["start_ns"].min() == 0


@pytest.mark.parametrize("algo", PULL)
def test_every_block_of_the_grid_has_records(group, rng, algo):
    trace = df.Trace(group)
    df.allreduce(group, inputs(group, rng, 1 << 15), algo=algo, max_num_blocks=3, trace=trace)
    records = trace.records()
    whole = records[records["role"] == "block"]
    assert whole[["rank", "block"]].tolist() == [(rank, block) for rank in range(group.size) for block in range(3)]
    assert set(records["kernel"]) == {f"allreduce_{algo}"} and set(records["launch"]) == {0}
    expected = {"producer", "barrier", "load", "reduce", "store", "sync", "wait", "finish", "block"}
    assert set(records["role"]) == expected | ({"gather"} if algo == "two_stage" else set())


@pytest.mark.parametrize(
    ("algo", "plain", "norm"),
    [
        (PUSH[0], {"receive", "store"}, {"receive", "reduce", "store"}),
        (PUSH[1], {"reduce", "gather"}, {"receive", "reduce", "store", "gather"}),
    ],
)
def test_every_block_of_a_push_kernel_has_records_of_its_phases(group, rng, algo, plain, norm):
    trace = df.Trace(group)
    df.allreduce(group, inputs(group, rng, 1 << 15), algo=algo, max_num_blocks=3, trace=trace)
    rows, gammas = inputs(group, rng, (11, 520)), inputs(group, rng, 520)
    df.allreduce_rmsnorm_fp8(group, rows, gammas, epsilon=1e-6, algo=algo, trace=trace)
    records = trace.records()
    for launch, (op, roles) in enumerate((("allreduce", plain), ("allreduce_rmsnorm_fp8", norm))):
        own = records[records["launch"] == launch]
        (blocks,) = {section.blocks for section in trace._sections if section.launch == launch}
        whole = own[own["role"] == "block"]
        assert whole[["rank", "block"]].tolist() == [(rank, b) for rank in range(group.size) for b in range(blocks)]
        assert set(own["kernel"]) == {f"{op}_{algo}"}
        assert set(own["role"]) == {"producer", "push", "finish", "block"} | roles


DELAY = r"""
extern "C" __global__ void delay(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}
"""


@pytest.mark.parametrize("late", [0, 1])
def test_statistics_name_a_late_rank_as_the_one_waited_for(group, rng, late):
    trace = df.Trace(group)
    call = df.allreduce.prepare(group, inputs(group, rng, 5000), algo="one_stage", trace=trace)
    delay = df.compile(DELAY, driver=group.driver)["delay"]
    for rank in group:
        delay.load(rank.device)
    call.launch()
    group.synchronize()
    delay.prepare(1, 1, 5_000_000, device=group[late].device)(group[late].stream)
    call.launch()
    group.synchronize()
    records = trace.records()
    found = {(wait.rank, wait.peer): wait for wait in statistics.waits(records)}
    assert set(found) == {(rank, peer) for rank in range(group.size) for peer in range(group.size) if rank != peer}
    punctual = set(range(group.size)) - {late}
    for rank in punctual:
        assert found[rank, late].longest > 4000 and found[rank, late].last >= 0.5
        assert found[late, rank].longest < 2000
        for other in punctual - {rank}:
            assert found[rank, other].longest < 2000
    begins = {skew.rank: skew.first for skew in statistics.skews(records)}
    assert min(begins, key=begins.__getitem__) != late and begins[late] > 4000


@pytest.mark.parametrize("algo", PUSH)
def test_the_wait_for_a_late_rank_by_push_is_in_the_phases_that_receive(group, rng, algo):
    """Words of all peers are awaited together, so no peer is named. The phases still sum to the time of the blocks."""
    trace, late = df.Trace(group), 1
    call = df.allreduce_rmsnorm_fp8.prepare(
        group, inputs(group, rng, (3, 256)), inputs(group, rng, 256), epsilon=1e-6, algo=algo, trace=trace
    )
    delay = df.compile(DELAY, driver=group.driver)["delay"]
    for rank in group:
        delay.load(rank.device)
    call.launch()
    group.synchronize()
    delay.prepare(1, 1, 5_000_000, device=group[late].device)(group[late].stream)
    call.launch()
    group.synchronize()
    records = trace.records()
    assert statistics.waits(records) == []
    longest = {rank.index: 0.0 for rank in group}
    share = dict(longest)
    for phase in statistics.phases(records):
        share[phase.rank] += phase.share
        if phase.role in ("receive", "gather"):
            longest[phase.rank] = max(longest[phase.rank], phase.longest)
    assert share == pytest.approx({rank.index: 1.0 for rank in group})
    assert {rank for rank, took in longest.items() if took > 4000} == {rank.index for rank in group} - {late}


def test_a_replay_overwrites_the_records_of_the_previous_one(group, rng):
    trace = df.Trace(group)
    xs = inputs(group, rng, 3000)
    ys = [rank.empty(3000, "bfloat16") for rank in group]
    group.synchronize()
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        df.allreduce(group, xs, ys, algo="two_stage", trace=trace)
        df.allreduce(group, ys, ys, algo="naive", trace=trace)
    gc.collect()
    seen = []
    for _ in range(2):
        trace.clear()
        assert not trace.records().size
        graph.launch(streams[0])
        group.synchronize()
        records = trace.records()
        assert set(records[["launch", "kernel"]].tolist()) == {(0, "allreduce_two_stage"), (1, "allreduce_naive")}
        consistent(records, group.size)
        seen.append(records)
    assert seen[0]["role"].tolist() == seen[1]["role"].tolist()
    for call, what in ((trace.records, "read"), (trace.clear, "cleared")):
        with pytest.raises(CaptureError, match=f"<Trace of .* cannot be {what}"), df.Graph.capture(streams):
            call()
    graph.close()


def test_a_call_is_refused_if_the_trace_is_full(group, rng):
    xs = inputs(group, rng, 10_000)
    ys = [rank.zeros(10_000, "bfloat16") for rank in group]
    trace = df.Trace(group, nbytes=1024)
    df.allreduce(group, xs, algo="one_stage", trace=trace)
    with pytest.raises(ArgumentError, match=r"trace is too small: \d+ of its 1024 bytes") as caught:
        df.allreduce(group, xs, ys, algo="one_stage", trace=trace)
    assert caught.value.argument == "trace"
    group.synchronize()
    assert not any(np.asarray(y.numpy()).view(np.uint16).any() for y in ys)
    assert set(trace.records()["launch"]) == {0}
    trace.clear()
    df.allreduce(group, xs, ys, algo="one_stage", trace=trace)
    assert set(trace.records()["launch"]) == {1}


def test_a_block_with_too_many_phases_is_refused(group):
    xs = [rank.empty(8 << 20, "bfloat16") for rank in group]
    trace = df.Trace(group, nbytes=64 << 20)
    with pytest.raises(ArgumentError, match=r"trace is of allreduce_one_stage with \d+ phases a block") as caught:
        df.allreduce.prepare(group, xs, algo="one_stage", max_num_blocks=1, trace=trace)
    assert caught.value.argument == "trace"
    df.allreduce.prepare(group, xs, algo="one_stage", trace=trace)


def test_clear_keeps_the_section_of_a_prepared_call(group, rng):
    xs = inputs(group, rng, 100)
    trace = df.Trace(group)
    first = df.allreduce.prepare(group, xs, algo="one_stage", trace=trace)
    second = df.allreduce.prepare(group, xs, algo="two_stage", trace=trace)
    first.launch()
    assert set(trace.records()["launch"]) == {0}
    del first
    gc.collect()
    trace.clear()
    third = df.allreduce.prepare(group, xs, algo="one_stage", trace=trace)
    second.launch()
    third.launch()
    records = trace.records()
    assert set(records[["launch", "kernel"]].tolist()) == {(1, "allreduce_two_stage"), (2, "allreduce_one_stage")}
    consistent(records, group.size)


def test_wrong_traces_are_refused(group, rng, driver):
    xs = inputs(group, rng, 100)
    for wrong in (True, [df.Trace(group)] * group.size, df.Trace(group[0].device)):
        with pytest.raises(ArgumentError) as caught:
            df.allreduce(group, xs, trace=wrong)
        assert caught.value.argument == "trace"
    assert str(caught.value).startswith(
        f"trace is made for [{group[0].device!r}]; it must be made for {group[1].device!r}"
    )
    for nbytes in (0, 1023, "1024", True):
        with pytest.raises(ArgumentError, match="nbytes"):
            df.Trace(group, nbytes=nbytes)
    with pytest.raises(ArgumentError, match="where"):
        df.Trace(0)
    with pytest.raises(CaptureError), df.Graph.capture([rank.stream for rank in group]):
        df.Trace(group)


def test_the_trace_of_a_time_out_shows_the_wait_for_the_missing_rank(group, rng):
    trace = df.Trace(group)
    with config.override(spin_timeout=0.02):
        call = df.allreduce.prepare(group, inputs(group, rng, 100), algo="one_stage", trace=trace)
    came = [rank.index for rank in group if rank.index != 1]
    for rank in came:
        call.launch(rank=rank)
    time.sleep(0.1 if group.driver.name == "cuda" else 0)
    with pytest.raises(BarrierTimeout):
        group.synchronize()
    records = trace.records()
    group.reset()
    assert set(records["rank"]) == set(came)
    assert 1 not in records["peer"][records["role"] == "wait"]
    assert (records["end_ns"][records["role"] == "block"] > 10e6).all()


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ["two_stage", *PUSH])
def test_two_launches_of_a_traced_call_in_a_pdl_chain_do_not_race(rng, algo):
    machine = df.emu.Machine(devices=2, race="strict")
    with df.Group.local(2, driver=machine, max_blocks=2) as group:
        trace = df.Trace(group)
        xs = inputs(group, rng, 3000)
        ys = [rank.empty(3000, "bfloat16") for rank in group]
        rows, gammas = inputs(group, rng, (7, 136)), inputs(group, rng, 136)
        options = {"algo": algo, "pdl_level": df.PDLLevel.OVERLAP_AT_BEGINNING, "trace": trace}
        calls = [
            df.allreduce.prepare(group, xs, ys, **options),
            df.allreduce_rmsnorm_fp8.prepare(group, rows, gammas, epsilon=1e-6, **options),
        ]
        for call in calls * 3:
            call.launch()
        group.synchronize()
        consistent(trace.records(), 2)
    assert not machine.reports
