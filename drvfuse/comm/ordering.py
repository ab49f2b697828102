# SPDX-License-Identifier: Apache-2.0
"""Order between the streams that a rank's work uses.

A group's workspace serves one call at a time, so a call on another stream than the rank's last one waits for it by an
event. An event cannot cross the border of a graph capture: there the streams must be joined already, or the call
raises CaptureError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CaptureError

if TYPE_CHECKING:
    from ..runtime.stream import Stream


def same(one: Stream, other: Stream) -> bool:
    """Whether both are one stream. The handle alone does not say: every device's default stream has handle 0."""
    return one.handle == other.handle and one.device is other.device


class RankOrder:
    """The stream that a rank's last call went to, and the order of the next call after it."""

    def __init__(self) -> None:
        self._last: Stream | None = None

    @property
    def last(self) -> Stream | None:
        """Stream of the last call since the rank was last drained, if any."""
        return self._last

    def admit(self, stream: Stream, rank: int) -> None:
        """Order `stream` after the rank's last call, or raise CaptureError before anything is queued."""
        last = self._last
        if last is None or same(last, stream):
            return
        now, then = stream.capture_id(), None if last.closed else last.capture_id()
        if now != then or (last.closed and now is not None):
            if then is None:
                problem = "is being captured, and the group's last call went to another stream outside the capture"
                remedy = "call group.synchronize() before the capture, or capture that stream"
            else:
                problem = "is not part of the open capture that holds the group's last call"
                remedy = "end that capture first, or join the stream to it"
            raise CaptureError(f"rank {rank}: the stream {problem}; {remedy}")
        if last.closed:
            event = last.last_event()
            if event is not None:
                stream.wait(event)
        else:
            stream.follow(last)

    def launched(self, stream: Stream) -> None:
        """Remember that the rank's last call went to `stream`."""
        self._last = stream

    def drain(self, synchronised: Stream) -> None:
        """Wait for the last call and forget it; `synchronised` has just been waited for."""
        last = self._last
        if last is not None and not same(last, synchronised):
            if not last.closed:
                last.synchronize()
            elif (event := last.last_event()) is not None:
                event.synchronize()
        self._last = None
