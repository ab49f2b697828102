# SPDX-License-Identifier: Apache-2.0
"""The server's side of one client: its process on the machine, and its connections."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ..bindings import R
from ..findings.reports import Report
from ..machine.memory.host_files import FilePart
from ..machine.process.failure import Failure
from ..wire.message import Outgoing
from .channel import Ended, Tag, receive, send

if TYPE_CHECKING:
    from ..machine.process.process import Process
    from .line import Line

log = logging.getLogger("drvfuse.emu")

_KEPT = 1024  # the maximum number of failed calls whose memory is kept, as queued work may still use it


class Session:
    """A client of the machine. It ends when the client's first connection, the life line, is closed."""

    def __init__(self, key: str, process: Process, life: socket.socket) -> None:
        self.key, self.process, self._life = key, process, life
        self.lines: dict[int, Line] = {}
        self.kept: deque[Any] = deque(maxlen=_KEPT)
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._host: socket.socket | None = None
        self._host_lock = threading.Lock()
        self.ended = False
        self._local = threading.local()
        process.foreign = self
        process.call_host = self.call_host
        process.file_behind = self._file_behind
        # Private memory of the client cannot be registered: the server cannot move it to a file, so it has none.
        process.make_shared = lambda address, nbytes: None

    def offer_file(self, file: tuple[int, int] | None) -> None:
        """Set the file of the memory that the calling thread's next call registers."""
        self._local.file = file

    def _file_behind(self, address: int, nbytes: int) -> FilePart | None:
        file = getattr(self._local, "file", None)
        return None if file is None else FilePart(os.dup(file[0]), file[1])

    def watch(self) -> None:
        """Wait for the end of the client, and pass its Ctrl-C on. This runs in a thread of its own."""
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
        """Called when the client has ended: end its process on the machine."""
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
        """Add a connection. False if the client has ended."""
        with self._lock:
            if not self.ended:
                self.lines[line.number] = line
            return not self.ended

    def leave(self, line: Line) -> None:
        with self._lock:
            self.lines.pop(line.number, None)

    def host_line(self, connection: socket.socket) -> bool:
        """Use a connection for host functions, which the client runs. False if the client has ended."""
        with self._lock:
            if not self.ended:
                self._host = connection
            return not self.ended

    def call_host(self, address: int, *arguments: int) -> None:
        """Run a host function in the client, and wait for its end. The caller does not hold the machine's lock."""
        with self._host_lock:
            if self._host is None or self.ended:
                return
            out = Outgoing()
            for word in (address, len(arguments), *arguments):
                out.word(word)
            try:
                send(self._host, Tag.CALLBACK, out)
                receive(self._host)
            except (Ended, OSError):
                log.debug("%r ended during a host function", self.process)

    def read(self, address: int, nbytes: int) -> bytes:
        """Read host memory of the client for a running graph. A method of the protocol `machine.foreign.Foreign`."""
        out = Outgoing()
        out.word(address)
        out.word(nbytes)
        return self._memory(Tag.READ, out, f"reads {nbytes} bytes at 0x{address:x}") or b""

    def write(self, address: int, content: bytes) -> None:
        out = Outgoing()
        out.word(address)
        out.data(content)
        self._memory(Tag.WRITE, out, f"writes {len(content)} bytes at 0x{address:x}")

    def _memory(self, tag: Tag, out: Outgoing, what: str) -> bytes | None:
        """Let the client read or write its own memory. Raises Failure if the client no longer has that memory."""
        with self.process.machine.progress.outside(self.process), self._host_lock:
            try:
                if self._host is None or self.ended:
                    raise Ended
                send(self._host, tag, out)
                _, incoming = receive(self._host)
                done, content = incoming.word(), incoming.data()
            except (Ended, OSError):
                raise Failure(R.CUDA_ERROR_DEINITIALIZED) from None
        if not done:
            message = f"a copy node of a graph {what} of host memory that is not mapped any more"
            raise Failure(R.CUDA_ERROR_ILLEGAL_ADDRESS, Report("out_of_bounds", message))
        return content


def _shut(connection: socket.socket) -> None:
    """Shut a connection down, so that a thread that waits to read from it stops waiting."""
    with contextlib.suppress(OSError):  # the other end may have closed it already
        connection.shutdown(socket.SHUT_RDWR)
