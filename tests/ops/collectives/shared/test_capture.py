# SPDX-License-Identifier: Apache-2.0
"""Collectives inside CUDA graphs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from collective_support import ALGOS, ALL_ALGOS, assert_bits, fill_late, garbage, place, random_inputs

import drvfuse as df
from drvfuse import config, reference
from drvfuse.errors import CaptureError, ClosedError, DriverError, Unsupported

pytestmark = pytest.mark.gpus(3)

COUNT = 3000


@pytest.fixture
def group(open_group):
    found = open_group(3)
    found.synchronize()
    return found


@pytest.fixture
def hosts(rng):
    return random_inputs(rng, 3, COUNT, "bfloat16")


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_replays_use_the_current_contents_of_the_inputs(group, rng, algo):
    xs = [rank.empty(COUNT, "bfloat16") for rank in group]
    ys, zs = garbage(group, COUNT, "bfloat16"), garbage(group, COUNT, "bfloat16")
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        df.allreduce(group, xs, ys, algo=algo)
        df.allreduce(group, ys, zs, algo=algo)
    for _ in range(3):
        hosts = random_inputs(rng, 3, COUNT, "bfloat16")
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        graph.launch(streams[0])
        group.synchronize()
        once = reference.allreduce(hosts)
        assert_bits(ys, once, algo)
        assert_bits(zs, reference.allreduce([once] * 3), algo)
        assert_bits(df.allreduce(group, xs), once)
        group.synchronize()
    graph.close()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_the_fused_op_can_be_captured(group, rng, algo, residual):
    hosts = random_inputs(rng, 3, (6, 64), "bfloat16")
    gamma = np.ones(64, np.float32).astype(hosts[0].dtype)
    added = random_inputs(rng, 1, (6, 64), "bfloat16")[0] if residual else None
    call = df.allreduce_rmsnorm_fp8.prepare(
        group,
        place(group, hosts),
        [rank.array(gamma) for rank in group],
        epsilon=1e-6,
        residuals=[rank.array(added) for rank in group] if residual else None,
        algo=algo,
    )
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        result = call.launch()
    for _ in range(2):
        graph.launch(streams[0])
    group.synchronize()
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)
    graph.close()


@pytest.mark.parametrize("algo", ALGOS)
def test_each_rank_can_have_a_graph_of_its_own(group, hosts, algo):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys, algo=algo)
    graphs = []
    for position, rank in enumerate(group):
        with df.Graph.capture(rank.stream) as graph:
            call.launch(rank=position)
        graphs.append(graph)
    for _ in range(2):
        for rank, graph in zip(group, graphs, strict=True):
            graph.launch(rank.stream)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    for graph in graphs:
        graph.close()


@pytest.mark.parametrize("own_streams", [True, False])
@pytest.mark.parametrize("algo", ALGOS)
def test_a_group_captures_a_graph_for_each_rank(group, rng, algo, own_streams):
    xs = [rank.empty(COUNT, "bfloat16") for rank in group]
    ys, zs = garbage(group, COUNT, "bfloat16"), garbage(group, COUNT, "bfloat16")
    streams = None if own_streams else [df.Stream(rank.device) for rank in group]
    with group.capture(streams) as graphs:
        df.allreduce(group, xs, ys, algo=algo, streams=streams)
        df.allreduce(group, ys, zs, algo=algo, streams=streams)
    assert len(graphs.graphs) == 3
    for _ in range(3):
        hosts = random_inputs(rng, 3, COUNT, "bfloat16")
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        group.synchronize()
        graphs.launch()
        group.synchronize()
        once = reference.allreduce(hosts)
        assert_bits(ys, once, algo)
        assert_bits(zs, reference.allreduce([once] * 3), algo)
        assert_bits(df.allreduce(group, xs), once)
        group.synchronize()
    graphs.close()
    with pytest.raises(ClosedError):
        graphs.launch()


def test_graphs_of_the_ranks_need_a_stream_of_each_ranks_device(group, hosts, refused):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    streams = [rank.stream for rank in group]
    refused(lambda: group.capture(streams[:2]).__enter__(), "streams", "3 streams, one per local rank")
    for wrong in (streams[0], 3, "current"):
        refused(lambda wrong=wrong: group.capture(wrong).__enter__(), "streams", "3 streams, one per local rank")
    with group.capture() as graphs:
        df.allreduce(group, xs, ys)
    refused(lambda: graphs.launch(streams[:1]), "streams", "3 streams, one per local rank")
    refused(lambda: graphs.launch(streams[0]), "streams", "3 streams, one per local rank")
    refused(lambda: graphs.launch([streams[0], streams[0], streams[2]]), "streams[1]", "Device 1")
    graphs.launch(streams)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))


def test_graphs_of_the_ranks_are_launched_together_or_not_at_all(group, hosts):
    """A rank whose graph is closed is found before the graphs of other ranks run and wait for it."""
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    with group.capture() as graphs:
        df.allreduce(group, xs, ys)
    graphs.graphs[2].close()
    with pytest.raises(ClosedError):
        graphs.launch()
    group.synchronize()
    assert_bits(df.allreduce(group, xs), reference.allreduce(hosts))


@pytest.mark.emulated
def test_a_launch_of_graphs_that_fails_half_way_leaves_a_group_that_works(hosts):
    """Rank 0's graph runs and waits in vain for the other ranks; the next launch resets the group first."""
    with (
        df.emu.Machine(devices=3) as machine,
        config.override(spin_timeout=0.001),
        df.Group.local(3, driver=machine, max_blocks=4, workspace_bytes=1 << 16) as group,
    ):
        xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
        with group.capture() as graphs:
            df.allreduce(group, xs, ys)
        untouched = ys[2].numpy()
        machine.inject("cuGraphLaunch", df.emu.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, after=1)
        with pytest.raises(DriverError, match="cuGraphLaunch"):
            graphs.launch()
        assert_bits(ys[2:], untouched)
        graphs.launch()
        group.synchronize()
        assert_bits(ys, reference.allreduce(hosts))
        graphs.close()


