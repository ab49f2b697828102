# SPDX-License-Identifier: Apache-2.0
"""Order between streams: the group's calls among themselves, producers, and arrays of other libraries."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from collective_support import ALL_ALGOS, assert_bits, fill_late, garbage, place, random_inputs

import drvfuse as df
from drvfuse import reference
from drvfuse.comm.ordering import RankOrder, same
from drvfuse.errors import ArgumentError, CaptureError, Unsupported
from drvfuse.runtime import calls

pytestmark = pytest.mark.gpus(3)

COUNT = 640


@pytest.fixture
def group(open_group):
    return open_group(3)


@pytest.fixture
def others(group):
    streams = [df.Stream(rank.device) for rank in group]
    yield streams
    group.synchronize()
    for stream in streams:
        stream.close()


class DLPackOnly:
    """An array of another library that has DLPack and no current stream."""

    def __init__(self, array: df.Array) -> None:
        self.array = array
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.fixture
def hosts(rng):
    return random_inputs(rng, 3, COUNT, "bfloat16")


ONE = 0x3F80  # 1.0 as bfloat16


def ones(times: float) -> np.ndarray:
    return np.full(COUNT, times, np.float32).astype(df.dtypes.get("bfloat16").numpy)


class Foreign:
    """An array of another library, which works on a stream of its own."""

    def __init__(self, array: df.Array, stream: df.Stream) -> None:
        self.array, self.dtype = array, "bfloat16"
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.handle}


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_a_call_on_other_streams_follows_the_groups_last_call(group, others, hosts, algo):
    xs, ys, zs = place(group, hosts), garbage(group, COUNT, "bfloat16"), garbage(group, COUNT, "bfloat16")
    first = df.allreduce.prepare(group, xs, ys, algo=algo)
    late = fill_late(group, xs[1], ONE)
    late(group.ranks[1].stream)
    first.launch()
    df.allreduce(group, ys, zs, algo=algo, streams=others)
    first.launch()
    group.synchronize()
    hosts[1] = ones(1)
    once = reference.allreduce(hosts)
    assert_bits(ys, once)
    assert_bits(zs, reference.allreduce([once] * 3))


def test_a_call_follows_the_streams_of_its_arrays(group, others):
    xs = [
        df.device(rank.device.index, driver=group.driver).empty(COUNT, "bfloat16", stream=s)
        for rank, s in zip(group, others, strict=True)
    ]
    for x, stream in zip(xs, others, strict=True):
        fill_late(group, x, ONE)(stream)
    assert_bits(df.allreduce(group, xs), ones(3))


def test_a_call_follows_foreign_arrays_and_they_follow_the_call(group, others):
    xs = garbage(group, COUNT, "bfloat16")
    foreign = [Foreign(x, stream) for x, stream in zip(xs, others, strict=True)]
    for x, stream in zip(xs, others, strict=True):
        fill_late(group, x, ONE)(stream)
    ys = garbage(group, COUNT, "bfloat16")
    call = df.allreduce.prepare(group, foreign, ys)
    for position in (2, 0, 1):
        call.launch(rank=position)
        # overwrites the input on the foreign array's stream, which must wait for the call
        fill_late(group, xs[position], 0, ns=0)(others[position])
    group.synchronize()
    assert_bits(ys, ones(3))
    for stream in others:
        stream.synchronize()
    assert_bits(xs, ones(0))


def test_foreign_outputs_come_back_as_given(group, others, hosts):
    arrays = garbage(group, COUNT, "bfloat16")
    foreign = [Foreign(y, stream) for y, stream in zip(arrays, others, strict=True)]
    ys = df.allreduce(group, place(group, hosts), foreign)
    assert all(y is f for y, f in zip(ys, foreign, strict=True))
    for stream in others:
        stream.synchronize()
    assert_bits(arrays, reference.allreduce(hosts))


def test_calls_run_on_the_current_streams_of_a_framework(group, others, hosts):
    xs = place(group, hosts)
    foreign = [Foreign(x, stream) for x, stream in zip(xs, others, strict=True)]
    ys = df.allreduce(group, foreign, streams="current")
    assert [y.stream.handle for y in ys] == [stream.handle for stream in others]
    assert_bits(ys, reference.allreduce(hosts))


def test_streams_may_be_integers_and_foreign_objects(group, others, hosts):
    class Wrapped:
        def __init__(self, stream):
            self.stream = stream

        def __cuda_stream__(self):
            return (0, self.stream.handle)

    streams = [others[0].handle, Wrapped(others[1]), others[2]]
    ys = df.allreduce(group, place(group, hosts), streams=streams)
    assert [y.stream.handle for y in ys] == [stream.handle for stream in others]
    assert_bits(ys, reference.allreduce(hosts))
    with pytest.raises(ArgumentError):
        df.allreduce(group, place(group, hosts), streams=["a", "b", "c"])


@pytest.mark.parametrize("algo", ["one_stage", "two_stage"])
def test_one_rank_may_run_on_another_stream(group, others, hosts, algo):
    call = df.allreduce.prepare(group, place(group, hosts), garbage(group, COUNT, "bfloat16"), algo=algo)
    call.launch(rank=1, stream=others[1])
    call.launch(rank=0, stream=others[0].handle)
    ys = call.launch(rank=2)
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))


def test_naive_launches_all_ranks_together(group, hosts):
    call = df.allreduce.prepare(group, place(group, hosts), algo="naive")
    with pytest.raises(Unsupported, match="all local ranks"):
        call.launch(rank=0)
    assert_bits(call.launch(), reference.allreduce(hosts))


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_an_input_may_be_overwritten_right_after_its_ranks_kernel(new_group, rng, algo):
    """Contract: no peer reads a rank's input once that rank's kernel is complete."""
    group = new_group(3)
    big = random_inputs(rng, 3, 40_000, "bfloat16")
    xs, ys = place(group, big), garbage(group, 40_000, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys, algo=algo)
    zero = [fill_late(group, x, 0, ns=0) for x in xs]
    if algo == "naive":
        call.launch()
        for rank, fill in zip(group, zero, strict=True):
            fill(rank.stream)
    else:
        for position in (2, 0, 1):
            call.launch(rank=position)
            zero[position](group.ranks[position].stream)
    assert_bits(ys, reference.allreduce(big), algo)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_fused_inputs_may_be_overwritten_right_after_their_ranks_kernel(open_group, rng, algo, residual):
    group = open_group(3)
    big = random_inputs(rng, 3, (60, 256), "bfloat16")
    gamma = np.ones(256, np.float32).astype(big[0].dtype)
    added = random_inputs(rng, 1, (60, 256), "bfloat16")[0] if residual else None
    xs = place(group, big)
    call = df.allreduce_rmsnorm_fp8.prepare(
        group,
        xs,
        [rank.array(gamma) for rank in group],
        epsilon=1e-6,
        residuals=[rank.array(added) for rank in group] if residual else None,
        algo=algo,
    )
    zero = [fill_late(group, x, 0, ns=0) for x in xs]
    if algo == "naive":
        result = call.launch()
        for rank, fill in zip(group, zero, strict=True):
            fill(rank.stream)
    else:
        for position in (1, 2, 0):
            result = call.launch(rank=position)
            zero[position](group.ranks[position].stream)
    expected = reference.allreduce_rmsnorm_fp8(big, gamma, 1e-6, residual=added)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)


@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize("slow", [0, 2])
def test_results_are_right_if_one_rank_is_delayed(group, hosts, algo, slow):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys, algo=algo)
    for number in (1, 2, 3):
        late = np.full(COUNT, number, np.float32).astype(hosts[0].dtype)
        bits = int(reference.bits(late)[0])
        fill_late(group, xs[slow], bits, ns=2_000_000)(group.ranks[slow].stream)
        call.launch()
        hosts[slow] = late
        assert_bits(ys, reference.allreduce(hosts))


def test_arrays_dropped_right_after_a_call_are_freed_after_it(group, hosts):
    expected = reference.allreduce(hosts)
    for _ in range(20):
        ys = df.allreduce(group, place(group, hosts))
        zs = df.allreduce(group, ys, algo="two_stage")
        del ys
        gc.collect()
        assert_bits(zs, reference.allreduce([expected] * 3))


def test_a_closed_stream_does_not_disturb_the_next_call(group, hosts):
    xs = place(group, hosts)
    ys = garbage(group, COUNT, "bfloat16")
    streams = [df.Stream(rank.device) for rank in group]
    df.allreduce(group, xs, ys, streams=streams)
    for stream in streams:
        stream.close()
    zs = df.allreduce(group, ys)
    group.synchronize()
    assert_bits(zs, reference.allreduce([reference.allreduce(hosts)] * 3))


@pytest.mark.parametrize("how", ["ints", "streams"])
def test_streams_destroyed_after_a_call_do_not_disturb_the_group(group, hosts, how):
    xs, ys, zs = place(group, hosts), garbage(group, COUNT, "bfloat16"), garbage(group, COUNT, "bfloat16")
    once = reference.allreduce(hosts)
    for _ in range(3):  # the driver may give the same handles again
        streams = [df.Stream(rank.device) for rank in group]
        late = fill_late(group, xs[0], int(reference.bits(hosts[0])[0]), ns=300_000)
        late(streams[0])
        xs[0].copy_from(hosts[0])
        df.allreduce(group, xs, ys, streams=[s.handle for s in streams] if how == "ints" else streams)
        for stream in streams:
            stream.close()
        assert_bits(df.allreduce(group, ys, zs), reference.allreduce([once] * 3))
        group.synchronize()
        group.reset()


def test_a_reused_stream_handle_is_not_taken_for_the_closed_stream(group):
    device = group[0].device
    closed, recycled = df.Stream(device), df.Stream(device)
    order = RankOrder()
    order.launched(closed)
    closed.close()
    own, recycled.handle = recycled.handle, closed.handle
    assert not same(closed, recycled)
    recycled.handle = own
    calls.ring.clear()
    order.admit(recycled, 0)
    assert "cuStreamWaitEvent" in [entry[0] for entry in calls.ring]
    recycled.close()


def test_a_launch_on_foreign_streams_records_one_event_per_rank(group, hosts):
    call = df.allreduce.prepare(group, place(group, hosts), garbage(group, COUNT, "bfloat16"))
    for streams, events in ((None, 0), ([rank.stream.handle for rank in group], 3)):
        for _ in range(2):  # the first call makes the events
            calls.ring.clear()
            calls.queries.clear()
            call.launch(streams)
        names = [entry[0] for entry in (*calls.queries, *calls.ring)]
        assert (names.count("cuEventRecord"), names.count("cuEventCreate")) == (events, 0)
        if streams is None:
            assert names == ["cuLaunchKernelEx"] * 3
    group.synchronize()


@pytest.mark.emulated
def test_a_foreign_arrays_stream_that_is_closed_after_prepare_orders_nothing(hosts):
    """DLPack names no stream here, so `prepare` takes the device's own stream for the one that writes the arrays. That
    stream is then closed, and launches must not wait for it."""
    with df.emu.Machine(devices=3) as machine:  # no shared machine, as `rank.stream` is closed below
        group = df.Group.local(3, driver=machine, max_blocks=4)
        xs = [DLPackOnly(x) for x in place(group, hosts)]
        ys = garbage(group, COUNT, "bfloat16")
        streams = [df.Stream(rank.device) for rank in group]
        call = df.allreduce.prepare(group, xs, ys, streams=streams)
        for rank in group:
            rank.stream.close()
        assert call.launch() == ys
        for y, stream in zip(ys, streams, strict=True):
            stream.synchronize()
            assert_bits(
                [df.view(y.ptr, y.shape, y.dtype, y.device, stream=stream, owner=y)], reference.allreduce(hosts)
            )


def test_arrays_of_a_captured_stream_are_refused_outside_that_capture(group, others, hosts):
    ys = garbage(group, COUNT, "bfloat16")
    call = df.allreduce.prepare(group, place(group, hosts), ys)
    group.synchronize()
    own = [rank.stream for rank in group]
    with df.Graph.capture(own) as graph:
        with pytest.raises(CaptureError, match="an array of the call"):
            call.launch(streams=others)
        with df.Graph.capture(others), pytest.raises(CaptureError, match="an array of the call"):
            call.launch(streams=others)
        call.launch()
    graph.launch(own[0])
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    graph.close()


def test_arrays_of_streams_in_the_same_capture_are_followed(group, others, hosts):
    xs, ys = place(group, hosts), garbage(group, COUNT, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys)
    late = fill_late(group, xs[0], ONE)
    group.synchronize()
    own = [rank.stream for rank in group]
    with df.Graph.capture([*own, *others]) as graph:
        late(own[0])
        call.launch(streams=others)
    graph.launch(own[0])
    group.synchronize()
    hosts[0] = ones(1)
    assert_bits(ys, reference.allreduce(hosts))
    graph.close()
