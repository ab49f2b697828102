# SPDX-License-Identifier: Apache-2.0
"""The waits of driver calls. They make the work of a machine proceed, and advance the clock if it cannot proceed
otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...bindings import R
from ..run.wall_time import WallTime
from ..run.work import Op
from . import interrupts
from .failure import Failure
from .patience import MOMENT_S, Patience, outside

if TYPE_CHECKING:
    from ..machine import Machine
    from .process import Process

IDLE_QUERIES = 2000
"""The number of successive queries without progress after which a query advances virtual time."""


class Waits:
    """Runs a machine's queued work for calls that wait. Its methods are called with the machine's lock held."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._progress = machine, machine.progress
        self._idle_queries = (0, 0)
        self._wall_time = WallTime(machine.lock, lambda ns, resumes: machine.engine.pass_time(ns, resumes))
        # `lock.changes` after the last step in which no work could proceed, and the time before which no step is tried
        # while `lock.changes` has that value.
        self._rest, self._rest_until = -1, 0.0

    def wait(self, ops: Iterable[Op], process: Process | None = None) -> None:
        """Run until these operations are done. Operations that can never be done are ended with a deadlock report.
        Raises Failure if the process that waits (by default the process of the operations) is closed during the wait.
        """
        ops = list(ops)
        waited = [op for op in ops if not op.done]

        def done() -> bool:
            while waited and waited[-1].done:
                waited.pop()
            return not waited

        if waited:
            process = process or ops[0].command.context.process
            try:
                with process.blocking(done):
                    self._run_until(done, process)
            except KeyboardInterrupt:
                self._progress.interrupted(process)
                raise
            if process.closed:  # another thread has closed the process, with all its objects
                raise Failure(R.CUDA_ERROR_DEINITIALIZED)
        self._learn(ops)

    def poll(self, ops: Iterable[Op]) -> bool:
        """Let the machine run for a moment. Returns True if these operations have ended. Reports no deadlock, as the
        host may still act.
        """
        waited, submitted = list(ops), self._progress.submitted
        if not all(op.done for op in waited):
            moved = self._step()
            count = self._idle_queries[1] + 1 if self._idle_queries[0] == submitted and not moved else 0
            if count == IDLE_QUERIES:
                # If time advances, `count` is decremented, so that the next query without progress advances time again.
                count -= self._let_time_go(waited[0].command.context.process)
            self._idle_queries = (submitted, count)
        if not all(op.done for op in waited):
            return False
        self._learn(waited)
        return True

    def drain(self, process: Process) -> None:
        """Run until no work can proceed without the host or the clock. Raises Failure if the process is closed during
        the run.
        """
        while self._step():
            self._machine.lock.give_way()
            if process.closed:
                raise Failure(R.CUDA_ERROR_DEINITIALIZED)

    def pass_time(self) -> None:
        """Advance virtual time with wall-clock time. Called when no work can proceed."""
        if self._progress.running:
            with interrupts.taken():
                moved = self._wall_time.go()
            # Until `_rest_until`, calls that wait try a step only if something has changed (`_try_step`).
            self._rest_until = 0.0 if moved else time.monotonic() + 1

    def _learn(self, ops: Iterable[Op]) -> None:
        """Tell the race detector that the host knows that these operations have ended."""
        if self._machine.detector is not None:
            self._machine.detector.host_learns(ops)

    def _run_until(self, done: Callable[[], bool], process: Process) -> None:
        lock, patience = self._machine.lock, Patience(process)
        while not done():
            interrupts.check()
            if not self._try_step() and not done():
                if self._progress.in_host_function:
                    lock.wait(0.05)
                elif not patience.wait() and not self._advance_clock():
                    self._progress.deadlock()
            lock.give_way()

    def _try_step(self) -> bool:
        """Do what `_step` does, unless another thread has just found that no work can proceed: then return False."""
        lock = self._machine.lock
        if self._machine.several:
            resting = self._rest == lock.changes and time.monotonic() < self._rest_until and not self._progress.wakes()
            if lock.choose("rest", resting):
                return False
        return self._step()

    def _step(self) -> bool:
        """Let the machine run for a moment. Returns False if no work could proceed."""
        begun = time.monotonic()
        if self._progress.step():
            self._wall_time.stop()
            return True
        now = time.monotonic()
        self._rest, self._rest_until = self._machine.lock.changes, now + max(MOMENT_S / 2, now - begun)
        return False

    def _advance_clock(self) -> bool:
        """Advance virtual time. Returns False if no thread could continue after that."""
        if not self._progress.running:
            return False
        self._rest_until = 0.0
        with interrupts.taken():
            return self._machine.engine.advance_clock()

    def _let_time_go(self, process: Process) -> bool:
        """Advance virtual time for a process that queries again and again. Returns False if time does not advance."""
        with process.blocking(lambda: False):
            if outside(self._machine):
                self.pass_time()
                return True
        return self._advance_clock()
