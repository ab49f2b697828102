# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find the board that rank 0 serves: `connect`.

Without a store the address follows from what all ranks know: a Unix socket whose name is a hash of the user, the job
and how many groups the job has connected before, and beyond one host also TCP port `store_port` of MASTER_ADDR, for
holders of DRVFUSE_SECRET. Unix sockets have abstract names: nothing is left of them when a process is killed. Any
process may take such a name or connect to it, so both ends ask the kernel who the other one is, and refuse other users.

With a store rank 0 chooses an address and a secret of its own, and publishes them there; the store has no further part.

Groups that one job connects are counted, in each process and for each rank, and the count is part of the name: so
groups must be connected in the same order on all ranks. Only a group that all ranks have joined counts, so ranks may
try again after a failure.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from dataclasses import dataclass

from .. import config
from ..errors import ArgumentError, GroupMismatch, GroupTimeout
from . import handshake
from .board import Board, seconds_of
from .connection import AnotherGroup, Connection, greet
from .frames import Unpacker
from .host import is_local
from .place import Place
from .server import Server

JOINING = "join the group"
_SHORTEST_SECRET = 16
_joined: dict[tuple[object, int], int] = {}


@dataclass(frozen=True)
class Address:
    """Where the board of one group is served, and the secret of its ranks. `unix` is an abstract name."""

    group: str
    secret: bytes
    unix: str
    tcp: tuple[tuple[str, int], ...] = ()


def connect(place: Place, timeout: float = 60.0) -> Board:
    """Join the board of this job's next group. Every rank calls this; it returns when all have, within `timeout` s.

    Rank 0's process serves the board until every rank has closed its own. Raises, on all ranks that take part:
    ArgumentError before anything is opened, GroupTimeout naming the ranks that did not come, GroupMismatch where two
    processes came as one rank, the sizes differ or a secret is wrong, and RankEnded.
    """
    until = time.monotonic() + seconds_of("timeout", timeout)
    counted = (place.job, place.size), place.rank
    address = address_of(place, _joined.get(counted, 0))
    board = join(place, address, until, timeout)
    _joined[counted] = _joined.get(counted, 0) + 1
    return board


def address_of(place: Place, number: int) -> Address:
    """The address of group `number` of a job without a store. Raises ArgumentError if the job has none."""
    variables = dict(place.job)
    if not place.job and place.size > 1:
        raise ArgumentError(
            "environment variable MASTER_PORT",
            "not set",
            "a number that all ranks of this job have and no other job of this user, or `store` must be given: nothing "
            "else that the launcher has set tells its jobs apart",
        )
    secret = os.environ.get("DRVFUSE_SECRET", "").encode()
    if secret and len(secret) < _SHORTEST_SECRET:
        expected = f"at least {_SHORTEST_SECRET} characters that nobody can guess, the same on all ranks"
        raise ArgumentError("environment variable DRVFUSE_SECRET", f"of {len(secret)} characters", expected)
    if not secret and place.one_host is False:
        raise ArgumentError(
            "environment variable DRVFUSE_SECRET",
            "not set",
            f"the same secret of at least {_SHORTEST_SECRET} characters on all ranks of a job on several hosts, or "
            "`store` must be given",
        )
    identity = [os.getuid(), place.job, place.size, number] if place.size > 1 else [os.getuid(), os.urandom(16).hex()]
    group = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    tcp: tuple[tuple[str, int], ...] = ()
    if secret and not place.one_host and "MASTER_ADDR" in variables:
        tcp = ((variables["MASTER_ADDR"], config.get("store_port")),)
    elif place.one_host is False:
        raise ArgumentError("environment variable MASTER_ADDR", "not set", "the host of rank 0")
    return Address(group, secret, f"drvfuse-{os.getuid()}-{group}", tcp)


