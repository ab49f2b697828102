# SPDX-License-Identifier: Apache-2.0
"""Virtual time that goes with the time of the wall."""

from __future__ import annotations

import time
from collections.abc import Callable

from .lock import MachineLock


class WallTime:
    """While nothing can move, `pass_time(ns)` is called with the nanoseconds that have gone by since the last call.

    That is done so seldom that others get most of the time of the CPU. `lock` may know better (`MachineLock.choose`).
    """

    def __init__(self, lock: MachineLock, pass_time: Callable[[int], object]) -> None:
        self._lock, self._pass_time = lock, pass_time
        self._until: float | None = None  # as far as time has passed
        self._due = 0.0

    def stop(self) -> None:
        """Something has moved, which makes time pass by itself."""
        self._until = None

    def go(self) -> None:
        """Nothing can move at the moment."""
        now = time.monotonic()
        if self._until is None:
            self._until = self._due = now
        ns = self._lock.choose("time", int((now - self._until) * 1e9) if now >= self._due else 0)
        if ns:
            self._until = now
            self._pass_time(ns)
            self._due = now + 2 * (time.monotonic() - now)
