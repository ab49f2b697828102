# SPDX-License-Identifier: Apache-2.0
"""The exchange of file descriptors between ranks in processes of one host: `share`.

Every rank listens at a socket with a random name, gathers the names and random tokens of all ranks over the board,
sends its descriptors to each peer by SCM_RIGHTS, and accepts those of its peers after all ranks have voted that theirs
are sent. A Unix socket takes a connection and a message before anybody accepts it, so no rank waits for another between
the votes. The kernel tells which user is at the other end; descriptors of another user, or without the token, are
closed.

Ownership. The caller keeps the descriptors that it gives: the kernel makes new ones for the receivers, so the caller
may close them as soon as `share` has returned or raised. The caller also owns the descriptors that `share` returns, and
closes them; they do not survive exec. If `share` raises, it closes every descriptor that this rank has received.

`pidfd_getfd` is not used: containers and Yama forbid it where SCM_RIGHTS works.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import ArgumentError, GroupError, GroupMismatch, kind_of, require_integer
from . import handshake
from .board import Board, seconds_of
from .host import host_identity

MOST = 253
"""The most descriptors that one rank can give to another in one call, which is the kernel's limit for a message."""

_MESSAGE = struct.Struct("!16sII")  # the receiver's token, the sender's rank, how many descriptors
_ACCEPT_SECONDS = 5.0


def share(
    board: Board,
    given: Sequence[int] | Mapping[int, Sequence[int]],
    what: str = "pass descriptors",
    timeout: float | None = None,
) -> dict[int, list[int]]:
    """Send descriptors to the other ranks of `board`, and receive theirs. Collective; all ranks must be on one host.

    `given` is a sequence of descriptors, all of which every other rank gets, or a mapping from the number of a rank on
    the board to the descriptors for that rank. Returns the descriptors of each other rank, in the order in which that
    rank gave them.

    It succeeds on all ranks or raises on all: ArgumentError on a rank whose argument is wrong and GroupMismatch if the
    ranks are on different hosts, both before anything is sent; GroupError with the failure of the lowest rank,
    GroupTimeout, RankEnded. If a rank ends during the last vote, some ranks may return while others raise.
    """
    until = time.monotonic() + (board.timeout if timeout is None else seconds_of("timeout", timeout))

    def seconds_left() -> float:
        return max(until - time.monotonic(), 0.001)

    gifts: dict[int, list[int]] = {}
    wrong: ArgumentError | None = None
    failure: str | None = None
    try:
        gifts = _gifts(board, given)
    except ArgumentError as error:
        wrong, failure = error, str(error)
    with contextlib.ExitStack() as undo:
        name, token = "", secrets.token_bytes(16)
        try:
            listener, name = _listener()
            undo.enter_context(listener)
        except OSError as error:
            failure = failure or f"no socket to receive at: {error.strerror or error}"
        card = {"host": host_identity(), "name": name, "token": token.hex(), "failure": failure}
        cards = [json.loads(text) for text in board.gather(what, json.dumps(card).encode(), seconds_left())]
        _all_can(what, cards, wrong)
        sent: list[socket.socket] = undo.enter_context(contextlib.closing(_Sockets()))
        try:
            for peer in range(board.size):
                if peer != board.rank:
                    address, theirs = f"\0{cards[peer]['name']}", bytes.fromhex(cards[peer]["token"])
                    sent.append(_send(address, theirs, board.rank, gifts.get(peer, [])))
        except OSError as error:
            failure = f"its descriptors for rank {peer} were not sent: {error.strerror or error}"
        board.vote(what, failure, seconds_left())
        received: dict[int, list[int]] = {}
        undo.callback(_close, received.values())
        try:
            _receive(listener, token, board, received, min(until, time.monotonic() + _ACCEPT_SECONDS))
        except OSError as error:
            failure = f"descriptors were not received: {error.strerror or error}"
        board.vote(what, failure, seconds_left())
        result = dict(received)
        received.clear()
        return result
    raise AssertionError("unreachable: every path of the block returns or raises")


class _Sockets(list[socket.socket]):
    """Sockets that are closed together."""

    def close(self) -> None:
        for one in self:
            one.close()


