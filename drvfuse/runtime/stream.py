# SPDX-License-Identifier: Apache-2.0
"""Streams and events. Nothing here has a hidden current stream; a stream belongs to one device."""

from __future__ import annotations

import numbers
from typing import Any, Protocol, SupportsInt

from ..errors import (
    ArgumentError,
    CaptureError,
    DriverError,
    foreign,
    kind_of,
    require_flag,
    require_integer,
    require_kind,
    shown,
)
from .device import Device
from .driver import Driver
from .lifetime import Owned, flush

_NOT_READY = 600
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_CAPTURE_INVALIDATED = 2
_CAPTURE_IMPLICIT = 906
LEGACY, PER_THREAD = 1, 2
# For messages: what an argument must be if it takes only drvfuse's own streams.
WRAPPED = "a drvfuse.Stream; Stream.wrap(device, stream) makes one for a stream of another library"
UNKNOWN_HANDLE = (400, 709)  # CUresults for a handle that is invalid, or of a destroyed context


class SupportsCudaStream(Protocol):
    """A stream of another library that has a handle by `__cuda_stream__`."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class HasCudaStream(Protocol):
    """A stream with the attribute `cuda_stream`, such as torch's."""

    @property
    def cuda_stream(self) -> int: ...


StreamLike = SupportsCudaStream | HasCudaStream | SupportsInt
"""A stream: a `Stream`, an object of another library with `__cuda_stream__` or `cuda_stream`, or a handle as an int or
a CUstream (0 and 1: the legacy default stream; 2: the per-thread default stream of the calling thread)."""


def _destroy_stream(driver: Driver, handle: int) -> None:
    driver.cuStreamDestroy(handle)


def _destroy_event(driver: Driver, handle: int) -> None:
    driver.cuEventDestroy(handle)


