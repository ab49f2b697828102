# SPDX-License-Identifier: Apache-2.0
"""Foreign memory that queued work still uses.

A library that does not tell the stream of its memory cannot order the reuse of that memory after drvfuse's work. It may
reuse the memory as soon as no object refers to it. So the library's objects are kept until an event after the work is
complete.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..errors import DrvfuseError
from .driver import Driver
from .lifetime import flush, retire
from .stream import Event, Stream


class _Held:
    """The events after a driver's work, in the order in which they were recorded, each with the objects that the work
    before it uses.

    Only the first event is queried, and the next one once the first is complete. So a program that queues many calls
    ahead makes about one query per call. `driver.lock` guards `entries`. At most one call of `_drop` is queued for the
    next flush (see `lifetime`), however many entries there are.
    """

    def __init__(self, driver: Driver) -> None:
        self.entries: deque[tuple[Event, object]] = deque()


def keep(stream: Stream, objects: object) -> None:
    """Keep `objects` alive until all work queued on `stream` so far is complete. Not for captures.

    They are dropped at a later flush (see `lifetime`), once all objects that were kept earlier are dropped. A flush
    happens at an allocation, a synchronisation or the next `keep`.
    """
    driver = stream.device.driver
    flush(driver)
    event = stream.record()
    with driver.lock:
        entries = driver.part(_Held).entries
        entries.append((event, objects))
        if len(entries) == 1:
            retire(driver, _drop)


def _drop(driver: Driver) -> None:
    """Drop the objects of the oldest events, up to the first event that is not complete."""
    entries = driver.part(_Held).entries
    dropped = []  # dropped after the lock is released, since dropping runs code of other libraries
    with driver.lock:
        try:
            while entries and _complete(driver, entries[0][0]):
                dropped.append(entries.popleft())
        except DrvfuseError:  # dropped too: the device was closed or lost its context, so later queries would also fail
            dropped.append(entries.popleft())
            raise
        finally:
            if entries:
                retire(driver, _drop)
    for event, _ in dropped:
        event.close()


def _complete(driver: Driver, event: Event) -> bool:
    # While another library captures in the default mode, a query by any thread would invalidate that capture.
    relaxed: Any = driver.types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with event.device.use():
        before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
        try:
            return event.query()
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
