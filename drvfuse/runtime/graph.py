# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs by stream capture, over any number of streams and devices."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import ArgumentError, CaptureError, counted, kind_of, shown
from .array import Array, depend_on, mark_used
from .driver import Driver, Owner
from .lifetime import Owned
from .stream import LEGACY, WRAPPED, Event, Stream

_captures: weakref.WeakValueDictionary[tuple[int, int], Graph] = weakref.WeakValueDictionary()


def _destroy(driver: Driver, executable: Any) -> None:
    driver.cuGraphExecDestroy(executable)


class Graph(Owned, Owner):
    """Work captured once and launched any number of times: `with Graph.capture(streams) as graph: ...`.

    The caller must keep the buffers that the captured work uses alive, or pass them to `keep()`: a replay uses the
    addresses that were captured. If the kernels of a graph use a common workspace, its replays must not overlap.
    Replays on one stream never overlap. For collectives, `Group.capture` makes a graph for each rank.

    A launch comes after earlier work on its stream. The graph may hold calls of ops on arrays of other libraries, and
    the libraries may have told the streams of these arrays when the calls were prepared. Then the launch also comes
    after earlier work on these streams, and before later work on them.

    >>> device = df.device(0, driver="emu")
    >>> x = device.zeros(2, "uint8")
    >>> with df.Graph.capture(device.stream) as graph:
    ...     device.stream.fill(x.ptr, 7, x.nbytes)
    >>> graph.launch(device.stream)
    >>> x.numpy()
    array([7, 7], dtype=uint8)
    """

    def __init__(self, driver: Driver) -> None:
        Owner.__init__(self)
        self.driver = driver
        self._executable: Any = None
        self._devices: list[int] = []
        self._state = "being captured"
        self._failed = False
        self._kept: dict[int, object] = {}
        self._checks: list[Callable[[Stream], None]] = []
        self._notes: list[Callable[[Stream, Event | None], None]] = []

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._state
        return f"<Graph on devices {self._devices} of driver {self.driver.name!r}, {state}>"

    @classmethod
    @contextlib.contextmanager
    def capture(cls, streams: Stream | Sequence[Stream]) -> Iterator[Graph]:
        """A `with` block that records the work queued on `streams` into a graph, without running it, and yields the
        graph.

        The first stream begins the capture; the other streams, on any device, are forked from it and joined to it at
        the end. The graph can be launched after the block. If the block raises, the capture is dropped, every stream is
        usable again, and the exception propagates.

        The capture mode is relaxed: other threads are not restricted, and kernels may be loaded inside the block.
        Operations that drvfuse cannot do in a capture (allocate, synchronise, copy to the host) raise CaptureError.
        """
        members = list(streams) if isinstance(streams, Iterable) else [streams]
        if not members or not all(isinstance(stream, Stream) for stream in members):
            raise ArgumentError("streams", shown(streams), "one or more drvfuse streams")
        origin = members[0]
        driver = origin.device.driver
        for stream in members:
            if stream.device.driver is not driver:
                raise ArgumentError("streams", "streams of several drivers", "streams of one driver")
            if stream.handle == LEGACY:
                raise ArgumentError("streams", "the legacy default stream", "streams that can be captured")
            if stream.capture_id() is not None:
                raise CaptureError(f"{stream!r} is being captured already")
        self = cls(driver)
        self._devices = sorted({stream.device.index for stream in members})
        key = (id(driver), 0)
        with origin.device.use():
            driver.cuStreamBeginCapture(origin.handle, driver.types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            key = (id(driver), origin.capture_id() or 0)
            _captures[key] = self
            for stream in members[1:]:
                stream.follow(origin)
            yield self
            for stream in members[1:]:
                origin.follow(stream)
        except BaseException:
            self._fail()
            # This ends the capture on all of its streams. The error that the driver reports if some of the streams are
            # not joined back is ignored.
            with origin.device.use():
                _, *values = driver.result("cuStreamEndCapture", origin.handle)
            if values and int(values[0] or 0):
                driver.result("cuGraphDestroy", values[0])
            raise
        finally:
            _captures.pop(key, None)
        try:
            with origin.device.use():
                captured = driver.cuStreamEndCapture(origin.handle)
                try:
                    self._executable = driver.cuGraphInstantiate(captured, 0)
                    _, count = driver.cuGraphGetNodes(captured)
                    self._state = counted(count, "node")
                finally:
                    driver.cuGraphDestroy(captured)
        except BaseException:
            self._fail()
            raise
        self._owns(driver, _destroy, self._executable)

    def _fail(self) -> None:
        self._state, self._failed = "whose capture failed", True

    @property
    def launchable(self) -> bool:
        """Whether the graph may be launched, now or once its capture has ended: False if the capture failed, and after
        `close()`.
        """
        return not (self._failed or self._closed)

    def keep(self, *objects: object) -> None:
        """Keep `objects` alive until the graph is closed; Arrays among them count as used by every launch. After the
        `close()` of a buffer that such an array belongs to, a launch raises ClosedError."""
        self._kept.update((id(kept), kept) for kept in objects)
        depend_on((kept for kept in objects if isinstance(kept, Array)), self)

    def owner_closed(self, owner: Owned) -> None:
        """See `lifetime.Dependent`: launches check the kept arrays from now on."""
        self._checks.insert(0, self._require_open_arrays)

    def _require_open_arrays(self, stream: Stream) -> None:
        for kept in self._arrays():
            kept.require_open()

    def _arrays(self) -> Iterator[Array]:
        return (kept for kept in self._kept.values() if isinstance(kept, Array))

    def _hold(self, inner: Graph) -> None:
        """Let launches of this graph, into which a launch of `inner` was captured, check, note and keep what launches
        of `inner` do. The driver has copied `inner`, which may be closed now."""
        self.keep(*inner._kept.values())
        for check in inner._checks:
            self.before_launch(check)
        for note in inner._notes:
            self.after_launch(note)

    def before_launch(self, check: Callable[[Stream], None]) -> None:
        """Call `check(stream)` before every launch on `stream`. `check` may make `stream` wait for other work, or
        refuse the launch by raising. A function that is passed twice is called once.
        """
        if check not in self._checks:
            self._checks.append(check)

    def after_launch(self, note: Callable[[Stream, Event | None], None]) -> None:
        """Call `note(stream, event)` after every launch on `stream`. A function that is passed twice is called once.

        If `stream` is foreign, `event` was recorded after the launch; otherwise it is None.
        """
        if note not in self._notes:
            self._notes.append(note)

    def launch(self, stream: Stream) -> None:
        """Queue the graph on `stream`; does not wait. The same as `admit`, then `queue`."""
        self.admit(stream)
        self.queue(stream)

    def admit(self, stream: Stream) -> None:
        """The first half of `launch`: call the checks of `before_launch`, which may make `stream` wait."""
        self._require_launchable(stream)
        for check in self._checks:
            check(stream)

    def queue(self, stream: Stream) -> None:
        """The second half of `launch`: queue the graph on `stream`, right after `admit`."""
        with stream.device.use():
            self.driver.cuGraphLaunch(self._executable, stream.handle)
        outer = capturing(stream)
        if outer is not None:
            outer._hold(self)
        event = stream.mark() if stream.foreign and stream.capture_id() is None else None
        mark_used(self._arrays(), stream, event)
        for note in self._notes:
            note(stream, event)

    def upload(self, stream: Stream) -> None:
        """Prepare the device, in the order of `stream`, so that the first launch is as fast as later ones."""
        self._require_launchable(stream)
        with stream.device.use():
            self.driver.cuGraphUpload(self._executable, stream.handle)

    def _require_launchable(self, stream: Stream) -> None:
        if not isinstance(stream, Stream):
            raise ArgumentError("stream", kind_of(stream), WRAPPED)
        if stream.closed or self.closed:
            stream._check_open()
            self._check_open()
        if self._executable is None:
            raise CaptureError("the graph is still being captured, or its capture failed")

    def close(self) -> None:
        super().close()
        self._kept.clear()
        self._checks.clear()
        self._notes.clear()


def capturing(stream: Stream) -> Graph | None:
    """The Graph into which `stream` is being captured; None if no capture by drvfuse holds it."""
    identity = stream.capture_id() if _captures else None
    return None if identity is None else _captures.get((id(stream.device.driver), identity))
