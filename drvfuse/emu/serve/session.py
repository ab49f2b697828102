# SPDX-License-Identifier: Apache-2.0
"""One client of a served machine, at the server's end: its process on the machine, and its connections."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..driver import ENTRIES, invoke
from ..driver.launch import layout_of
from ..machine import interrupts
from ..machine.host_files import FilePart
from ..machine.objects import Function
from ..wire.coder import numbered
from ..wire.message import Incoming, Outgoing
from .channel import Ended, Tag, close_rest, packed, receive, send, unpacked

if TYPE_CHECKING:
    from ..findings.reports import Report
    from ..machine.process import Process

log = logging.getLogger("drvfuse.emu")

_KEPT = 1024  # calls that failed, whose memory queued work may still name


class Session:
    """A client. It lives as long as its life line."""

    def __init__(self, key: str, process: Process, life: socket.socket) -> None:
        self.key, self.process, self._life = key, process, life
        self.lines: dict[int, Line] = {}
        self.kept: deque[Any] = deque(maxlen=_KEPT)
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._host: socket.socket | None = None
        self._host_turn = threading.Lock()
        self.ended = False
        self._local = threading.local()
        process.call_host = self.call_host
        process.file_behind = self._file_behind

    def offer_file(self, file: tuple[int, int] | None) -> None:
        """The file that the calling thread's next call registers memory of."""
        self._local.file = file

    def _file_behind(self, address: int, nbytes: int) -> FilePart | None:
        file = getattr(self._local, "file", None)
        return None if file is None else FilePart(os.dup(file[0]), file[1])

    def watch(self) -> None:
        """Wait for the client's end, and pass its Ctrl-C on. Runs in a thread of its own."""
        try:
            while True:
                tag, incoming = receive(self._life, alone=False)
                if tag == Tag.INTERRUPT:
                    number, call = incoming.word(), incoming.word()
                    line = self.lines.get(number)
                    if line is not None:
                        line.interrupt(call)
        except (Ended, OSError):
            pass
        self.end()

    def end(self) -> None:
        """The client is dead: so is its process on the machine, when this returns."""
        with self._ending:
            if self.ended:
                return
            with self._lock:
                self.ended = True
                lines = list(self.lines.values())
            try:
                self.process.close()
            finally:
                for connection in (self._life, self._host, *(line.connection for line in lines)):
                    if connection is not None:
                        _shut(connection)
                if self._host is not None:
                    self._host.close()

    def join(self, line: Line) -> bool:
        """Add a line; False if the client is dead."""
        with self._lock:
            if not self.ended:
                self.lines[line.number] = line
            return not self.ended

    def leave(self, line: Line) -> None:
        with self._lock:
            self.lines.pop(line.number, None)

    def host_line(self, connection: socket.socket) -> bool:
        """Take the connection on which the client runs host functions; False if the client is dead."""
        with self._lock:
            if not self.ended:
                self._host = connection
            return not self.ended

    def call_host(self, address: int, argument: int) -> None:
        """Run a host function in the client, and wait for its end. The machine's lock is not held."""
        with self._host_turn:
            if self._host is None or self.ended:
                return
            out = Outgoing()
            out.word(address)
            out.word(argument)
            try:
                send(self._host, Tag.CALLBACK, out)
                receive(self._host)
            except (Ended, OSError):
                log.debug("%r ended during a host function", self.process)


def _shut(connection: socket.socket) -> None:
    """Whoever reads from it notices."""
    with contextlib.suppress(OSError):  # the other end may have been first
        connection.shutdown(socket.SHUT_RDWR)


