# SPDX-License-Identifier: Apache-2.0
"""Foreign memory that queued work still uses.

A library that does not tell its stream cannot order the reuse of its memory after our work: it may reuse the memory as
soon as nothing refers to it. So its objects are kept until an event after the work is complete.
"""

from __future__ import annotations

from typing import Any

from .driver import Driver
from .lifetime import flush, retire
from .stream import Event, Stream


def keep(stream: Stream, objects: object) -> None:
    """Keep `objects` alive until all work queued on `stream` so far is complete. Not for captures and launch groups.

    They are dropped at a later flush (see `lifetime`): at an allocation, a synchronisation or the next `keep`.
    """
    flush(stream.device.driver)
    retire(stream.device.driver, _drop, stream.record(), objects)


def _drop(driver: Driver, event: Event, objects: object) -> None:
    # In its default mode a capture of another library forbids a query to every thread, and would be invalidated.
    relaxed: Any = driver.types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        done = event.query()
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
    if done:
        event.close()
    else:
        retire(driver, _drop, event, objects)
