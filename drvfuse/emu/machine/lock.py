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
        self._condition.notify_all()

    def wait(self, seconds: float) -> None:
        """Let others in until something changes, or for so long."""
        self._condition.wait(seconds)

    def give_way(self) -> None:
        """Let a thread in that stands at the lock."""
        if self._contenders:
            self._condition.wait(0.0005)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Not held inside the block."""
        self._condition.release()
        try:
            yield
        finally:
            self._condition.acquire()
