# SPDX-License-Identifier: Apache-2.0
"""The server of a board: one thread in rank 0's process, which owns all sockets. `meetings` makes its decisions.

The thread ends when every rank's connection is closed, or by `stop`. Until then it listens on the Unix socket, so that
a second process with the same rank gets an error; a TCP port is closed as soon as all ranks have connected. A
connection that does not complete the handshake within a few seconds is dropped. Before the handshake is complete, a
connection may send few bytes, and of too many such connections the oldest is dropped. If a connection names a rank but
has the wrong secret, the time-out error of that rank mentions it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from . import handshake
from .frames import LARGEST_VALUE, NOT_A_MESSAGE, Malformed, Unpacker, pack
from .meetings import Meetings, Request, is_choice
from .waits import MOST_SECONDS, piece

_log = logging.getLogger("drvfuse.bootstrap")
_HANDSHAKE_SECONDS = 10.0
_MOST_STRANGERS = 64
_live: weakref.WeakSet[Server] = weakref.WeakSet()


class _Client:
    """One connection to the server. `rank` is -1 until the handshake is complete."""

    def __init__(self, connected: socket.socket, where: str) -> None:
        connected.setblocking(False)
        handshake.notice_loss(connected)
        self.socket, self.where, self.rank = connected, where, -1
        self.frames, self.out = Unpacker(), bytearray()
        self.nonce, self.until = handshake.nonce(), time.monotonic() + _HANDSHAKE_SECONDS
        self.closing = False


class Server:
    """Serves a board of `size` ranks. A rank is refused unless it names the group `group` and knows `secret`.

    `listeners` are listening sockets, which the server closes. The server's thread is a daemon.
    """

    def __init__(self, group: str, size: int, secret: bytes = b"", listeners: Iterable[socket.socket] = ()) -> None:
        self._group, self._size, self._secret = group, size, secret
        self._listeners = list(listeners)
        self._meetings = Meetings(size, self._send)
        self._clients: set[_Client] = set()
        self._ranks: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._adopted: list[socket.socket] = []
        self._stopping = False
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        _live.add(self)
        self._thread = threading.Thread(target=self._run, name="drvfuse board", daemon=True)
        self._thread.start()

    def adopt(self, connected: socket.socket) -> None:
        """Serve a rank of this process, over the socket `connected`, which the server owns from now on."""
        self._adopted.append(connected)
        self._wake.send(b"a")

    def stop(self) -> None:
        """Close all sockets and end the thread; a second call does nothing."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake.send(b"s")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: close its copies of the sockets, so that the other ends see when the parent has ended."""
        for own in (*self._listeners, *(client.socket for client in self._clients), self._wake, self._woken):
            own.close()
        self._selector.close()

    def _run(self) -> None:
        served = False
        try:
            while not self._stopping and (self._clients or self._adopted or not served):
                deadlines = [client.until for client in self._clients if client.rank < 0]
                if (due := self._meetings.next_deadline()) is not None:
                    deadlines.append(due)
                wait = piece(min(deadlines)) if deadlines else None
                for key, events in self._selector.select(wait):
                    self._ready(key.fileobj, key.data, events)
                while self._adopted:
                    self._admit(self._adopted.pop(0), "this process")
                self._expire()
                served = served or bool(self._ranks)
        except Exception as error:
            _log.exception("the thread that serves a board failed")
            self._fail(f"the thread that serves the board failed with {type(error).__name__}: {error}")
        finally:
            for client in list(self._clients):
                self._flush(client)
                client.socket.close()
            for own in (*self._listeners, self._wake, self._woken, *self._adopted):
                own.close()
            self._selector.close()

    def _fail(self, failure: str) -> None:
        """Send every rank the reason why the thread ends, with which all of their waits end."""
        for client in list(self._ranks.values()):
            with contextlib.suppress(Exception):
                self._write(client, {"failed": failure})

    def _ready(self, ready: Any, client: _Client | None, events: int) -> None:
        if client is not None:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and client in self._clients:
                self._receive(client)
        elif ready is self._woken:
            self._woken.recv(64)
        elif ready in self._listeners:
            try:
                connected, address = ready.accept()
            except OSError:  # the client has gone, or no descriptor is free: a retry now would fail too
                return time.sleep(0.01)
            known = handshake.credentials(connected)
            where = f"process {known[0]}" if known else f"{address[0]}"
            if handshake.same_user(connected):
                self._make_room()
                self._admit(connected, where)
            else:
                _log.debug("a connection from %s was refused: it is of another user", where)
                connected.close()
        return None

    def _make_room(self) -> None:
        """Drop the oldest of the connections without a completed handshake if there are too many: a rank needs
        milliseconds for it, so that one is most likely no rank. (If new ones were refused, silent ones could keep the
        ranks away.)"""
        strangers = [client for client in self._clients if client.rank < 0]
        if len(strangers) >= _MOST_STRANGERS:
            self._drop(min(strangers, key=lambda client: client.until), "")

    def _admit(self, connected: socket.socket, where: str) -> None:
        client = _Client(connected, where)
        self._clients.add(client)
        self._selector.register(connected, selectors.EVENT_READ, client)
        self._write(client, {"nonce": client.nonce})

    def _expire(self) -> None:
        now = time.monotonic()
        self._meetings.expire(now)
        for client in [client for client in self._clients if client.rank < 0 and client.until <= now]:
            self._drop(client, "")

    def _receive(self, client: _Client) -> None:
        try:
            received = client.socket.recv(1 << 16)
            if not received:
                self._drop(client, handshake.PROCESS_ENDED)
            for message, data in client.frames.feed(received):
                if client not in self._clients:
                    break
                if client.rank < 0:
                    self._greet(client, message)
                else:
                    self._obey(client, message, data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(client, handshake.loss(error))
        except (Malformed, *NOT_A_MESSAGE) as error:
            _log.debug("a malformed message from %s: %r", client.where, error)
            self._drop(client, "it sent bytes that are no message of a board")

    def _greet(self, client: _Client, hello: dict[str, Any]) -> None:
        rank, size, theirs = int(hello["rank"]), int(hello["size"]), str(hello["nonce"])
        if hello["version"] != handshake.VERSION:
            return self._refuse(client, refused="version", version=handshake.VERSION)
        if hello["group"] != self._group:
            return self._refuse(client, refused="another group")
        names = theirs, self._group, rank, size
        if not handshake.is_proof(hello["proof"], handshake.proof(self._secret, "rank", client.nonce, *names)):
            self._meetings.suspect(rank, f"someone at {client.where} tried to with a wrong secret")
            return self._refuse(client, refused="secret")
        who = f"process {int(hello['pid'])}"
        problem: tuple[str, dict[int, str]] | None = None
        if size != self._size:
            problem = "the number of ranks", {0: str(self._size), rank: str(size)}
        elif not 0 <= rank < size:
            problem = "which ranks there are", {rank: f"not one of 0 to {size - 1}"}
        elif (before := self._meetings.connected(rank, who)) is not None:
            problem = f"which process is rank {rank}", {rank: f"{before} and {who} both connected as this rank"}
        if problem is not None:
            if not self._meetings.complete:
                self._meetings.refuse(*problem)
            return self._refuse(client, refused="mismatch", what=problem[0], values=list(problem[1].items()))
        client.rank = rank
        client.frames.trust(1)
        self._ranks[rank] = client
        self._write(client, {"proof": handshake.proof(self._secret, "server", client.nonce, *names)})
        if self._meetings.complete:
            self._release_ports()
        return None

    def _refuse(self, client: _Client, **reason: Any) -> None:
        client.closing = True
        self._write(client, reason)

    def _release_ports(self) -> None:
        for listener in [one for one in self._listeners if one.family != socket.AF_UNIX]:
            self._listeners.remove(listener)
            self._selector.unregister(listener)
            listener.close()

    def _obey(self, client: _Client, message: dict[str, Any], data: bytes) -> None:
        board, number = int(message["board"]), int(message["number"])
        match message["do"]:
            case "gather" | "split" as kind:
                if len(data) > LARGEST_VALUE:
                    raise Malformed(kind)
                seconds = float(message["seconds"])
                if not 0 < seconds < MOST_SECONDS or (kind == "split" and not is_choice(data)):
                    raise Malformed(kind)
                deadline = time.monotonic() + seconds
                request = Request(number, kind, str(message["what"]), data, seconds, deadline)
                self._meetings.ask(client.rank, board, request)
            case "withdraw":
                self._meetings.withdraw(client.rank, board, number)
            case "leave":
                self._meetings.leave(client.rank, board, str(message["how"]))
            case other:
                raise Malformed(other)

    def _send(self, rank: int, message: dict[str, Any], data: bytes) -> None:
        if (client := self._ranks.get(rank)) is not None:
            self._write(client, message, data)

    def _write(self, client: _Client, message: dict[str, Any], data: bytes = b"") -> None:
        client.out += pack(message, data)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        """Send as many bytes as the socket takes; the rest is sent when the socket is ready. Errors appear at a later
        read."""
        with contextlib.suppress(OSError):
            while client.out:
                del client.out[: client.socket.send(client.out)]
        if client in self._clients:
            if client.closing and not client.out:
                return self._drop(client, "")
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
            self._selector.modify(client.socket, wanted, client)
        return None

    def _drop(self, client: _Client, how: str) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.rank >= 0:
            del self._ranks[client.rank]
            self._meetings.end(client.rank, how)


def _in_child() -> None:
    for server in list(_live):
        server.abandon()


os.register_at_fork(after_in_child=_in_child)
