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
    """The lock of a machine. A thread that waits for queued work to end passes the lock to threads that want to queue
    work.

    `order` records which thread gets the lock or, in a repeated run, chooses that thread. A driver call takes the lock
    by `with lock:`, and then calls `lock.called(process, what)`.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._count = threading.Lock()
        self._contenders = 0
        self._waiting = 0
        self._caller: Process | None = None
        self.call = ""  # the driver call of the thread that holds the lock
        self.changes = self._seen = 0  # the number of calls of `changed`, in all and up to the last `give_way`
        self.pressed = 0.0  # the last time at which a thread had to wait for the lock
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
            self._condition.notify_all()  # the call of a waiting thread may be next in the record
        self._condition.release()

    def called(self, process: Process, what: str) -> None:
        """Note which call holds the lock. In a repeated run, wait until this call is next in the record. Called by a
        thread that has got the lock for a call of a process.
        """
        self._caller, self.call = process, what
        if self.order is not None:
            self.order.called(process, what)
            self._caller, self.call = process, what

    def choose(self, kind: str, value: int) -> int:
        """Make a choice that depends on wall-clock time: return `value` or, in a repeated run, the recorded value. 0 is
        the default, which needs no line in a record. `kind` names the choice in records.
        """
        return value if self.order is None else self.order.choose(kind, int(value))

    def changed(self) -> None:
        """Wake the threads that wait. Called when an operation was queued or has ended."""
        self.changes += 1
        self._condition.notify_all()

    def wait(self, seconds: float) -> None:
        """Release the lock until `changed` is called, for at most `seconds`."""
        self._waiting += 1
        try:
            with self._lent():
                self._condition.wait(seconds)
        finally:
            self._waiting -= 1

    def give_way(self) -> None:
        """Let another thread have the lock for a moment, if one waits for it, or if one is in `wait` and `changed` was
        called since this thread or another one last gave way.
        """
        wanted = self._contenders or (self._waiting and self._seen != self.changes)
        if self.choose("give way", bool(wanted)):
            self._seen = self.changes
            with self._lent():
                self._condition.wait(0.0005)

    def stand_aside(self, seconds: float) -> None:
        """Release the lock until `changed` is called, for at most `seconds`. In a repeated run, a thread waits with
        this method until its event is next in the record. Unlike `wait`, the method is no event of the record itself.
        """
        interrupts.check()
        self._condition.wait(seconds)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Context manager: release the lock for the body of the `with` statement, and take it again afterwards."""
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
        """Context manager: let other threads have the lock during the body of the `with` statement. After the body, the
        calling thread has the lock again.
        """
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
