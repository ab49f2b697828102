# SPDX-License-Identifier: Apache-2.0
"""Devices, contexts, streams and events."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import drvfuse as df
from drvfuse.errors import ArgumentError, CaptureError, ClosedError
from drvfuse.runtime.driver import get_driver
from drvfuse.runtime.stream import Event, Stream


def test_a_driver_and_an_index_always_give_the_same_device_object(driver: str) -> None:
    assert df.device(0, driver=driver) is df.device(0, driver=get_driver(driver))


@pytest.mark.parametrize("index", [-1, 99, 1.5, "0"])
def test_a_wrong_device_index_is_refused_with_the_number_of_devices(driver: str, index: object) -> None:
    with pytest.raises(ArgumentError, match="index"):
        df.device(index, driver=driver)  # type: ignore[arg-type]


def test_a_device_reports_its_name_capability_and_limits(driver: str) -> None:
    device = df.device(0, driver=driver)
    major, minor = device.capability
    assert device.arch.startswith(f"sm_{major}{minor}")
    assert device.sm_count == device.attribute("MULTIPROCESSOR_COUNT") > 0
    assert device.name and device.name in repr(device)


def test_an_unknown_device_attribute_is_unsupported(driver: str) -> None:
    with pytest.raises(df.errors.Unsupported, match="NO_SUCH_THING"):
        df.device(0, driver=driver).attribute("NO_SUCH_THING")


def test_use_restores_the_current_context(driver: str) -> None:
    device = df.device(0, driver=driver)
    api = device.driver
    before = int(api.cuCtxGetCurrent())
    with pytest.raises(RuntimeError), device.use():
        assert int(api.cuCtxGetCurrent()) == int(device.context)
        with device.use():
            pass
        assert int(api.cuCtxGetCurrent()) == int(device.context)
        raise RuntimeError
    assert int(api.cuCtxGetCurrent()) == before


@pytest.mark.gpus(2)
def test_peer_access_can_be_enabled_twice(driver: str) -> None:
    a, b = df.device(0, driver=driver), df.device(1, driver=driver)
    assert a.can_access_peer(a)
    if not a.can_access_peer(b):
        pytest.skip("device 0 cannot access the memory of device 1")
    a.enable_peer(b)
    assert a.peer_enabled(b)
    a._peers.discard(b.index)  # forgets that peer access is enabled, as if another library had enabled it
    a.enable_peer(b)
    assert a.peer_enabled(b) and a.peer_enabled(a)


def test_a_stream_orders_work_and_reports_completion(driver: str) -> None:
    device = df.device(0, driver=driver)
    with Stream(device, priority=-1) as stream:
        array = device.zeros((1000,), "float32", stream=stream)
        event = stream.record()
        event.synchronize()
        assert event.query() and stream.query()
        assert stream.__cuda_stream__() == (0, stream.handle)
        assert stream.capture_id() is None
        np.testing.assert_array_equal(array.numpy(), 0)


def test_events_order_streams_and_measure_time(driver: str) -> None:
    device = df.device(0, driver=driver)
    with Stream(device) as a, Stream(device) as b:
        start = Event(device, timing=True).record(a)
        array = device.zeros((64,), "int32", stream=a)
        end = Event(device, timing=True).record(a)
        b.wait(end)
        b.synchronize()
        assert end.elapsed_ms(start) >= 0
        assert array.size == 64


@pytest.mark.parametrize("kind", ["protocol", "cuda_stream", "ptr", "int", "CUstream"])
def test_wrap_accepts_every_kind_of_foreign_stream(driver: str, kind: str) -> None:
    device = df.device(0, driver=driver)
    own = Stream(device)
    handle = own.handle
    foreign = {
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
        "cuda_stream": SimpleNamespace(cuda_stream=handle),
        "ptr": SimpleNamespace(ptr=handle),
        "int": handle,
        "CUstream": device.driver.types.CUstream(handle),
    }[kind]
    wrapped = Stream.wrap(device, foreign)
    assert wrapped.handle == handle
    wrapped.close()
    own.synchronize()  # the wrapper did not own the stream
    assert Stream.wrap(device, own) is own


@pytest.mark.parametrize("bad", [None, True, "stream", SimpleNamespace(__cuda_stream__=lambda: (1, 5))])
def test_wrap_refuses_objects_that_are_not_streams(driver: str, bad: object) -> None:
    with pytest.raises(ArgumentError, match="stream"):
        Stream.wrap(df.device(0, driver=driver), bad)


def test_uses_of_closed_streams_and_events_raise(driver: str) -> None:
    device = df.device(0, driver=driver)
    stream, event = Stream(device), Event(device)
    stream.close()
    stream.close()
    event.close()
    for use in (stream.synchronize, stream.record, stream.query, stream.capture_id, event.synchronize, event.query):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        device.stream.wait(event)


@pytest.mark.gpus(2)
def test_stream_of_another_device_is_refused(driver: str) -> None:
    a, b = df.device(0, driver=driver), df.device(1, driver=driver)
    with pytest.raises(ArgumentError, match="stream"):
        Stream.wrap(a, b.stream)
    with pytest.raises(ArgumentError, match="event"):
        a.stream.record(Event(b))


def test_synchronise_is_refused_in_a_capture_which_stays_valid(driver: str) -> None:
    device = df.device(0, driver=driver)
    with Stream(device) as stream:
        with df.Graph.capture([stream]) as graph:
            assert stream.capture_id() is not None
            with pytest.raises(CaptureError):
                stream.synchronize()
        graph.launch(stream)
        stream.synchronize()


@pytest.mark.emulated
def test_closed_device_raises_and_a_new_one_can_be_made() -> None:
    machine = df.emu.Machine(devices=1)
    device = df.device(0, driver=machine)
    assert device.stream.query()
    device.close()
    device.close()
    with pytest.raises(ClosedError):
        device.use()
    again = df.device(0, driver=machine)
    assert again is not device and again.stream.query()


@pytest.mark.emulated
def test_an_unused_machine_is_garbage_collected() -> None:
    machine = df.emu.Machine(devices=2)
    device = df.device(0, driver=machine)
    array = device.zeros((10,), "float32")
    event = device.stream.record()
    graph_stream = Stream(device)
    array.numpy()
    weak = weakref.ref(machine)
    del machine, device, array, event, graph_stream
    gc.collect()
    gc.collect()
    assert weak() is None


@pytest.mark.emulated
def test_an_array_kept_by_its_own_driver_does_not_keep_the_machine_alive() -> None:
    machine = df.emu.Machine(devices=1)
    array = df.device(0, driver=machine).zeros((10,), "float32")
    vars(array.device.driver)["cache"] = {0: array}
    array.numpy()
    weak = weakref.ref(machine)
    del machine, array
    gc.collect()
    gc.collect()
    assert weak() is None


def test_streams_and_events_have_informative_reprs(driver: str) -> None:
    device = df.device(0, driver=driver)
    with Stream(device) as stream, Event(device) as event, Event(device, timing=True) as timed:
        assert repr(stream) == f"<Stream {stream.handle:#x} of device 0>"
        assert repr(Stream.wrap(device, stream.handle)) == f"<Stream {stream.handle:#x} of device 0, foreign>"
        assert repr(event) == f"<Event {event.handle:#x} of device 0>"
        assert repr(timed) == f"<Event {timed.handle:#x} of device 0, with timing>"
    assert repr(stream).endswith("of device 0, closed>") and repr(timed).endswith(", with timing, closed>")
    assert repr(Stream.wrap(device, 0)) == "<Stream legacy default of device 0>"
    assert repr(Stream.wrap(device, 2)) == "<Stream per-thread default of device 0>"


@pytest.mark.parametrize("wrong", [None, 0, "emu"])
def test_objects_that_are_not_devices_are_refused(refused, wrong):
    for call in (Stream, Event, df.check_device):
        refused(lambda call=call: call(wrong), "device", "must be a drvfuse.Device")
    refused(lambda: df.view(16, (4,), "float32", wrong), "device", "must be a drvfuse.Device")


def test_a_device_array_is_refused_as_host_data(driver, refused):
    device = df.device(0, driver=driver)
    refused(lambda: device.array(device.zeros(4, "float32")), "values", "copy_from")


def test_arguments_that_are_not_streams_or_events_are_refused(driver, refused):
    stream = df.device(0, driver=driver).stream
    with df.Graph.capture([df.Stream(stream.device)]) as graph:
        pass
    refused(lambda: stream.wait(stream), "event", "must be a drvfuse.Event; to wait for a stream, call Stream.follow")
    refused(lambda: stream.record(3), "event", "is an int")
    refused(lambda: stream.follow(stream.handle), "other", "Stream.wrap(device, stream)")
    refused(lambda: graph.launch(stream.handle), "stream", "Stream.wrap(device, stream)")
    refused(lambda: df.config.get("spin_time_out"), "setting", "one of driver, spin_timeout,")