def _listener() -> tuple[socket.socket, str]:
    """A listening socket, and its random name, which other users cannot guess."""
    listener, name = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), f"drvfuse-fd-{secrets.token_hex(16)}"
    try:
        listener.bind(f"\0{name}")
        listener.listen(128)
        return listener, name
    except BaseException:
        listener.close()
        raise


def _gifts(board: Board, given: object) -> dict[int, list[int]]:
    peers = [rank for rank in range(board.size) if rank != board.rank]
    if isinstance(given, Mapping):
        gifts = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        gifts = dict.fromkeys(peers, given)
    else:
        expected = "a sequence of descriptors, or a mapping from ranks to such sequences"
        raise ArgumentError("given", kind_of(given), expected)
    for rank, descriptors in gifts.items():
        if rank not in peers:
            raise ArgumentError("given", f"for rank {rank!r}", f"for other ranks of the board, 0 to {board.size - 1}")
        if not isinstance(descriptors, Sequence) or isinstance(descriptors, str | bytes):
            raise ArgumentError(f"given[{rank}]", kind_of(descriptors), "a sequence of descriptors")
        if len(descriptors) > MOST:
            raise ArgumentError(f"given[{rank}]", f"{len(descriptors)} descriptors", f"at most {MOST}")
        for descriptor in descriptors:
            number = require_integer(f"given[{rank}]", descriptor, "open file descriptors", 0)
            try:
                os.fstat(number)
            except OSError:
                raise ArgumentError(
                    f"given[{rank}]", f"{number}, which is not an open descriptor", "open descriptors"
                ) from None
    return {rank: list(descriptors) for rank, descriptors in gifts.items()}


def _all_can(what: str, cards: list[dict[str, str]], wrong: ArgumentError | None) -> None:
    """Raise on every rank if the argument of one rank is wrong, or if the ranks are on different hosts."""
    if wrong is not None:
        raise wrong
    for rank, card in enumerate(cards):
        if card["failure"] is not None:
            raise GroupError(what, rank, card["failure"])
    if len({card["host"] for card in cards}) > 1:
        hosts = {rank: card["host"] for rank, card in enumerate(cards)}
        raise GroupMismatch("the host (boot id, network namespace), and descriptors pass only within a host", hosts)


def _send(address: str, token: bytes, rank: int, descriptors: list[int]) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(_ACCEPT_SECONDS)
        connected.connect(address)
        if not handshake.same_user(connected):
            raise OSError("a process of another user listens at that rank's socket")
        message = _MESSAGE.pack(token, rank, len(descriptors))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        connected.sendmsg([message], rights)
        return connected
    except BaseException:
        connected.close()
        raise


def _receive(listener: socket.socket, token: bytes, board: Board, received: dict[int, list[int]], until: float) -> None:
    """Fill `received` with the descriptors that every peer has sent. Raises OSError, also if some are missing."""
    while len(received) < board.size - 1:
        listener.settimeout(max(until - time.monotonic(), 0.001))
        connected, _ = listener.accept()
        with connected:
            if not handshake.same_user(connected):
                continue
            connected.settimeout(max(until - time.monotonic(), 0.001))
            space = socket.CMSG_SPACE(MOST * array("i").itemsize)
            message, rights, flags, _ = connected.recvmsg(_MESSAGE.size, space, socket.MSG_CMSG_CLOEXEC)
        found = array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
        theirs, rank, count = _MESSAGE.unpack(message) if len(message) == _MESSAGE.size else (b"", 0, 0)
        stranger = not hmac.compare_digest(theirs, token) or rank >= board.size or rank in (board.rank, *received)
        if stranger or count != len(found):
            _close([found])
            if not stranger:
                lost = f"{count - len(found)} of the {count} descriptors of rank {rank} were lost"
                full = "this process has reached its limit of open files (ulimit -n)"
                raise OSError(f"{lost}: {full}" if flags & socket.MSG_CTRUNC else lost)
            continue
        received[rank] = list(found)


@contextlib.contextmanager
def closing(*received: Iterable[int]) -> Iterator[None]:
    """Close the received descriptors at the end of the block."""
    try:
        yield
    finally:
        _close(received)


def _close(received: Iterable[Iterable[int]]) -> None:
    for descriptors in received:
        for descriptor in descriptors:
            os.close(descriptor)
