# SPDX-License-Identifier: Apache-2.0
"""Memory and streams that are closed under a prepared call, a launch or a graph: ClosedError before anything is queued,
and the device works on."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import drvfuse as df
from drvfuse import coat
from drvfuse.errors import ClosedError
from drvfuse.runtime import launch_attributes as attributes

COPY = 'extern "C" __global__ void put(int* to, int value) { to[threadIdx.x] = value + threadIdx.x; }'


NESTED = pytest.mark.emulated
"""Driver 580 refuses the launch of a graph on a stream that is being captured (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
the emulated driver makes a child graph of it."""


@pytest.fixture
def group(driver, request):
    name = "emu" if request.node.get_closest_marker("emulated") else driver
    with df.Group.local(2, driver=name, max_blocks=4, workspace_bytes=1 << 20) as group:
        yield group


@pytest.fixture
def hosts(rng):
    return [rng.standard_normal(64).astype(np.float32) for _ in range(2)]


@pytest.fixture
def works(group, hosts):
    """A check that the group's devices still give the right sum."""

    def check():
        found = df.allreduce(group, [rank.array(host) for rank, host in zip(group, hosts, strict=True)])
        group.synchronize()
        assert [ys.numpy().tobytes() for ys in found] == [(hosts[0] + hosts[1]).tobytes()] * 2

    return check


def placed(group, hosts):
    """The inputs in a symmetric buffer, and the buffer."""
    buffer = group.symmetric(256)
    arrays = buffer.arrays(64, "float32")
    for array, host in zip(arrays, hosts, strict=True):
        array.copy_from(host)
    return buffer, arrays


@pytest.mark.gpus(2)
@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_a_prepared_call_whose_buffer_was_closed_is_refused(group, hosts, works, where):
    buffer, arrays = placed(group, hosts)
    own = [rank.zeros(64, "float32") for rank in group]
    inputs, outputs = (arrays, own) if where == "inputs" else (own, arrays)
    launched, fresh = (df.allreduce.prepare(group, inputs, outputs) for _ in range(2))
    launched.launch()
    group.synchronize()
    buffer.close()
    for call in (launched, fresh):
        for launch in (
            call.launch,
            lambda call=call: call.launch(rank=1),
            lambda call=call: call.launch([rank.stream for rank in group]),
        ):
            with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
                launch()
    works()


@pytest.mark.gpus(2)
def test_graphs_of_a_call_whose_buffer_was_closed_are_refused(group, hosts, works):
    buffer, arrays = placed(group, hosts)
    outputs = [rank.zeros(64, "float32") for rank in group]
    with group.capture() as graphs:
        df.allreduce(group, arrays, outputs)
    graphs.launch()
    group.synchronize()
    buffer.close()
    for launch in (graphs.launch, lambda: graphs.graphs[1].launch(group[1].stream)):
        with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
            launch()
    works()
    graphs.close()


@pytest.mark.gpus(2)
def test_a_buffer_closed_inside_a_capture_makes_the_graphs_unusable(group, hosts, works):
    buffer, arrays = placed(group, hosts)
    outputs = [rank.zeros(64, "float32") for rank in group]
    with group.capture() as graphs:
        df.allreduce(group, arrays, outputs)
        buffer.close()
    with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
        graphs.launch()
    works()


@pytest.mark.gpus(2)
def test_a_replaced_parameter_may_be_closed(group, hosts, works):
    xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
    buffer, biases = placed(group, hosts)
    call = df.allreduce.prepare(group, xs, epilogue=df.Epilogue("x + bias[i]", bias=biases))
    call.launch()
    group.synchronize()
    call.set(bias=[rank.zeros(64, "float32") for rank in group])
    buffer.close()
    found = call.launch()
    group.synchronize()
    assert found[1].numpy().tobytes() == (hosts[0] + hosts[1]).tobytes()
    other, biases = placed(group, hosts)
    call.set(bias=biases)
    other.close()
    with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
        call.launch()
    works()


@pytest.mark.gpus(2)
def test_a_workspace_or_operand_of_an_op_on_one_device_may_be_closed(group, rng, works):
    buffer = group.symmetric(1 << 20)
    x = group[0].array(rng.standard_normal((4, 64)).astype(np.float32))
    workspace = buffer.arrays(1 << 18, "uint8")[0]
    call = coat.fp8_division.prepare(x, 16, "float8_e4m3fn", workspace=workspace)
    call.launch()
    with df.Graph.capture(group[0].stream) as graph:
        call.launch()
    group.synchronize()
    buffer.close()
    for launch in (call.launch, lambda: graph.launch(group[0].stream)):
        with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
            launch()
    works()


@pytest.mark.gpus(2)
def test_a_launch_of_any_kernel_is_refused_and_works_again_with_another_array(group, works):
    buffer, device = group.symmetric(256), group[0].device
    kernel = df.compile(COPY, driver=device.driver)["put"]
    launch = kernel.prepare(1, 32, buffer.arrays(32, "int32")[0], 5, device=device)
    launch(device.stream)
    with df.Graph.capture(device.stream) as graph:
        launch(device.stream)
    device.synchronize()
    buffer.close()
    for use in (lambda: launch(device.stream), lambda: graph.launch(device.stream)):
        with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
            use()
    target = device.zeros(32, "int32")
    launch.set(0, target)
    launch(device.stream)
    assert target.numpy().tolist() == list(range(5, 37))
    works()


@pytest.mark.gpus(2)
def test_closed_streams_are_refused_by_calls_launches_and_graphs(group, hosts, works):
    xs, device = [rank.array(host) for rank, host in zip(group, hosts, strict=True)], group[0].device
    streams = [df.Stream(rank.device) for rank in group]
    call = df.allreduce.prepare(group, xs, streams=streams)
    call.launch()
    target = device.zeros(32, "int32")
    launch = df.compile(COPY, driver=device.driver)["put"].prepare(1, 32, target, 5, device=device)
    with df.Graph.capture(device.stream) as graph:
        launch(device.stream)
    group.synchronize()
    for stream in streams:
        stream.close()
    for use in (
        call.launch,
        lambda: launch(streams[0]),
        lambda: graph.launch(streams[0]),
        lambda: graph.upload(streams[0]),
        lambda: streams[0].fill(target.ptr, 0, 4),
    ):
        with pytest.raises(ClosedError, match="Stream was closed"):
            use()
    works()


@pytest.mark.gpus(2)
def test_a_launch_that_records_a_closed_event_is_refused(group, works):
    device, target = group[0].device, group[0].zeros(32, "int32")
    event = df.Event(device)
    kernel = df.compile(COPY, driver=device.driver)["put"]
    launch = kernel.prepare(1, 32, target, 5, device=device, attrs=[attributes.LaunchCompletionEvent(event)])
    event.close()
    with pytest.raises(ClosedError, match="Event was closed"):
        launch(device.stream)
    works()


@pytest.mark.gpus(2)
def test_graphs_of_a_closed_group_are_refused(group, hosts, works):
    with df.Group.local(2, driver=group.driver, max_blocks=4, workspace_bytes=1 << 20) as other:
        xs = [rank.array(host) for rank, host in zip(other, hosts, strict=True)]
        with other.capture() as graphs:
            df.allreduce(other, xs, xs)
        graphs.launch()
        other.synchronize()
    for launch in (graphs.launch, lambda: graphs.graphs[0].launch(group[0].stream)):
        with pytest.raises(ClosedError, match="closed"):
            launch()
    works()


@pytest.fixture
def nested(group):
    """A graph, a graph that holds a launch of it, and the array and the buffer that both use."""
    buffer, device, stream = group.symmetric(256), group[0].device, df.Stream(group[0].device)
    array = buffer.arrays(32, "int32")[0]
    launch = df.compile(COPY, driver=device.driver)["put"].prepare(1, 32, array, 5, device=device)
    with df.Graph.capture(device.stream) as inner:
        launch(device.stream)
    with df.Graph.capture(stream) as outer:
        inner.launch(stream)
    return inner, outer, buffer


@NESTED
@pytest.mark.parametrize("inner_closed", [False, True])
def test_a_graph_that_holds_a_graph_of_closed_memory_is_refused(group, works, nested, inner_closed):
    inner, outer, buffer = nested
    if inner_closed:
        inner.close()
    outer.launch(group[0].stream)
    group.synchronize()
    buffer.close()
    with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
        outer.launch(group[0].stream)
    works()


@NESTED
def test_a_graph_keeps_what_a_graph_inside_it_keeps():
    device = df.device(0, driver="emu")
    array, stream = device.zeros(4, "int32"), df.Stream(device)
    with df.Graph.capture(device.stream) as inner:
        device.stream.fill(array.ptr, 1, 4)
        inner.keep(array)
    with df.Graph.capture(stream) as outer:
        inner.launch(stream)
    inner.close()
    alive = weakref.ref(array)
    del array
    assert alive() is not None
    outer.close()
    assert alive() is None


@NESTED
def test_graphs_that_hold_graphs_of_a_closed_group_are_refused(group, hosts, works):
    with df.Group.local(2, driver=group.driver, max_blocks=4, workspace_bytes=1 << 20) as other:
        xs = [rank.array(host) for rank, host in zip(other, hosts, strict=True)]
        with other.capture() as graphs:
            df.allreduce(other, xs, xs)
        other.synchronize()
        streams = [df.Stream(rank.device) for rank in other]
        with other.capture(streams) as outer:
            graphs.launch(streams)
        graphs.close()
    with pytest.raises(ClosedError, match="the group is closed"):
        outer.launch()
    works()


class OfDLPack:
    """An array of another library over the memory of `array`."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


class OfInterface:
    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.gpus(2)
@pytest.mark.parametrize("library", [OfDLPack, OfInterface])
def test_a_buffer_that_another_library_shows_is_refused_after_close(group, hosts, works, library):
    buffer, arrays = placed(group, hosts)
    outputs = [rank.zeros(64, "float32") for rank in group]
    call = df.allreduce.prepare(group, [library(array) for array in arrays], outputs)
    call.launch()
    group.synchronize()
    with group.capture() as graphs:
        call.launch()
    graphs.launch()
    group.synchronize()
    assert outputs[1].numpy().tobytes() == (hosts[0] + hosts[1]).tobytes()
    buffer.close()
    for launch in (call.launch, lambda: call.launch(rank=0), graphs.launch):
        with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
            launch()
    works()
