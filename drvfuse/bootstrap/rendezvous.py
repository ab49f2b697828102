# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find the board that rank 0 serves: `meet`.

Without a store all ranks compute the address: a Unix socket whose name is a hash of the user, the job, and the number
of groups that the job has connected before. For a job on several hosts the board is also at TCP port `store_port` of
MASTER_ADDR, for ranks that know DRVFUSE_SECRET. Each process counts the groups that its rank has connected, so all
ranks must connect groups in the same order. A group that not all ranks have joined is not counted, so ranks may try
again after a failure.

With a store, rank 0 chooses an address and a secret, and writes a notice with both to the store (`stores`). The other
ranks read the notice again and again until they reach the board of their group, since the store may still have the
notice of an earlier group that has failed. When all ranks have joined, rank 0 removes the notice before any rank
proceeds, so that no rank takes it for the notice of the next group. The store is not used after that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from .. import config
from ..errors import ArgumentError, GroupError, GroupTimeout, counted, shown
from . import address, handshake
from .address import Address, Target
from .board import Board, seconds_of
from .connection import AnotherGroup, Connection, greet
from .frames import Unpacker
from .host import host_identity
from .place import Place, find_place
from .server import Server
from .stores import Notices, NotThere, notice_board
from .waits import piece

JOINING = "join the group"
_SHORTEST_SECRET = 16
_READ_SECONDS = 10.0
_HINT = "; ranks on other hosts need MASTER_ADDR, MASTER_PORT and DRVFUSE_SECRET, or `store`"
_joined: dict[tuple[object, int], int] = {}


def meet(
    rank: int | None = None, size: int | None = None, store: object = None, timeout: float = 60.0
) -> tuple[Place, Board]:
    """Connect all ranks. Returns the place of this process, and the board of the job's next group.

    `rank` and `size` are the arguments of `find_place`; if `store` is a communicator, they come from it. `timeout` is
    in seconds. Rank 0's process serves the board until every rank has closed all of its boards.

    Raises ArgumentError before anything is opened. On all ranks that take part it raises GroupTimeout, which names the
    ranks that did not connect, GroupMismatch if two processes have the same rank, if sizes differ or if a secret is
    wrong, and GroupError, of which RankEnded is one.
    """
    notices = None if store is None else notice_board(store)
    if notices is not None and notices.place is not None:
        for name, given, known in zip(("rank", "size"), (rank, size), notices.place, strict=True):
            if given is not None and given != known:
                raise ArgumentError(name, shown(given), f"{known} or None, as `store` has {name} {known}")
        rank, size = notices.place
    place = find_place(rank, size)
    return place, connect(place, timeout, notices)


def connect(place: Place, timeout: float = 60.0, notices: Notices | None = None) -> Board:
    """Connect to the next group of the job that `place` describes, as `meet` does. Returns the board of the group."""
    until = time.monotonic() + seconds_of("timeout", timeout)
    if notices is not None:
        if place.rank == 0:
            return _serve(place, *_fresh(place), until, timeout, notices)
        return _come(place, lambda seconds: _noticed(notices, seconds), until, timeout, notices)
    counted = (place.job, place.size), place.rank
    known = address_of(place, _joined.get(counted, 0))
    board = join(place, known, until, timeout)
    _joined[counted] = _joined.get(counted, 0) + 1
    return board


def address_of(place: Place, number: int) -> Address:
    """The address of a group if no store is given; the job has connected `number` groups before. Raises ArgumentError
    if the launcher's variables do not determine an address."""
    if not place.job and place.size > 1:
        raise ArgumentError(
            "environment variable MASTER_PORT",
            "not set",
            "a number that all ranks of this job share and that no other job of this user has, since the launcher has "
            "set nothing else that distinguishes its jobs; or pass `store`",
        )
    secret = os.environ.get("DRVFUSE_SECRET", "").encode()
    if secret and len(secret) < _SHORTEST_SECRET:
        expected = f"at least {_SHORTEST_SECRET} characters that nobody can guess, the same on all ranks"
        raise ArgumentError("environment variable DRVFUSE_SECRET", f"of {counted(len(secret), 'character')}", expected)
    master = dict(place.job).get("MASTER_ADDR")
    if place.one_host is False:
        if not secret:
            expected = (
                f"the same secret of at least {_SHORTEST_SECRET} characters on all ranks of a job on several hosts, or "
                "`store` must be given"
            )
            raise ArgumentError("environment variable DRVFUSE_SECRET", "not set", expected)
        if master is None:
            raise ArgumentError("environment variable MASTER_ADDR", "not set", "the host of rank 0")
    identity = [os.getuid(), place.job, place.size, number] if place.size > 1 else secrets.token_hex(16)
    group = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    tcp = ((master, config.get("store_port")),) if secret and master and not place.one_host else ()
    return Address(group, secret, f"drvfuse-{os.getuid()}-{group}", tcp)