def test_an_exception_abandons_the_captures_of_all_ranks(group, hosts):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    with pytest.raises(KeyError, match="mine"), group.capture():
        df.allreduce(group, xs, ys)
        raise KeyError("mine")
    with pytest.raises(Unsupported, match="one capture"), group.capture():
        df.allreduce(group, xs, ys, algo="naive")
    assert_bits(df.allreduce(group, xs), reference.allreduce(hosts))


def test_naive_requires_the_streams_of_all_ranks_in_one_capture(group, hosts):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    with pytest.raises(Unsupported, match="one capture"), df.Graph.capture(group.ranks[0].stream):
        df.allreduce(group, xs, ys, algo="naive")
    assert_bits(df.allreduce(group, xs, ys, algo="naive"), reference.allreduce(hosts))


def test_a_captured_call_must_be_given_its_outputs(group, hosts):
    xs = place(group, hosts)
    streams = [rank.stream for rank in group]
    with pytest.raises(CaptureError, match="outputs"), df.Graph.capture(streams):
        df.allreduce(group, xs)
    gammas = [rank.zeros(COUNT, "bfloat16") for rank in group]
    out = garbage(group, COUNT, "float8_e4m3fn")
    with pytest.raises(CaptureError, match="scales"), df.Graph.capture(streams):
        df.allreduce_rmsnorm_fp8(group, xs, gammas, epsilon=1e-6, outputs=out)
    assert_bits(df.allreduce(group, xs), reference.allreduce(hosts))