class Event(Owned):
    """A point in a stream of `device`. With `timing` the time between two events can be read.

    `handle` is the CUevent as an int. `close()`, or the end of a `with` block, destroys the event; its methods then
    raise ClosedError.
    """

    def __init__(self, device: Device, *, timing: bool = False) -> None:
        require_kind("device", device, Device, "a drvfuse.Device")
        require_flag("timing", timing)
        self.device = device
        with device.use():
            self.handle = int(device.driver.cuEventCreate(0 if timing else _DISABLE_TIMING))
        self.timing = timing
        self._owns(device.driver, _destroy_event, self.handle)

    def __repr__(self) -> str:
        notes = ", with timing" * self.timing + ", closed" * self.closed
        return f"<Event {self.handle:#x} of device {self.device.index}{notes}>"

    def record(self, stream: Stream) -> Event:
        """Mark the work queued on `stream`, a stream of the event's device, so far. Returns the event."""
        require_kind("stream", stream, Stream, "a drvfuse.Stream")
        stream.record(self)
        return self

    def synchronize(self) -> None:
        """Block until the work that `record` marked last is done. Returns at once if the event was never recorded."""
        self._check_open()
        self.device.driver.cuEventSynchronize(self.handle)

    def query(self) -> bool:
        """True if the work that `record` marked last is done, or if the event was never recorded. Does not wait."""
        self._check_open()
        return _ready(self.device, "cuEventQuery", self.handle)

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds from `start` to this event. Both need `timing=True` and must be done: DriverError otherwise."""
        require_kind("start", start, Event, "a drvfuse.Event")
        self._check_open()
        start._check_open()
        return float(self.device.driver.cuEventElapsedTime(start.handle, self.handle))


class Stream(Owned):
    """A non-blocking stream of `device`: work on it is not ordered with the legacy default stream.

    `priority` is that of CUDA: lower numbers run first, and numbers out of range are clamped. `handle` is the CUstream
    as an int, and `__cuda_stream__` gives it to other libraries. `wrap` makes a Stream for a stream of another library.
    Methods of a closed Stream raise ClosedError.
    """

    _default = False  # a default stream is that of the current context, so every call on it needs the device's context
    foreign = False
    """Whether this wraps a stream of another library, which may destroy it at any time."""

    def __init__(self, device: Device, *, priority: int = 0) -> None:
        require_kind("device", device, Device, "a drvfuse.Device")
        wanted = require_integer("priority", priority, "an integer of 32 bits", -(1 << 31), (1 << 31) - 1)
        self.device = device
        with device.use():
            self.handle = int(device.driver.cuStreamCreateWithPriority(_NON_BLOCKING, wanted))
        self._holder: object = None
        self._last: Event | None = None
        self._owns(device.driver, _destroy_stream, self.handle)

    @classmethod
    def wrap(cls, device: Device, stream: StreamLike, argument: str = "stream") -> Stream:
        """A Stream for `stream`: for an object with `__cuda_stream__`, `.cuda_stream` or `.ptr`, or for a handle as an
        int. A Stream is returned as it is.

        The ints 0 and 1 mean the device's legacy default stream, whose handle is 1 here, and 2 its per-thread default
        stream. `close()` does not destroy the foreign stream, and the foreign object is kept alive. The stream must
        outlive arrays that are allocated on it. Raises ArgumentError, naming `argument`, for any other value and for a
        stream of another device.
        """
        require_kind("device", device, Device, "a drvfuse.Device")
        if isinstance(stream, Stream):
            if stream.device is not device:
                raise ArgumentError(argument, f"a stream of {stream.device!r}", f"a stream of {device!r}")
            stream._check_open()
            return stream
        self = cls.unchecked(device, foreign_handle(stream, argument))
        self._holder = stream
        if not self._default:
            self._check_device(argument)
        return self

    @classmethod
    def unchecked(cls, device: Device, handle: int) -> Stream:
        """A Stream for the foreign stream with handle `handle`. The caller guarantees that it belongs to `device`."""
        self = cls.__new__(cls)
        self.device, self.handle, self._holder, self._last = device, handle, None, None
        self._default, self.foreign = handle <= PER_THREAD, True
        return self

    def _check_device(self, argument: str) -> None:
        driver, ours = self.device.driver, self.device.context
        code, *values = driver.result("cuStreamGetCtx", self.handle)
        if int(code) in UNKNOWN_HANDLE:
            raise ArgumentError(argument, hex(self.handle), f"a stream that the {driver.name} driver knows")
        # A stream whose context the driver does not tell is accepted, since a stream of a green context may have none.
        if code or int(values[0] or 0) in (0, int(ours)):
            return
        driver.cuCtxPushCurrent(values[0])
        try:
            index = int(driver.cuCtxGetDevice())
        finally:
            driver.cuCtxPopCurrent()
        if index != self.device.index:
            raise ArgumentError(argument, f"{self.handle:#x}, a stream of device {index}", f"of {self.device!r}")

    def __repr__(self) -> str:
        name = {LEGACY: "legacy default", PER_THREAD: "per-thread default"}.get(self.handle, f"{self.handle:#x}")
        notes = ", foreign" * (self.foreign and not self._default) + ", closed" * self.closed
        return f"<Stream {name} of device {self.device.index}{notes}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        self._check_open()
        return (0, self.handle)

    def synchronize(self) -> None:
        """Block until all queued work is done, then free the memory of dropped objects.

        Raises CaptureError while the stream is being captured, and DriverError if a kernel of the context has failed.
        """
        self._check_open()
        if self.capture_id() is not None:
            raise CaptureError(f"{self!r} is being captured and cannot be synchronised")
        with self.device.use():
            self.device.driver.cuStreamSynchronize(self.handle)
        flush(self.device.driver)

    def query(self) -> bool:
        """True if everything queued so far is done. Does not wait."""
        self._check_open()
        with self.device.use():
            return _ready(self.device, "cuStreamQuery", self.handle)

    def fill(self, ptr: int, value: int, nbytes: int) -> None:
        """Set `nbytes` bytes at `ptr` to `value`, a byte, in the order of the stream; does not wait."""
        self._check_open()
        address = require_integer("ptr", ptr, "an address", 0, (1 << 64) - 1)
        byte = require_integer("value", value, "a byte, 0 to 255", 0, 255)
        if size := require_integer("nbytes", nbytes, "a number of bytes, at least 0", 0):
            with self.device.use():
                self.device.driver.cuMemsetD8Async(address, byte, size, self.handle)

    def wait(self, event: Event) -> None:
        """Order later work on this stream after `event`, which may be of any device of this driver."""
        self._check_open()
        if not isinstance(event, Event):
            raise ArgumentError("event", kind_of(event), "a drvfuse.Event; to wait for a stream, call Stream.follow")
        event._check_open()
        with self.device.use():
            self.device.driver.cuStreamWaitEvent(self.handle, event.handle, 0)

    def record(self, event: Event | None = None) -> Event:
        """Mark the work queued so far in `event`, or in a new one."""
        self._check_open()
        if event is None:
            event = Event(self.device)
        elif not isinstance(event, Event):
            raise ArgumentError("event", kind_of(event), "a drvfuse.Event, or None for a new one")
        elif event.device is not self.device:
            raise ArgumentError("event", f"an event of {event.device!r}", f"an event of {self.device!r}")
        event._check_open()
        with self.device.use():
            self.device.driver.cuEventRecord(event.handle, self.handle)
        return event

    def mark(self) -> Event:
        """An event after the work that is queued on this foreign stream now. It stays valid if the stream is destroyed.

        Must not be called in a capture. There is one event per stream handle, which each call records again. If a
        stream was destroyed, a new stream may have its handle. So this stream first waits for the event: then the
        event's new record covers the work of the destroyed stream too.
        """
        event = self.device.marks.get(self.handle)
        if event is not None:
            self.wait(event)
        event = self.device.marks[self.handle] = self.record(event)
        return event

    def follow(self, other: Stream) -> None:
        """Order later work on this stream after the work queued on `other` so far; `other` may be closed."""
        if not isinstance(other, Stream):
            raise ArgumentError("other", kind_of(other), WRAPPED)
        if other.closed:
            if (last := other.last_event()) is not None:
                self.wait(last)
        elif other.handle != self.handle or other.device is not self.device:
            with other.record() as event:  # the driver keeps a destroyed event until the waits on it are done
                self.wait(event)

    def capture_id(self) -> int | None:
        """The id of the capture in which this stream takes part, or None if it is not being captured.

        Raises CaptureError if the capture was invalidated, or if this is the legacy default stream and a stream that
        waits for it is being captured.
        """
        if self._closed:
            self._check_open()
        driver = self.device.driver
        if self._default:
            with self.device.use():
                found = driver.capture_status(self.handle)
        else:
            found = driver.capture_status(self.handle)
        code = found[0]
        if not code and not found[1]:
            return None
        if code:
            if int(code) == _CAPTURE_IMPLICIT:
                raise CaptureError(
                    f"{self!r}, the legacy default stream, cannot be used while a stream that waits for it is being "
                    "captured: use another stream"
                )
            raise driver.error("cuStreamIsCapturing", (self.handle,), code)
        if int(found[1]) == _CAPTURE_INVALIDATED:
            raise CaptureError(f"the capture of {self!r} was invalidated by an operation that capture forbids")
        with self.device.use():
            return int(driver.cuStreamGetCaptureInfo(self.handle)[1])

    def close(self) -> None:
        """Destroy the stream once its work is done; does not block. Arrays used on the stream stay correctly
        ordered.
        """
        if self._finalizer is not None and self._finalizer.alive and self.device._use is not None:
            code, *values = self.device.driver.result("cuStreamGetCaptureInfo", self.handle)
            if not code and int(values[0]) == 0:
                lost_before = self.device.driver.lost
                try:
                    self._last = self.record()
                except DriverError:  # after a fault no event can be recorded; the stream is destroyed all the same
                    self.device.driver.lost = lost_before
        super().close()

    def last_event(self) -> Event | None:
        """An event after all work of this stream. None if the stream was closed while it was being captured, after a
        kernel of its context had failed, or together with its device.
        """
        return self._last if self.closed else self.record()


def _ready(device: Device, call: str, handle: int) -> bool:
    code, *_ = device.driver.result(call, handle)
    if code and int(code) != _NOT_READY:
        raise device.driver.error(call, (handle,), code)
    return not code


def foreign_handle(stream: StreamLike, argument: str) -> int:
    """The handle of a foreign stream; LEGACY for both handles of the legacy default stream, 0 and 1."""
    handle = _handle_of(stream, argument)
    if not 0 <= handle < 1 << 64:
        raise ArgumentError(argument, handle, "a stream handle")
    return handle or LEGACY


def _handle_of(stream: Any, argument: str) -> int:
    expected = "a stream handle, or an object with __cuda_stream__"
    if isinstance(stream, (bool, float, str, bytes)) or stream is None:
        raise ArgumentError(argument, shown(stream), expected)
    return foreign(argument, expected, lambda: _told(stream, argument, expected))


def _told(stream: Any, argument: str, expected: str) -> int:
    """The handle that a foreign object tells. May raise any exception of that object."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ArgumentError(argument, f"of __cuda_stream__ version {shown(version)}", "of version 0")
        return int(handle)
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name) and not hasattr(stream, "dtype"):  # an array may have `ptr` too, but is refused
            return int(getattr(stream, name))
    # `int` is for CUstream of the bindings, which is no number; numbers must be integers.
    if isinstance(stream, numbers.Number) or hasattr(stream, "dtype") or not hasattr(stream, "__int__"):
        return require_integer(argument, stream, expected, 0, (1 << 64) - 1)
    return int(stream)