def join(place: Place, known: Address, until: float, timeout: float) -> Board:
    """Join the board at an address that all ranks know, before `until`, a time of the monotonic clock."""
    if place.rank:
        return _come(place, lambda seconds: known, until, timeout, None)
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(address.listen_here(known.unix))]
        listeners += [undo.enter_context(address.listen_at(host, port, until)) for host, port in known.tcp]
        undo.pop_all()
    return _serve(place, known, listeners, until, timeout, None)


def _fresh(place: Place) -> tuple[Address, list[socket.socket]]:
    """An unused address, and sockets that listen there."""
    token = secrets.token_hex(16)
    made = Address(token, secrets.token_bytes(32), f"drvfuse-{os.getuid()}-{token}", host=host_identity())
    listeners = [address.listen_here(made.unix)]
    if not place.one_host:
        listener, tcp = address.listen_anywhere()
        listeners, made = [*listeners, listener], replace(made, tcp=tcp)
    return made, listeners


def _noticed(notices: Notices, seconds: float) -> Address:
    try:
        return address.of_notice(notices.read(seconds))
    except ValueError as error:
        raise NotThere(f"the value in the store is no address that drvfuse has written ({error})") from None


def _serve(
    place: Place,
    own: Address,
    listeners: list[socket.socket],
    until: float,
    timeout: float,
    notices: Notices | None,
) -> Board:
    server = Server(own.group, place.size, own.secret, listeners)
    try:
        if notices is not None:
            try:
                notices.put_up(own.to_notice(), place.size)
            except Exception as error:  # each store has its own exceptions
                raise GroupError("use the store", 0, f"set raised {type(error).__name__}: {error}") from error
        connected, served = socket.socketpair()
        server.adopt(served)
        return _all_join(connected, _greet(connected, place, own, until), place, own, until, timeout, notices)
    except BaseException:
        server.stop()
        raise


def _come(
    place: Place, read: Callable[[float], Address], until: float, timeout: float, notices: Notices | None
) -> Board:
    known, connected, frames = _reach(place, read, until, timeout)
    return _all_join(connected, frames, place, known, until, timeout, notices)


def _all_join(
    connected: socket.socket,
    frames: Unpacker,
    place: Place,
    known: Address,
    until: float,
    timeout: float,
    notices: Notices | None,
) -> Board:
    board = Board(Connection(connected, frames, place.rank), 0, tuple(range(place.size)), timeout)
    try:
        board.gather(JOINING, b"", max(until - time.monotonic(), 0.001))
        if notices is not None:
            failure = None
            if board.rank == 0:
                try:
                    notices.take_down(known.to_notice())
                except Exception as error:
                    failure = error.failure if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"
            board.vote("use the store", failure)
        return board
    except BaseException:
        board.close()
        raise


def _greet(connected: socket.socket, place: Place, known: Address, until: float) -> Unpacker:
    try:
        seconds = max(piece(until), 0.001)
        return greet(connected, known.group, place.rank, place.size, known.secret, seconds)
    except BaseException:
        connected.close()
        raise


def _reach(
    place: Place, read: Callable[[float], Address], until: float, timeout: float
) -> tuple[Address, socket.socket, Unpacker]:
    """A connection to rank 0. Attempts are repeated until rank 0 listens."""
    states: dict[Target, str] = {}
    known: Address | None = None
    pause, trouble = 0.01, ""
    while True:
        remaining = until - time.monotonic()
        try:
            known, trouble = read(max(min(remaining, _READ_SECONDS if known is None else 0.0), 0.0)), ""
        except NotThere as error:
            trouble = str(error)
        for target in known.targets if known else ():
            try:
                connected = address.open_connection(target, until)
                if handshake.same_user(connected):
                    assert known is not None
                    return known, connected, _greet(connected, place, known, until)
                connected.close()
                states[target] = f"a process of another user listens {address.in_words(target)}"
            except AnotherGroup:
                states[target] = f"another group or job listens {address.in_words(target)}"
            except OSError as error:
                reason = "nobody listens" if error.errno == errno.ECONNREFUSED else f"no answer ({error})"
                states[target] = f"{reason} {address.in_words(target)}"
        if remaining <= 0:
            found = ", ".join(filter(None, (*(states[target] for target in (known.targets if known else ())), trouble)))
            hint = _HINT if known and not known.host and place.one_host is None and not known.tcp else ""
            waiting = {0: (found or "no address of it can be reached from here") + hint}
            raise GroupTimeout(JOINING, [0], {**waiting, place.rank: f"{JOINING}, whose board rank 0 serves"}, timeout)
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, 0.2)
