# SPDX-License-Identifier: Apache-2.0
"""Order between the streams that a rank's work uses.

A group's workspace serves one call at a time. So the stream of a call waits, by an event, for the rank's last call if
that call used another stream. A captured stream cannot wait for an event that was recorded outside the capture, nor the
reverse: in a capture the two streams must belong to the same capture already, or the call raises CaptureError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CaptureError

if TYPE_CHECKING:
    from ..runtime.stream import Event, Stream


def same(one: Stream, other: Stream) -> bool:
    """Whether two Stream objects are one stream of the driver. Equal handles do not suffice, since the default streams
    of all devices have the same handle.

    A closed stream is not the same as any other: the driver may have given its handle to a new stream.
    """
    if one is other:
        return True
    return one.handle == other.handle and one.device is other.device and not one.closed and not other.closed


class RankOrder:
    """Orders each call of a rank after the rank's last call. The stream of the last call is kept for this.

    A foreign stream may be destroyed after the call. So after a call on a foreign stream, the next call waits for an
    event that was recorded after that call.
    """

    def __init__(self) -> None:
        self.last: Stream | None = None
        """The stream of the last call; None if there was no call since `drain`."""
        self._event: Event | None = None
        """Recorded after the last call outside captures, if that call was on a foreign stream."""
        self._capture: int | None = None
        """The capture that holds the last call, if that call was on a foreign stream."""

    def admit(self, stream: Stream, rank: int) -> None:
        """Order `stream` after the rank's last call, or raise CaptureError before anything is queued."""
        last = self.last
        if last is None or (last is stream and not last.foreign):
            return
        if last.foreign:
            self._after_foreign(last, stream, rank)
        elif not same(last, stream):
            now, then = stream.capture_id(), None if last.closed else last.capture_id()
            if now != then or (last.closed and now is not None):
                raise _refused(rank, then)
            if not last.closed:
                stream.follow(last)
            elif (event := last.last_event()) is not None:
                stream.wait(event)

    def _after_foreign(self, last: Stream, stream: Stream, rank: int) -> None:
        now = stream.capture_id()
        # A stream that is not captured is never refused, as drvfuse cannot ask whether the last call's capture is still
        # open.
        if now is None:
            if self._event is not None:
                stream.wait(self._event)
        elif not same(last, stream):
            # While it is captured, `stream` cannot wait for `_event`, which was recorded outside captures. So the last
            # call must be in the same capture.
            if now != self._capture:
                raise _refused(rank, None)
            stream.follow(last)

    def launched(self, stream: Stream, event: Event | None = None, capture: int | None = None) -> None:
        """Remember that the rank's last call went to `stream`.

        If `stream` is foreign, `event` was recorded after the call, or `capture` is the capture that holds the call.
        """
        self.last, self._capture = stream, capture
        if event is not None or not stream.foreign:
            self._event = event

    def drain(self, synchronised: Stream) -> None:
        """Wait for the rank's last call and forget it. There is no wait for a call on the stream `synchronised`, since
        the caller has just synchronised that stream.
        """
        last, event = self.last, self._event
        if last is not None and not last.foreign:
            if last.closed:
                event = last.last_event()
            elif not same(last, synchronised):
                last.synchronize()
        if event is not None:
            event.synchronize()
        self.last = self._event = self._capture = None


def _refused(rank: int, then: int | None) -> CaptureError:
    if then is None:
        problem = "is being captured, and the group's last call went to another stream, outside of that capture"
        remedy = "call group.synchronize() before the capture, or capture that stream"
    else:
        problem = "is not part of the open capture that holds the group's last call"
        remedy = "end that capture first, or join the stream to it"
    return CaptureError(f"rank {rank}: the stream {problem}; {remedy}")
