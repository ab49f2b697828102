# SPDX-License-Identifier: Apache-2.0
"""The behaviour of a waiting call while no work can proceed: it waits for other threads, or finds that no thread can
make work proceed.

On a machine with one process, the other threads are those of this operating-system process. They get `GRACE_S` seconds
to queue work. If a kernel polls host memory, they get at least as many seconds as the setting `emu_host_wait` says.
Then virtual time is advanced. If that changes nothing either, the state is a deadlock.

With several processes, a live process is called outside while none of its threads is in a call that cannot return yet.
A process that is outside may queue work, or write memory that a kernel polls, at any moment. While a process is
outside, virtual time advances no faster than wall-clock time (`WallTime`), and no state is a deadlock. When all
processes are inside, the rules are those for one process, and the other threads are those that have called the driver
of a live process before. The machine's own process counts as live only while it has a context.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ...abi import Kind

if TYPE_CHECKING:
    from ..machine import Machine
    from .process import Process

GRACE_S = 1.0
"""Seconds that a wait which cannot proceed gives other Python threads to queue work."""
MOMENT_S = 0.02


class Patience:
    """Decides how long one driver call of `process` waits while no work can proceed."""

    def __init__(self, process: Process) -> None:
        self._process, self._machine = process, process.machine
        # How many operations had ever been queued when the call last had to wait, and since when the call has waited
        # without a new one.
        self._queued, self._since = -1, 0.0

    def wait(self) -> bool:
        """Wait MOMENT_S seconds, so that other threads can make calls. Returns False, without a wait, if no other
        thread can change anything, or if other threads were given enough time.
        """
        machine, now = self._machine, time.monotonic()
        if self._queued != machine.progress.submitted:
            self._queued, self._since = machine.progress.submitted, now
        if outside(machine):
            machine.waits.pass_time()
        elif machine.lock.choose("go on", not others(self._process) or self._is_over(now)):
            return False
        with self._process.threads.waiting():
            machine.lock.wait(MOMENT_S)
        return True

    def _is_over(self, now: float) -> bool:
        return now >= self._since + GRACE_S and now >= self._since + self._host_wait()

    def _host_wait(self) -> float:
        """How many seconds the call waits for other threads to write host memory that a kernel polls. 0 if no kernel
        polls host memory.
        """
        machine = self._machine
        found = [machine.window.index.find(address) for address in machine.progress.polled()]
        return machine.host_wait if any(f is not None and f.kind is Kind.HOST for f in found) else 0.0


def outside(machine: Machine) -> bool:
    """True if the machine has several processes, and a live one is outside: none of its threads is in a call that
    cannot return yet.
    """
    return machine.several and any(process.alive and not process.blocked for process in machine.processes)


def others(process: Process) -> bool:
    """True if a thread other than the calling one may still queue work."""
    if not process.machine.several:
        return process.threads.others()
    mine, alive = threading.get_ident(), {thread.ident for thread in threading.enumerate()}
    return any((p.callers & alive) - p.blocked - {mine} for p in process.machine.processes if p.alive)
