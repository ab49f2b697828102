# SPDX-License-Identifier: Apache-2.0
"""Capturing streams into graphs and replaying them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import drvfuse as df
from drvfuse.errors import ArgumentError, CaptureError, ClosedError
from drvfuse.runtime.graph import capturing
from drvfuse.runtime.stream import Stream


@pytest.mark.gpus(2)
def test_a_replay_runs_the_work_of_every_captured_stream(driver: str) -> None:
    devices = [df.device(i, driver=driver) for i in range(2)]
    streams = [Stream(device) for device in devices]
    arrays = [device.zeros((64,), "uint8", stream=stream) for device, stream in zip(devices, streams, strict=True)]
    with df.Graph.capture(streams) as graph:
        for device, stream, array in zip(devices, streams, arrays, strict=True):
            stream.fill(array.ptr, 3 + device.index, 64)
    for array in arrays:
        assert not array.numpy().any()
    for _ in range(2):
        graph.launch(streams[0])
        streams[0].synchronize()
        for index, array in enumerate(arrays):
            assert (array.numpy() == 3 + index).all()
            array.copy_from(np.zeros(64, np.uint8))
    graph.close()
    graph.close()
    with pytest.raises(ClosedError):
        graph.launch(streams[0])


@pytest.mark.gpus(2)
def test_an_exception_in_a_capture_abandons_it_and_frees_the_streams(driver: str) -> None:
    devices = [df.device(i, driver=driver) for i in range(2)]
    streams = [Stream(device) for device in devices]
    array = devices[1].zeros((8,), "uint8", stream=streams[1])
    streams[1].synchronize()
    with pytest.raises(KeyError, match="mine"), df.Graph.capture(streams) as graph:
        streams[1].fill(array.ptr, 7, 8)
        raise KeyError("mine")
    with pytest.raises(CaptureError):
        graph.launch(streams[0])
    for stream in streams:
        assert stream.capture_id() is None
        stream.synchronize()
    assert not array.numpy().any()


def test_the_current_graph_is_known_during_a_capture(driver: str) -> None:
    device = df.device(0, driver=driver)
    with Stream(device) as stream, Stream(device) as other:
        assert capturing(stream) is None
        with df.Graph.capture(stream) as graph:
            assert capturing(stream) is graph and capturing(other) is None
            with pytest.raises(CaptureError, match="still being captured"):
                graph.launch(other)
        assert capturing(stream) is None


def test_a_graph_keeps_given_objects_alive(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((8,), "uint8")
    weak = weakref.ref(array)
    with Stream(device) as stream, df.Graph.capture(stream) as graph:
        stream.fill(array.ptr, 7, 8)
        graph.keep(array)
    del array
    gc.collect()
    assert weak() is not None
    graph.close()
    gc.collect()
    assert weak() is None


def test_registered_checks_can_refuse_a_launch(driver: str) -> None:
    device = df.device(0, driver=driver)
    calls: list[int] = []

    def refuse(stream: Stream) -> None:
        calls.append(1)
        raise RuntimeError("not now")

    with Stream(device) as stream:
        with df.Graph.capture(stream) as graph:
            graph.before_launch(refuse)
            graph.before_launch(refuse)
        with pytest.raises(RuntimeError, match="not now"):
            graph.launch(stream)
    assert calls == [1]


@pytest.mark.parametrize("streams", [[], [1], "no"])
def test_a_capture_without_streams_is_refused(driver: str, streams: object) -> None:
    with pytest.raises(ArgumentError, match="streams"), df.Graph.capture(streams):  # type: ignore[arg-type]
        pass


def test_capture_of_a_captured_or_legacy_stream_is_refused(driver: str) -> None:
    device = df.device(0, driver=driver)
    with pytest.raises(ArgumentError, match="legacy"), df.Graph.capture(Stream.wrap(device, 0)):
        pass
    with Stream(device) as stream:
        with df.Graph.capture(stream), pytest.raises(CaptureError, match="already"), df.Graph.capture(stream):
            pass
        stream.synchronize()


@pytest.mark.parametrize("wrong", [None, 0, [], [None], "streams", [0]])
def test_a_capture_of_objects_that_are_not_streams_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="streams is .*drvfuse streams"), df.Graph.capture(wrong):
        pass


def test_a_graph_has_an_informative_repr(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros(4, "float32")
    with df.Graph.capture(device.stream) as graph:
        assert repr(graph) == f"<Graph on devices [0] of driver {driver!r}, being captured>"
        device.stream.fill(array.ptr, 0, array.nbytes)
        device.stream.fill(array.ptr, 1, array.nbytes)
    assert repr(graph) == f"<Graph on devices [0] of driver {driver!r}, 2 nodes>"
    graph.close()
    assert repr(graph).endswith(", closed>")
    with pytest.raises(KeyError), df.Graph.capture(device.stream) as graph:
        raise KeyError
    assert repr(graph).endswith(", whose capture failed>")
