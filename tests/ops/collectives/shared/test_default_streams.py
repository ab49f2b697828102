# SPDX-License-Identifier: Apache-2.0
"""The legacy default stream (0 or 1) and the per-thread one (2), which belong to whatever context is current."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from collective_support import ALL_ALGOS, assert_bits, garbage, place, random_inputs

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError
from drvfuse.runtime.stream import Stream

pytestmark = pytest.mark.gpus(2)

COUNT = 640


@pytest.fixture
def group(open_group):
    return open_group(2)


@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_collective_runs_on_default_streams(group, rng, handle, algo):
    for kind in (lambda: handle, lambda: SimpleNamespace(cuda_stream=handle), lambda: SimpleNamespace(ptr=handle)):
        hosts = random_inputs(rng, 2, COUNT, "bfloat16")
        ys = garbage(group, COUNT, "bfloat16")
        df.allreduce(group, place(group, hosts), ys, algo=algo, streams=[kind(), kind()])
        df.allreduce(group, ys, ys, algo=algo)
        group.synchronize()
        once = reference.allreduce(hosts)
        assert_bits(ys, reference.allreduce([once] * 2), algo)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_allocated_outputs_live_on_default_streams(group, rng, handle):
    hosts = random_inputs(rng, 2, COUNT, "float32")
    ys = df.allreduce(group, place(group, hosts), streams=[handle, handle])
    assert_bits(ys, reference.allreduce(hosts))
    del ys
    group.synchronize()


@pytest.mark.parametrize("handle", [1, 2])
def test_arrays_may_name_a_default_stream(group, rng, handle):
    hosts = random_inputs(rng, 2, COUNT, "float32")
    xs = place(group, hosts)
    foreign = [
        SimpleNamespace(__cuda_array_interface__={**x.__cuda_array_interface__, "stream": handle}, keep=x) for x in xs
    ]
    for streams in (None, "current"):
        ys = df.allreduce(group, foreign, streams=streams)
        group.synchronize()
        assert_bits(ys, reference.allreduce(hosts))


def test_stream_0_in_an_array_interface_is_refused(group):
    xs = [rank.zeros(COUNT, "float32") for rank in group]
    foreign = [SimpleNamespace(__cuda_array_interface__={**x.__cuda_array_interface__, "stream": 0}) for x in xs]
    with pytest.raises(ArgumentError, match=r"inputs\[0\]"):
        df.allreduce(group, foreign)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_queries_of_a_default_stream_are_made_on_its_device(group, handle):
    for rank in group:
        stream = Stream.wrap(rank.device, handle)
        assert stream.capture_id() is None
        stream.synchronize()
        assert stream.query()
        with group.ranks[0].device.use():
            event = stream.record()
            rank.stream.wait(event)
            event.synchronize()
            event.close()


def test_both_names_of_the_legacy_stream_are_one_stream(group):
    device = group.ranks[0].device
    zero, one = Stream.wrap(device, 0), Stream.wrap(device, 1)
    assert zero.handle == one.handle
    with pytest.raises(ArgumentError, match="can be captured"), df.Graph.capture([zero]):
        pass


def test_launches_make_no_call_for_owned_streams_but_the_capture_query(group, rng, counted_calls):
    xs = place(group, random_inputs(rng, 2, COUNT, "float32"))
    call = df.allreduce.prepare(group, xs, algo="one_stage")
    call.launch()
    names = counted_calls(group.driver, call.launch)
    contexts = ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    assert names == ["cuStreamIsCapturing"] * 2 + contexts * 2
    group.synchronize()


def test_a_wrong_stream_is_named_before_anything_is_launched(group, rng):
    xs, ys = place(group, random_inputs(rng, 2, COUNT, "float32")), garbage(group, COUNT, "float32")
    other = df.Stream(group.ranks[0].device)
    elsewhere = [other.handle, SimpleNamespace(cuda_stream=other.handle), other]
    for wrong in (*elsewhere, -1, None, "0", 1.0, xs[0], object()):
        with pytest.raises(ArgumentError, match=r"streams\[1\]"):
            df.allreduce(group, xs, ys, streams=[other, wrong])
    with pytest.raises(ArgumentError, match="stream of device 0"):
        df.allreduce.prepare(group, xs, ys).launch(rank=1, stream=other.handle)
    group.check()
    other.close()