def test_a_capture_on_other_streams_needs_a_synchronised_group(group, hosts):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    df.allreduce(group, xs, ys)
    streams = [df.Stream(rank.device) for rank in group]
    with pytest.raises(CaptureError, match="synchronize"), df.Graph.capture(streams):
        df.allreduce(group, xs, ys, streams=streams)
    group.synchronize()
    with df.Graph.capture(streams) as graph:
        df.allreduce(group, xs, ys, streams=streams)
        with pytest.raises(CaptureError, match="end that capture"):
            df.allreduce(group, xs, ys)
    graph.launch(streams[0])
    df.allreduce(group, ys, xs)
    group.synchronize()
    once = reference.allreduce(hosts)
    assert_bits(ys, once)
    assert_bits(xs, reference.allreduce([once] * 3))
    graph.close()
    for stream in streams:
        stream.close()


def test_streams_joined_to_one_capture_are_ordered(group, hosts):
    xs, ys, zs = place(group, hosts), garbage(group, COUNT, "bfloat16"), garbage(group, COUNT, "bfloat16")
    own = [rank.stream for rank in group]
    others = [df.Stream(rank.device) for rank in group]
    with df.Graph.capture([*own, *others]) as graph:
        df.allreduce(group, xs, ys)
        df.allreduce(group, ys, zs, streams=others)
    graph.launch(own[0])
    group.synchronize()
    assert_bits(zs, reference.allreduce([reference.allreduce(hosts)] * 3))
    graph.close()
    for stream in others:
        stream.close()


def test_a_graph_keeps_its_arrays(group, hosts):
    ys = garbage(group, COUNT, "bfloat16")
    streams = [rank.stream for rank in group]
    call = df.allreduce.prepare(group, place(group, hosts), ys)
    with df.Graph.capture(streams) as graph:
        call.launch()
    del call
    for _ in range(3):
        place(group, [np.zeros_like(host) for host in hosts])
    graph.launch(streams[0])
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    graph.close()


def test_a_graph_keeps_the_epilogue_arrays_that_it_was_captured_with(new_group):
    group = new_group(3)
    ones = np.ones(COUNT, np.float32)
    xs, ys = place(group, [ones] * 3), garbage(group, COUNT, "float32")

    def bias(value):
        return df.Replicated([rank.array(ones * value) for rank in group])

    call = df.allreduce.prepare(group, xs, ys, epilogue=df.Epilogue("x + b[col]", b=bias(5)))
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        for _ in range(4):
            call.launch()
    assert len(graph._kept) == 9  # a graph keeps the input, the output and the bias of each rank, once
    call.set(b=bias(7))
    bias(100)
    graph.launch(streams[0])
    group.synchronize()
    assert_bits(ys, ones * 8)
    call.launch()
    group.synchronize()
    assert_bits(ys, ones * 10)
    graph.close()


@pytest.mark.parametrize("foreign", [False, True])
def test_arrays_of_a_closed_graph_outlive_its_replay(new_group, foreign):
    group = new_group(3)
    ones = np.ones(COUNT, np.float32)
    xs, ys = place(group, [ones] * 3), garbage(group, COUNT, "float32")
    delay = fill_late(group, group[0].zeros(8, "bfloat16"), 0, ns=3_000_000)
    call = df.allreduce.prepare(group, xs, ys)
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        call.launch()
    group.synchronize()
    delay(streams[0])
    graph.launch(df.Stream.wrap(group[0].device, streams[0].handle) if foreign else streams[0])
    graph.close()
    del graph, call, xs
    gc.collect()
    junk = [rank.array(ones * 50) for rank in group for _ in range(3)]
    group.synchronize()
    assert_bits(ys, ones * 3)
    del junk


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("captured", [(0,), (1, 2)])
def test_calls_with_only_some_ranks_captured_are_refused(group, hosts, algo, captured):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys, algo=algo)
    untouched = ys[0].numpy()
    with df.Graph.capture([group.ranks[i].stream for i in captured]) as graph:
        with pytest.raises(CaptureError, match=r"ranks .* captured.* ranks .* not"):
            call.launch()
        for position in captured:
            call.launch(rank=position)  # the caller names this rank explicitly
    assert_bits(ys, untouched)
    graph.launch(group.ranks[captured[0]].stream)
    for position in {0, 1, 2} - set(captured):
        call.launch(rank=position)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    graph.close()
