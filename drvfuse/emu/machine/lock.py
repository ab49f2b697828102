# SPDX-License-Identifier: Apache-2.0
"""The lock of a machine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import interrupts

if TYPE_CHECKING:
    from .order import Order
    from .process import Process


class MachineLock:
    """One lock a machine, which a thread that waits for work passes on to those that want to queue some.

    `order` records who gets it, or decides that: `with lock: lock.called(process, what); ...`.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._count = threading.Lock()
        self._contenders = 0
        self._waiting = 0
        self._caller: Process | None = None
        self.call = ""  # the driver call of the thread that holds the lock
        self.changes = self._seen = 0  # calls of `changed`: in all, and up to the last `give_way`
        self.pressed = 0.0  # when a thread last had to wait for the lock
        self.order: Order | None = None

    def __enter__(self) -> None:
        if not self._condition.acquire(blocking=False):
            self.pressed = time.monotonic()
            with self._count:
                self._contenders += 1
            try:
                while not self._condition.acquire(timeout=0.1):
                    interrupts.check()
            finally:
                with self._count:
                    self._contenders -= 1

    def __exit__(self, *exc: object) -> None:
        if self.order is not None:
            self._condition.notify_all()  # it may be the turn of a thread that waits for the lock
        self._condition.release()

    def called(self, process: Process, what: str) -> None:
        """The calling thread has it for a call of a process. Where a run repeats another it waits for its turn here."""
        self._caller, self.call = process, what
        if self.order is not None:
            self.order.called(process, what)
            self._caller, self.call = process, what

    def choose(self, kind: str, value: int) -> int:
        """The value of a choice that depends on the time of the wall, of which 0 is the usual one: `value`, unless a
        run is repeated where it was another.
        """
        return value if self.order is None else self.order.choose(kind, int(value))

    def changed(self) -> None:
        """Something was queued or ended: wake those that wait."""
        self.changes += 1
        self._condition.notify_all()

    def wait(self, seconds: float) -> None:
        """Release the lock until something changes, for at most that time."""
        self._waiting += 1
        try:
            with self._lent():
                self._condition.wait(seconds)
        finally:
            self._waiting -= 1

    def give_way(self) -> None:
        """Pass the lock to another thread, if one waits for it or for a change."""
        wanted = self._contenders or (self._waiting and self._seen != self.changes)
        if self.choose("give way", bool(wanted)):
            self._seen = self.changes
            with self._lent():
                self._condition.wait(0.0005)

    def stand_aside(self, seconds: float) -> None:
        """Like `wait`, but without a record in `order`."""
        interrupts.check()
        self._condition.wait(seconds)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock inside the block."""
        with self._lent():
            if self.order is not None:
                self._condition.notify_all()
            self._condition.release()
            try:
                yield
            finally:
                self._condition.acquire()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Let other threads have the lock inside the block; the calling thread has it again behind it."""
        caller, call = self._caller, self.call
        if self.order is not None:
            self._condition.notify_all()
        try:
            yield
        finally:
            if self.order is not None and caller is not None:
                self._caller = caller
                self.order.back(caller)
            self._caller, self.call = caller, call
