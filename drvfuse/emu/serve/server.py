# SPDX-License-Identifier: Apache-2.0
"""The server of a machine that other processes use."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, DriverUnavailable, DrvfuseError, shown
from ..native import loader
from ..wire.message import Incoming, Outgoing
from . import address as addresses
from .channel import Ended, Tag, packed, receive, send, unpacked
from .hello import refusal_of
from .line import Line
from .session import Session

if TYPE_CHECKING:
    from ..machine.machine import Machine
    from ..machine.process.process import Process

_HELLO_S = _END_S = 10.0
_HELLO_BYTES = 1 << 16  # the most bytes of a greeting: until then, a connection is not known to be a client
_AGAIN_S = 0.05
_SWITCH_S = 0.0005
"""The switch interval of Python's threads, in seconds. It is short, so that a call need not wait long for Python code
of another thread that sets up a kernel.
"""


class Server:
    """Serves `machine` at `address`, by threads of this process, until `close()` or the end of a `with` block.

    Clients of other users, or with another version of drvfuse, are refused. `sessions` are the live clients.
    """

    def __init__(self, machine: Machine, address: str | None = None) -> None:
        self.machine = machine
        self.address = addresses.fresh() if address is None else address
        self.sessions: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._closed = False
        if not machine.window.shares_host:
            raise ArgumentError("machine", shown(machine), "one that was made with served=True")
        self._listening = addresses.listen(self.address)
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, _SWITCH_S))
        self._start("accept", self._accept)
        threading.Thread(target=_prepare, name="drvfuse-prepare", daemon=True).start()

    def close(self) -> None:
        """Stop serving. From now on all calls of clients return CUDA_ERROR_DEINITIALIZED, including calls that are
        waiting now. The machine stays open, but the server does not use the machine any more after this method has
        returned. Idempotent.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = list(self.sessions.values())
        addresses.close(self._listening, self.address)
        for session in sessions:
            session.end()
        sys.setswitchinterval(self._switch_interval)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(_END_S)

    def wait_for_clients(self, timeout: float = 10.0) -> bool:
        """Wait until no client is left and all that they had on the machine is freed. False if that takes longer."""
        deadline = time.monotonic() + timeout
        while self.sessions and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self.sessions

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server of {self.machine!r} at {self.address}{', closed' if self._closed else ''}>"

    def _start(self, what: str, target: Callable[..., None], *arguments: Any) -> bool:
        """Start a thread that `close` joins. If the server is closed, start none and return False."""
        thread = threading.Thread(target=target, args=arguments, name=f"drvfuse-{what}", daemon=True)
        # `close` joins the threads of self._threads, and a thread that is not started cannot be joined. The lock also
        # keeps `close` from marking the server as closed in between.
        with self._lock:
            if self._closed:
                return False
            thread.start()
            self._threads.add(thread)
        return True

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if not self._closed:  # an error that may be temporary, such as too many open files
                    time.sleep(_AGAIN_S)
                continue
            if not self._start("line", self._greet, connection):
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Serve a connection from its first message to its end."""
        _, uid = addresses.peer(connection)
        try:
            if uid != os.getuid():
                connection.close()  # processes of other users get no answer
                return
            connection.settimeout(_HELLO_S)
            tag, incoming = receive(connection, most=_HELLO_BYTES)
            hello = _hello(tag, incoming)
            connection.settimeout(None)
            refusal = refusal_of(hello)
            if refusal:
                send(connection, Tag.RAISED, packed(DriverUnavailable(refusal)))
                connection.close()
                return
            if hello["kind"] == "life":
                self._open(connection, hello)
            else:
                self._attach(connection, hello)
        except DrvfuseError as error:
            with contextlib.suppress(Ended, OSError):
                send(connection, Tag.RAISED, packed(DriverUnavailable(str(error))))
            connection.close()
        except (Ended, OSError, KeyError):
            connection.close()

    def _open(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        machine = self.machine
        # In a replay, making a process waits for its turn in the recorded order. So self._lock is not held meanwhile.
        process = self._process(hello.get("name"))
        session = Session(secrets.token_hex(8), process, connection)
        with self._lock:
            self.sessions[session.key] = session
            late = self._closed
        if late:
            session.end()
        facts = {
            "key": session.key,
            "name": session.process.name,
            "pid": os.getpid(),
            "machine": repr(machine),
            "devices": len(machine.devices),
            "arch": machine.arch,
            "seed": machine.seed,
            "sm_count": machine.sm_count,
            "base": machine.window.base,
            "nbytes": machine.window.nbytes,
        }
        try:
            send(connection, Tag.RESULT, packed(facts))
            session.watch()
        finally:
            session.end()
            with self._lock:
                self.sessions.pop(session.key, None)
            connection.close()

    def _process(self, name: str | None) -> Process:
        """A new process of the machine with the name that the client requests, plus a number if the name is taken."""
        if name is not None and not (isinstance(name, str) and name.strip() and name.isprintable()):
            raise Ended  # drvfuse's client sends no such name
        for number in itertools.count(1):
            try:
                return self.machine.process(f"{name} ({number})" if name and number > 1 else name)
            except ArgumentError:  # another process has the name
                continue
        raise AssertionError

    def _attach(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        session = self.sessions.get(hello["session"])
        if session is None:
            raise Ended
        if hello["kind"] == "host":
            if not session.host_line(connection):
                raise Ended
            send(connection, Tag.RESULT, Outgoing())
            return
        line = Line(next(self._numbers), session, connection)
        if not session.join(line):
            raise Ended
        send(connection, Tag.RESULT, packed(line.number))
        line.run()


def _prepare() -> None:
    """Load the native runtime while the clients start, as it may have to be compiled, which takes seconds."""
    with contextlib.suppress(Exception):  # an error is raised again by the first call that needs the runtime
        loader.runtime()


def _hello(tag: int, incoming: Incoming) -> dict[str, Any]:
    """The first message of a connection. Raises Ended if it is not a greeting."""
    try:
        found = unpacked(incoming)
    except Exception:
        found = None
    if tag != Tag.HELLO or not isinstance(found, dict):
        raise Ended
    return found