class Line:
    """The connection of one thread of a client: `run` answers its calls, in a thread of its own."""

    def __init__(self, number: int, session: Session, connection: socket.socket) -> None:
        self.number, self.session, self.connection = number, session, connection
        self._thread = 0
        self._lock = threading.Lock()
        self._calls = self._interrupted = 0  # how many have come, and which one was interrupted last
        self._under_way = False

    def run(self) -> None:
        self._thread = threading.get_ident()
        try:
            while True:
                tag, incoming = receive(self.connection)
                try:
                    with self._call_under_way():
                        reply, out = self._answer(tag, incoming)
                finally:
                    close_rest(incoming)
                send(self.connection, reply, out)
        except (Ended, OSError):
            pass  # the thread of the client has ended, or the client
        finally:
            self.session.leave(self)
            self.connection.close()

    @contextlib.contextmanager
    def _call_under_way(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            self._under_way = True
            if self._interrupted == self._calls:
                interrupts.interrupt(self._thread)
        try:
            yield
        finally:
            with self._lock:
                self._under_way = False
                interrupts.forget(self._thread)

    def interrupt(self, call: int) -> None:
        """End the wait of a call, by its number on this line. It may be over by now, or still have to come: Ctrl-C has
        a connection of its own.
        """
        with self._lock:
            self._interrupted = call
            if self._under_way and call == self._calls:
                interrupts.interrupt(self._thread)

    def _answer(self, tag: int, incoming: Incoming) -> tuple[int, Outgoing]:
        try:
            if tag == Tag.ASK:
                name, arguments = unpacked(incoming)
                return Tag.RESULT, packed(QUESTIONS[name](self.session.process, *arguments))
            return Tag.RESULT, self._call(tag, incoming)
        except Ended:
            raise
        except BaseException as error:  # whatever it is, the caller has to know it
            return Tag.RAISED, packed(_sendable(error))

    def _call(self, number: int, incoming: Incoming) -> Outgoing:
        coder = numbered(number)
        if coder is None:
            raise RuntimeError(f"no function of the driver has the number {number}")
        process = self.session.process
        run = coder.read_call(incoming, self)
        done = False
        self.session.offer_file(run.file)
        try:
            code, *results = invoke(process, ENTRIES[coder.signature.name], tuple(run.values), {})
            done = not code
        finally:
            for descriptor in run.received:
                incoming.descriptors.append(descriptor)  # to be closed with the rest
            if not done and run.keep:
                self.session.kept.append(run.keep)
        out = Outgoing()
        out.word(int(code))
        if code:
            refusal = process.refusal
            out.data(None if refusal is None else pickle.dumps(refusal))
        else:
            coder.write_result(out, results, run)
        return out

    # What a call asks of the machine's end (`wire.calls.Machine`) -----------------------------------------------------

    def pinned(self, address: int) -> int:
        return self.session.process.machine.window.host_file(address)

    def call_back(self, function: int, argument: int) -> int:
        out = Outgoing()
        out.word(function)
        out.word(argument)
        try:
            with self.session.process.machine.lock.released():  # the caller may take its time
                send(self.connection, Tag.CALLBACK, out)
                _, incoming = receive(self.connection)
            return incoming.word()
        except (Ended, OSError):
            return 0  # the caller is gone, and so is who wants to know


def _sendable(error: BaseException) -> BaseException:
    """An exception that the client can be given: itself, or its text where it cannot be written as bytes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# What a client asks beside driver calls -----------------------------------------------------------------------------


def _layout(process: Process, handle: int) -> Any:
    found = process.handles.get(handle)
    return layout_of(found) if isinstance(found, Function) else None


def _finding(process: Process, device: int) -> Report | None:
    with process.machine.lock:  # other threads of the client may make contexts
        return process.finding(device)


def _registered(process: Process) -> list[int]:
    with process.machine.lock:
        return process.memory.registered()


def _inject(process: Process, *arguments: Any, **options: Any) -> None:
    process.inject(*arguments, **options)


QUESTIONS: dict[str, Callable[..., Any]] = {
    "layout": _layout,
    "reports": lambda process, known: process.reports[known:],
    "finding": _finding,
    "registered": _registered,
    "declare_polled": lambda process, address, nbytes: process.declare_polled(address, nbytes),
    "clock": lambda process: process.clock(),
    "launches": lambda process: list(process.launches),
    "held": lambda process: process.held(),
    "inject": lambda process, function, code, device, after, times: _inject(
        process, function, code, device=device, after=after, times=times
    ),
    "clear_injected": lambda process: process.injected.clear(),
}
