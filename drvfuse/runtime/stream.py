# SPDX-License-Identifier: Apache-2.0
"""Streams and events. Nothing here has a hidden current stream; a stream belongs to one device."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from ..errors import ArgumentError, CaptureError, DriverError
from .device import Device
from .driver import Driver
from .lifetime import Owned

_NOT_READY = 600
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_CAPTURE_ACTIVE, _CAPTURE_INVALIDATED = 1, 2


def _destroy_stream(driver: Driver, handle: int) -> None:
    driver.cuStreamDestroy(handle)


def _destroy_event(driver: Driver, handle: int) -> None:
    driver.cuEventDestroy(handle)


class Event(Owned):
    """A point in a stream. Created on `device`, which must be the device of every stream that records it."""

    def __init__(self, device: Device, *, timing: bool = False) -> None:
        self.device = device
        with device.use():
            self.handle = int(device.driver.cuEventCreate(0 if timing else _DISABLE_TIMING))
        self._owns(device.driver, _destroy_event, self.handle)

    def record(self, stream: Stream) -> Event:
        """Mark the work queued on `stream` so far."""
        stream.record(self)
        return self

    def synchronize(self) -> None:
        """Block until the marked work is done; returns at once if never recorded."""
        self._check_open()
        self.device.driver.cuEventSynchronize(self.handle)

    def query(self) -> bool:
        """True if the marked work is done."""
        self._check_open()
        return _ready(self.device, "cuEventQuery", self.handle)

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds from `start` to this event; both need `timing=True` and must be done."""
        self._check_open()
        start._check_open()
        return float(self.device.driver.cuEventElapsedTime(start.handle, self.handle))


class Stream(Owned):
    """A non-blocking stream of `device`. Lower `priority` numbers run first, as in CUDA; out of range is clamped.

    `handle` is the CUstream as an int. Any object with `__cuda_stream__` is accepted by `wrap`, and this is one.
    """

    def __init__(self, device: Device, *, priority: int = 0) -> None:
        self.device = device
        with device.use():
            self.handle = int(device.driver.cuStreamCreateWithPriority(_NON_BLOCKING, priority))
        self._holder: Any = None
        self._last: Event | None = None
        self._owns(device.driver, _destroy_stream, self.handle)

    @classmethod
    def wrap(cls, device: Device, stream: Any) -> Stream:
        """A Stream for a foreign one: a Stream, an object with `__cuda_stream__`, `.cuda_stream` or `.ptr`, or an int.

        Not owned: `close()` leaves the foreign stream alone, and the foreign object is kept alive. It must
        outlive arrays allocated on it.
        """
        if isinstance(stream, Stream):
            if stream.device is not device:
                raise ArgumentError("stream", f"a stream of {stream.device!r}", f"a stream of {device!r}")
            stream._check_open()
            return stream
        self = cls.__new__(cls)
        self.device, self.handle, self._holder, self._last = device, _foreign_handle(stream), stream, None
        return self

    @property
    def foreign(self) -> bool:
        """Whether this wraps a stream of somebody else, who may destroy it at any time."""
        return self._finalizer is None

    def __repr__(self) -> str:
        return f"<Stream {self.handle:#x} of device {self.device.index}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        self._check_open()
        return (0, self.handle)

    def synchronize(self) -> None:
        """Block until everything queued so far is done, then free what waits to be freed. CaptureError in a capture."""
        self._check_open()
        if self.capture_id() is not None:
            raise CaptureError(f"{self!r} is being captured and cannot be synchronised")
        with self.device.use():
            self.device.driver.cuStreamSynchronize(self.handle)
        if self.device._pool is not None:
            self.device._pool.flush()

    def query(self) -> bool:
        """True if everything queued so far is done."""
        self._check_open()
        with self.device.use():
            return _ready(self.device, "cuStreamQuery", self.handle)

    def wait(self, event: Event) -> None:
        """Work queued from now on starts after `event` (of any device of this driver)."""
        self._check_open()
        event._check_open()
        with self.device.use():
            self.device.driver.cuStreamWaitEvent(self.handle, event.handle, 0)

    def record(self, event: Event | None = None) -> Event:
        """Mark the work queued so far in `event`, or in a new one."""
        self._check_open()
        if event is None:
            event = Event(self.device)
        elif event.device is not self.device:
            raise ArgumentError("event", f"an event of {event.device!r}", f"an event of {self.device!r}")
        event._check_open()
        with self.device.use():
            self.device.driver.cuEventRecord(event.handle, self.handle)
        return event

    def follow(self, other: Stream) -> None:
        """Work queued here from now on starts after what `other` has queued so far."""
        if other.handle != self.handle or other.device is not self.device:
            with other.record() as event:  # the driver keeps a destroyed event until the waits on it are done
                self.wait(event)

    def capture_id(self) -> int | None:
        """The id of the capture this stream takes part in, or None. CaptureError if that capture was invalidated."""
        self._check_open()
        code, *values = self.device.driver.result("cuStreamGetCaptureInfo", self.handle)
        if code:
            raise self.device.driver.error("cuStreamGetCaptureInfo", (self.handle,), code)
        status = int(values[0])
        if status == _CAPTURE_INVALIDATED:
            raise CaptureError(f"the capture of {self!r} was invalidated by an operation that capture forbids")
        return int(values[1]) if status == _CAPTURE_ACTIVE else None

    def close(self) -> None:
        """Destroy the stream once its work is done; does not block. Arrays used on it stay correctly ordered."""
        if self._finalizer is not None and self._finalizer.alive and self.device._use is not None:
            code, *values = self.device.driver.result("cuStreamGetCaptureInfo", self.handle)
            if not code and int(values[0]) == 0:
                with contextlib.suppress(DriverError):  # after a fault nothing orders anything; destroying comes first
                    self._last = self.record()
        super().close()

    def last_event(self) -> Event | None:
        """An event after everything this stream has queued; None if it was closed while captured or with its device."""
        return self._last if self.closed else self.record()


def _ready(device: Device, call: str, handle: int) -> bool:
    code, *_ = device.driver.result(call, handle)
    if code and int(code) != _NOT_READY:
        raise device.driver.error(call, (handle,), code)
    return not code


def _foreign_handle(stream: Any) -> int:
    if isinstance(stream, bool) or stream is None:
        raise ArgumentError("stream", repr(stream), "a stream object or an int")
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ArgumentError("stream", f"__cuda_stream__ version {version}", "version 0")
        return int(handle)
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    try:
        return operator.index(stream)
    except TypeError:
        try:
            return int(stream)  # CUstream of the bindings
        except (TypeError, ValueError):
            expected = "an int, or an object with __cuda_stream__"
            raise ArgumentError("stream", f"a {type(stream).__name__}", expected) from None
