# SPDX-License-Identifier: Apache-2.0
"""Supervises processes that belong together: prints their output line by line, reacts to the first failure and to
Ctrl-C, and leaves no process behind.

Every supervised process leads a process group of its own, so Ctrl-C at the terminal interrupts the supervisor alone,
which sends SIGINT once to each of these process groups. When the supervisor dies, even by SIGKILL, the operating system
kills the processes that the supervisor has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Self

from ..errors import DrvfuseError
from .waits import piece

_END_SECONDS = 5.0  # the time for processes to end after SIGTERM, and for their last output to arrive
_LONGEST_LINE = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1


class Process:
    """One process of a supervisor.

    A service is ended when all other processes have ended, and it is a failure if it ends earlier. The first line of
    its output is not printed.
    """

    def __init__(self, name: str, prefix: str, service: bool, popen: subprocess.Popen[bytes]) -> None:
        self.name, self.prefix, self.service, self.popen = name, prefix.encode(), service, popen
        self.first_line: str | None = None
        self.ended = False

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group of this process. Does nothing if the process has ended, since
        another group may have its number then."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)


class Supervisor:
    """Starts processes and waits for them; a context manager, which ends all of them.

    After a process has failed or after Ctrl-C, the other processes have `grace` seconds to end by themselves; then they
    get SIGTERM, and after that SIGKILL. `say` prints messages of the supervisor. Only the main thread can use it, since
    it replaces signal handlers while it is open.
    """

    def __init__(self, grace: float, say: Callable[[str], None]) -> None:
        self._grace, self._say = grace, say
        self._processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._status: int | None = None
        self._deadline, self._next_signal = math.inf, signal.SIGTERM
        self._prctl = ctypes.CDLL(None).prctl  # loaded here, since a child must load no library before exec

    def __enter__(self) -> Self:
        self._signals, self._wake = socket.socketpair()
        for end in (self._signals, self._wake):
            end.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
        self._old_wake = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.signal(signal.SIGKILL)
            process.popen.wait()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._signals:
                key.fileobj.close()  # type: ignore[union-attr]
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        self._signals.close()
        self._wake.close()

    def start(
        self, name: str, prefix: str, command: Sequence[str], environment: Mapping[str, str], service: bool = False
    ) -> Process:
        """Start a process, as a service if `service` is true (`Process`). Each line of its output is printed with the
        prefix.
        """
        parent = os.getpid()

        def tie() -> None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the supervisor died before PR_SET_PDEATHSIG took effect
                os._exit(1)

        popen = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=tie,
        )
        process = Process(name, prefix, service, popen)
        self._processes.append(process)
        for pipe, out in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, _Lines(self, process, pipe, out))
        return process

    def first_line(self, service: Process, seconds: float) -> str:
        """Wait for the first line of a service, which means that the service is ready, and return the line. Raises
        DrvfuseError if the service ends or prints no line within `seconds`, or if another process has failed."""
        until = time.monotonic() + seconds
        while service.first_line is None:
            if service.ended or self._status is not None or time.monotonic() > until:
                raise DrvfuseError(f"{service.name} did not start: it {_how(service.popen.poll())}")
            self._step(until)
        return service.first_line

    def wait(self) -> int:
        """Wait until all processes have ended. Returns 0, or the exit status of the process that failed first.

        The status of a process that a signal has ended is 128 plus the number of the signal, as in a shell. After
        Ctrl-C the result is 130.
        """
        while any(not process.ended for process in self._processes if not process.service):
            self._step(math.inf)
        services = [process for process in self._processes if not process.ended]
        self._deadline, self._next_signal = time.monotonic(), signal.SIGTERM
        while any(not process.ended for process in services):
            self._step(math.inf)
        self._deadline, drained = math.inf, time.monotonic() + _END_SECONDS
        while len(self._selector.get_map()) > 1 and time.monotonic() < drained:
            # Read the last output, but only until `drained`: a child of a process may keep the pipe open for ever.
            self._step(drained)
        return self._status or 0

    def _step(self, until: float) -> None:
        """Wait for output, a signal or a deadline, and handle it."""
        until = min(until, self._deadline)
        wait = None if until == math.inf else piece(until)
        for key, _ in self._selector.select(wait):
            key.data()
        for process in self._processes:
            if not process.ended and process.popen.poll() is not None:
                process.ended = True
                self._note_end(process)
        if time.monotonic() >= self._deadline:
            self._end_them(self._next_signal)

    def _note_end(self, process: Process) -> None:
        status = process.popen.returncode
        running = any(not other.ended for other in self._processes if not other.service)
        well = status <= 0 if process.service and not running else status == 0 and not process.service
        if self._status is not None or well:
            return
        self._status = 128 - status if status < 0 else status or 1
        text = f"{process.name} {_how(status)}"
        if running:
            text += f"; the others have {self._grace:g} s to end"
            self._deadline = time.monotonic() + self._grace
        self._say(text)

    def _end_them(self, number: signal.Signals) -> None:
        running = [process for process in self._processes if not process.ended]
        for process in running:
            process.signal(number)
        said = [process.name for process in running if not process.service]
        if said:
            self._say(f"{number.name} to {', '.join(said)}")
        killed = number == signal.SIGKILL
        self._deadline = math.inf if killed else time.monotonic() + _END_SECONDS
        self._next_signal = signal.SIGKILL

    def _take_signals(self) -> None:
        for number in self._signals.recv(64):
            if number == signal.SIGCHLD:
                continue
            self._status = self._status or 128 + number
            # A first Ctrl-C gives the processes time to end (below). After any other signal, or a Ctrl-C while a
            # deadline is set for them, they get SIGTERM or SIGKILL at once.
            if number != signal.SIGINT or self._deadline < math.inf:
                self._end_them(self._next_signal)
                continue
            self._say(f"interrupted; the processes have {self._grace:g} s to end")
            self._deadline = time.monotonic() + self._grace
            for process in self._processes:
                if not process.ended and not process.service:
                    process.signal(signal.SIGINT)

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        pipe.close()


class _Lines:
    """Prints the whole lines that arrive from one pipe of a process. Called when the pipe can be read."""

    def __init__(self, supervisor: Supervisor, process: Process, pipe: IO[bytes], out: Any) -> None:
        self._supervisor, self._process, self._pipe, self._out = supervisor, process, pipe, out.buffer
        self._first = process.service and out is sys.stdout
        self._partial = bytearray()

    def __call__(self) -> None:
        received = os.read(self._pipe.fileno(), 1 << 16)
        self._partial += received
        if not received:
            self._supervisor._close_pipe(self._pipe)
        *lines, rest = bytes(self._partial).split(b"\n")
        if rest and (not received or len(rest) > _LONGEST_LINE):
            lines, rest = [*lines, rest], b""
        self._partial[:] = rest
        if lines and self._first:
            self._first = False
            self._process.first_line = lines.pop(0).decode(errors="replace")
        if lines:
            self._out.write(b"".join(self._process.prefix + line + b"\n" for line in lines))
            self._out.flush()


def _how(status: int | None) -> str:
    if status is None:
        return "is running, but not ready"
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with exit status {status}"
