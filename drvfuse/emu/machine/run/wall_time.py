# SPDX-License-Identifier: Apache-2.0
"""Virtual time that advances with wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..process.lock import MachineLock

# How often one call of `pass_time` may resume a thread. _SHORT takes a few milliseconds, _LONG tens of milliseconds.
_SHORT, _LONG = 20_000, 200_000
_MOST_NS = 500_000_000
_PRESSED_S = 0.5
_SHARE = 4


class WallTime:
    """Advances virtual time with wall-clock time while no work can proceed. `pass_time(ns, resumes)` advances it by the
    nanoseconds since the previous call, and resumes threads at most about `resumes` times. It returns whether work can
    proceed now.

    If other threads have waited for the lock within the last half second, `pass_time` is called rarely, so that they
    have the lock most of the time. `ns` is at most half a second, so that virtual time does not follow longer work of
    other threads, such as the translation of a module. In a repeated run, `ns` and `resumes` follow the recorded
    choices (`MachineLock.choose`).
    """

    def __init__(self, lock: MachineLock, pass_time: Callable[[int, int], bool]) -> None:
        self._lock, self._pass_time = lock, pass_time
        self._until: float | None = None  # the wall-clock time up to which virtual time has advanced
        self._due = 0.0

    def stop(self) -> None:
        """Stop advancing time. Called when work has proceeded."""
        self._until = None

    def go(self) -> bool:
        """Advance time. Returns True if work can proceed now. Called when no work could proceed."""
        now = time.monotonic()
        if self._until is None:
            self._until = self._due = now
        gone = min(int((now - self._until) * 1e9), _MOST_NS)
        ns = self._lock.choose("time", gone if now >= self._due else 0)
        if not ns:
            return False
        pressed = now < self._lock.pressed + _PRESSED_S
        resumes = _SHORT if self._lock.choose("in short", pressed) else _LONG
        self._until = now
        moved = self._pass_time(ns, resumes)
        if pressed:
            self._due = now + _SHARE * (time.monotonic() - now)
        return moved