def join(place: Place, address: Address, until: float, timeout: float) -> Board:
    """The board at that address, when all ranks have joined it; `until` is a time of the monotonic clock."""
    server = _serve(place, address, until) if place.rank == 0 else None
    try:
        if server is not None:
            connected, served = socket.socketpair()
            server.adopt(served)
            frames = _greet(connected, place, address, until)
        else:
            connected, frames = _reach(place, address, until, timeout)
        board = Board(Connection(connected, frames, place.rank), 0, tuple(range(place.size)), timeout)
        try:
            board.gather(JOINING, b"", max(until - time.monotonic(), 0.001))
        except BaseException:
            board.close()
            raise
    except BaseException:
        if server is not None:
            server.stop()
        raise
    return board


def _serve(place: Place, address: Address, until: float) -> Server:
    listeners: list[socket.socket] = []
    backlog = max(place.size, 128)
    try:
        listeners.append(_listen_here(address.unix, backlog))
        listeners += [_listen_to_all(host, port, backlog, until) for host, port in address.tcp]
        return Server(address.group, place.size, address.secret, listeners)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _listen_here(name: str, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        both = f"{_holder(name)} and process {os.getpid()} both came as rank 0 of one job"
        raise GroupMismatch("the process of a rank", {0: both}) from None
    listener.listen(backlog)
    return listener


def _holder(name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        probe.connect(f"\0{name}")
        if known := handshake.credentials(probe):
            return f"process {known[0]} of user {known[1]}"
    return "another process"


def _listen_to_all(host: str, port: int, backlog: int, until: float) -> socket.socket:
    """Listen at that address, or at all addresses of this host if that one is not the host's own (behind a NAT)."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not is_local(host):
        where = ("", port)
    while True:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(backlog)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > until - 0.1:
                text = f"port {port} of this host, which rank 0 was to listen at, cannot be had ({error.strerror})"
                expected = "a port that is free on the host of rank 0"
                raise ArgumentError("environment variable DRVFUSE_STORE_PORT", text, expected) from None
        time.sleep(0.05)  # another group of this job may be connecting


def _greet(connected: socket.socket, place: Place, address: Address, until: float) -> Unpacker:
    try:
        seconds = max(until - time.monotonic(), 0.001)
        return greet(connected, address.group, place.rank, place.size, address.secret, seconds)
    except BaseException:
        connected.close()
        raise


def _reach(place: Place, address: Address, until: float, timeout: float) -> tuple[socket.socket, Unpacker]:
    """A connection to rank 0, tried again until it listens."""
    pause, states = 0.01, {}
    targets: list[tuple[str, int] | str] = [address.unix, *address.tcp]
    while True:
        for target in targets:
            try:
                connected = _open(target, until)
                if not handshake.same_user(connected):
                    states[target] = f"a process of another user listens {_words(target)}"
                    connected.close()
                    continue
                return connected, _greet(connected, place, address, until)
            except AnotherGroup:
                states[target] = f"another group or job listens {_words(target)}"
            except OSError as error:
                reason = "nobody listens" if error.errno == errno.ECONNREFUSED else f"no answer ({error})"
                states[target] = f"{reason} {_words(target)}"
        left = until - time.monotonic()
        if left <= 0:
            hint = "" if place.one_host is not None or address.tcp else _HINT
            found = ", ".join(states.values()) + hint
            waiting = {0: found, place.rank: f"{JOINING}, which rank 0 serves"}
            raise GroupTimeout(JOINING, [0], waiting, timeout)
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.2)


_HINT = "; ranks on other hosts need MASTER_ADDR, MASTER_PORT and DRVFUSE_SECRET, or `store`"


def _open(target: tuple[str, int] | str, until: float) -> socket.socket:
    seconds = min(max(until - time.monotonic(), 0.001), 5.0)
    if isinstance(target, tuple):
        return socket.create_connection(target, seconds)
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(seconds)
        connected.connect(f"\0{target}")
    except BaseException:
        connected.close()
        raise
    return connected


def _words(target: tuple[str, int] | str) -> str:
    return f"at {target[0]} port {target[1]}" if isinstance(target, tuple) else "on this host"
