# SPDX-License-Identifier: Apache-2.0
"""A rank's end of its connection to the server of a board. Boards that are split from that board share the connection.

A daemon thread reads. It wakes the threads that wait for an answer, and enters ranks that have ended into the
dictionaries `Board.ended`. Every wait is bounded: if the server does not answer within `_GRACE` seconds after the
time-out, or does not read what is sent to it, the error says that rank 0 does not answer. If this thread or that of the
server fails, every wait ends at once with that failure.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import struct
import threading
import time
import weakref
from typing import Any

from ..errors import ClosedError, GroupError, GroupMismatch, GroupTimeout, RankEnded
from . import handshake
from .frames import NOT_A_MESSAGE, Malformed, Unpacker, pack
from .waits import piece

_log = logging.getLogger("drvfuse.bootstrap")
_GRACE = 5.0
_TIMEVAL = struct.Struct("ll")
_live: weakref.WeakSet[Connection] = weakref.WeakSet()


class AnotherGroup(Exception):
    """The server at the address serves another group."""


def greet(connected: socket.socket, group: str, rank: int, size: int, secret: bytes, seconds: float) -> Unpacker:
    """Do the handshake of a rank (`handshake`), in which both ends prove that they know `secret`.

    The caller keeps the socket. Returns the bytes that arrived after the handshake. Raises AnotherGroup; GroupMismatch
    if the secrets, versions or sizes differ, or if the rank is connected already; OSError if the server has ended or
    does not answer within `seconds`.
    """
    connected.settimeout(seconds)
    handshake.notice_loss(connected)
    frames = Unpacker()

    def received() -> dict[str, Any]:
        piece = b""
        while True:
            for message, _ in frames.feed(piece):
                return message
            if not (piece := connected.recv(4096)):
                raise ConnectionResetError("the server closed the connection")

    try:
        theirs, own = str(received()["nonce"]), handshake.nonce()
        names = own, group, rank, size
        hello = {"version": handshake.VERSION, "group": group, "rank": rank, "size": size, "pid": os.getpid()}
        shown = handshake.proof(secret, "rank", theirs, *names)
        connected.sendall(pack({**hello, "nonce": own, "proof": shown}))
        answer = received()
        match answer.get("refused"):
            case None:
                if not handshake.is_proof(answer["proof"], handshake.proof(secret, "server", theirs, *names)):
                    raise _wrong_secret(rank)
            case "another group":
                raise AnotherGroup
            case "secret":
                raise _wrong_secret(rank)
            case "version":
                values = {0: str(answer["version"]), rank: str(handshake.VERSION)}
                raise GroupMismatch("the version of the board's protocol", values)
            case _:
                raise GroupMismatch(str(answer["what"]), {int(place): str(text) for place, text in answer["values"]})
    except (Malformed, *NOT_A_MESSAGE) as error:
        raise ConnectionError(f"the program at this address is no board of drvfuse ({error!r})") from None
    frames.trust(size)
    return frames


def _wrong_secret(rank: int) -> GroupMismatch:
    return GroupMismatch("DRVFUSE_SECRET", {0: "one secret", rank: "another one"})


class Connection:
    """Sends requests of boards, and receives the answers, over a socket whose handshake is done. It owns the socket."""

    def __init__(self, connected: socket.socket, frames: Unpacker, rank: int) -> None:
        self.rank = rank
        self._socket, self._frames = connected, frames
        self._members: dict[int, tuple[int, ...]] = {}
        self._ended: dict[int, dict[int, str]] = {}
        self._answers: dict[int, tuple[dict[str, Any], bytes] | None] = {}
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._numbers = 0
        self._lost = self._failure = self._broken = ""
        self.pid = os.getpid()
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(_GRACE), 0))
        _live.add(self)
        threading.Thread(target=self._read, name=f"drvfuse board, rank {rank}", daemon=True).start()

    def open(self, board: int, members: tuple[int, ...]) -> dict[int, str]:
        """Begin to use board number `board`. Returns the dictionary of its ended ranks, which the reading thread
        fills."""
        with self._news:
            self._members[board] = members
            return self._ended.setdefault(board, {})

    def ask(self, board: int, kind: str, what: str, value: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Request a step of a board and wait for the answer. If the wait is interrupted, the request is withdrawn."""
        with self._news:
            self._numbers += 1
            number = self._numbers
            self._answers[number] = None
        request = {"do": kind, "board": board, "number": number, "what": what, "seconds": seconds}
        try:
            self._send(request, value)
            return self._answer(board, number, what, seconds)
        except BaseException:
            self._send({"do": "withdraw", "board": board, "number": number})
            raise
        finally:
            with self._news:
                del self._answers[number]

    def leave(self, board: int, how: str) -> None:
        """Take no further step on board number `board`. When the last board is left, the connection is closed. Does
        nothing in a forked child.
        """
        if self.pid != os.getpid():
            # At the fork a thread of the parent may have held a lock, which then stays locked in the child for ever.
            return
        with self._news:
            if self._members.pop(board, None) is None:
                return
            last = not self._members
        self._send({"do": "leave", "board": board, "number": 0, "how": how})
        if last:
            # Only sending ends here: the server reads what was sent and closes its end, and then the reading thread
            # closes this end.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def leave_all(self, how: str) -> None:
        """Leave all boards: call `leave` for each of them."""
        for board in list(self._members):
            self.leave(board, how)

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket, so that the server sees when the parent has ended."""
        self._socket.close()

    def sever(self) -> None:
        """Close the connection without a message, as the operating system does when a process is killed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: dict[str, Any], value: bytes = b"") -> None:
        with self._sending:
            try:
                self._socket.sendall(pack(message, value))
            except OSError as error:
                self._failure = handshake.loss(error)
                # Close, since a part of the frame may have been sent. The reading thread then wakes all that wait.
                self.sever()

    def _answer(self, board: int, number: int, what: str, seconds: float) -> tuple[dict[str, Any], bytes]:
        until = time.monotonic() + seconds + _GRACE
        with self._news:
            while (answer := self._answers[number]) is None:
                if self._lost:
                    raise self._server_ended(board, what)
                remaining = piece(until)
                if not remaining:
                    members = self._members.get(board, (self.rank,))
                    silent = "its process, which serves the board, does not answer"
                    missing = [members.index(0)] if 0 in members else []
                    waiting = {**dict.fromkeys(missing, silent), members.index(self.rank): what}
                    raise GroupTimeout(what, missing, waiting, seconds)
                self._news.wait(remaining)
            return answer

    def _server_ended(self, board: int, what: str) -> GroupError | ClosedError:
        members = self._members.get(board)
        if members is None:
            return ClosedError("the board was closed")
        if self._broken:
            return GroupError(what, None, self._broken)
        for rank, how in self._ended[board].items():  # the rank that ended first
            return RankEnded(what, rank, how)
        return RankEnded(what, None, f"rank 0 of the first group, which serves the boards: {self._lost}")

    def _read(self) -> None:
        lost = handshake.PROCESS_ENDED
        try:
            received = b""
            while True:
                for message, data in self._frames.feed(received):
                    self._take(message, data)
                if not (received := self._socket.recv(1 << 16)):
                    break
        except OSError as error:
            lost = handshake.loss(error)
        except (Malformed, *NOT_A_MESSAGE):
            lost = "its process sent bytes that are no message of a board"
        except Exception as error:
            _log.exception("the thread that reads from a board failed")
            self._broken = f"the thread that reads from the board failed with {type(error).__name__}: {error}"
        with self._news:
            self._lost = self._broken or self._failure or lost
            # Rank 0 of the first board counts as ended on every board, since its process was the server.
            for board, members in self._members.items():
                if 0 in members:
                    self._ended[board].setdefault(members.index(0), self._lost)
            self._news.notify_all()
        self._socket.close()

    def _take(self, message: dict[str, Any], data: bytes) -> None:
        with self._news:
            if "failed" in message:
                self._broken = str(message["failed"])
            elif "ended" in message:
                board, rank, how = message["ended"]
                self._ended.setdefault(board, {})[rank] = how
            elif message["answer"] in self._answers:  # otherwise the thread that waited for this answer was interrupted
                self._answers[message["answer"]] = message, data
                self._news.notify_all()


def _at_exit() -> None:
    for connection in list(_live):
        connection.leave_all("its interpreter has ended")


def _in_child() -> None:
    for connection in list(_live):
        connection.abandon()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
