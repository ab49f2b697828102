# SPDX-License-Identifier: Apache-2.0
"""The threads of a client: the connection of each, and the thread that runs host functions for the machine."""

from __future__ import annotations

import ctypes
import socket
import threading

from ..machine.run.work import call_host
from ..space import mapped
from ..wire.message import Outgoing
from .channel import Ended, Tag, receive, send


class Line:
    """A connection to the machine. `number` is its number in the server; `calls` counts the calls sent on it."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection, self.number = connection, number
        self.calls = 0

    def __del__(self) -> None:
        self.connection.close()  # interrupts no call, as a call that is under way keeps this object alive


class Local(threading.local):
    """The state of the calling thread."""

    line: Line | None = None
    in_host_function = False


def run_host_functions(connection: socket.socket, local: Local) -> None:
    """Run the host functions and the copies of host memory that the machine requests, one after another. Host functions
    may not call the driver, so `local` marks this thread as one that runs them.
    """
    local.in_host_function = True
    try:
        while True:
            tag, incoming = receive(connection)
            out = Outgoing()
            if tag == Tag.CALLBACK:
                function, count = incoming.word(), incoming.word()
                call_host(function, *(incoming.word() for _ in range(count)))
            elif tag == Tag.READ:
                content = mapped.copied(incoming.word(), incoming.word())
                out.word(content is not None)
                out.data(content)
            else:
                address, content = incoming.word(), incoming.data() or b""
                done = mapped.writable(address, len(content))
                if done:
                    ctypes.memmove(address, content, len(content))
                out.word(done)
                out.data(None)
            send(connection, Tag.RESULT, out)
    except (Ended, OSError):
        pass  # the machine is gone, or this process has left it
