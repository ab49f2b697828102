# SPDX-License-Identifier: Apache-2.0
"""The lock of a machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from . import interrupts


class MachineLock:
    """One lock a machine, which a thread that waits for work passes on to those that want to queue some."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._count = threading.Lock()
        self._contenders = 0
        self._waiting = 0
        self.changes = self._told = 0  # how often `changed` was called, and had been when way was last given

    def __enter__(self) -> None:
        if not self._condition.acquire(blocking=False):
            with self._count:
                self._contenders += 1
            try:
                while not self._condition.acquire(timeout=0.1):
                    interrupts.check()
            finally:
                with self._count:
                    self._contenders -= 1

    def __exit__(self, *exc: object) -> None:
        self._condition.release()

    def changed(self) -> None:
        """Something was queued or ended: wake those that wait."""
        self.changes += 1
        self._condition.notify_all()

    def wait(self, seconds: float) -> None:
        """Let others in until something changes, or for so long."""
        self._waiting += 1
        try:
            self._condition.wait(seconds)
        finally:
            self._waiting -= 1

    def give_way(self) -> None:
        """Let a thread in that stands at the lock, or that waits for what may have changed."""
        if self._contenders or (self._waiting and self._told != self.changes):
            self._told = self.changes
            self._condition.wait(0.0005)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Not held inside the block."""
        self._condition.release()
        try:
            yield
        finally:
            self._condition.acquire()
