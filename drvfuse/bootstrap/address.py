# SPDX-License-Identifier: Apache-2.0
"""The address at which the board of a group is served, how rank 0 listens there, and how other ranks connect to it.

Unix sockets have abstract names, which vanish when a process is killed. Any process may listen at such a name or
connect to it, so both ends ask the kernel for the user at the other end, and close the connection if it is another
user.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field

from ..errors import ArgumentError, GroupMismatch, shown
from . import handshake
from .frames import NOT_A_MESSAGE
from .host import host_identity, is_local, own_addresses

_BACKLOG = 512
_OPEN_SECONDS = 3.0
_MOST_ADDRESSES = 8

Target = tuple[str, int] | str
"""Host and port, or the abstract name of a Unix socket."""


@dataclass(frozen=True)
class Address:
    """Where the board of one group is served, and the secret of the group's ranks.

    `unix` is the abstract name of a socket on `host`. An empty `host` means the host of the process that reads the
    address.
    """

    group: str
    secret: bytes = field(repr=False)
    unix: str
    tcp: tuple[tuple[str, int], ...] = ()
    host: str = ""

    @property
    def targets(self) -> list[Target]:
        """The addresses at which this process can reach the board, the nearest first."""
        here = not self.host or self.host == host_identity()
        return [*([self.unix] if here else []), *self.tcp]

    def to_notice(self) -> bytes:
        """This address as bytes, which `of_notice` reads. They contain the secret."""
        return json.dumps({**asdict(self), "secret": self.secret.hex()}).encode()


def of_notice(notice: bytes) -> Address:
    """The address in the bytes of `to_notice`. Raises ValueError for other bytes."""
    try:
        found = json.loads(notice)
        tcp = tuple((str(host), int(port)) for host, port in found["tcp"])
        group, unix, host = str(found["group"]), str(found["unix"]), str(found["host"])
        return Address(group, bytes.fromhex(found["secret"]), unix, tcp, host)
    except NOT_A_MESSAGE as error:
        raise ValueError(str(error)) from None


def listen_here(name: str) -> socket.socket:
    """Listen at a Unix socket. Raises GroupMismatch if another process listens there."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        both = f"{_holder(name)} and process {os.getpid()} both act as rank 0 of one job"
        raise GroupMismatch("which process is rank 0", {0: both}) from None
    listener.listen(_BACKLOG)
    return listener


def _holder(name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        probe.connect(f"\0{name}")
        if known := handshake.credentials(probe):
            return f"process {known[0]} of user {known[1]}"
    return "another process"


def listen_at(host: str, port: int, until: float) -> socket.socket:
    """Listen at `host`, or at all addresses of this host if `host` is not one of them (behind a NAT).

    Waits while the port is taken, since another group of this job may be connecting. Raises ArgumentError if it cannot
    listen.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ArgumentError("environment variable MASTER_ADDR", shown(host), f"a host ({error.strerror})") from None
    if not is_local(host):
        where = ("", port)
    while True:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > until - 0.1:
                got = f"{port}, which cannot be had on this host ({error.strerror})"
                expected = "a port that is free on the host of rank 0"
                raise ArgumentError("environment variable DRVFUSE_STORE_PORT", got, expected) from None
        time.sleep(0.05)


def listen_anywhere() -> tuple[socket.socket, tuple[tuple[str, int], ...]]:
    """Listen at a free port of all addresses of this host. Returns the socket and the addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    port = listener.getsockname()[1]
    return listener, tuple((host, port) for host in own_addresses()[:_MOST_ADDRESSES])


def open_connection(target: Target, until: float) -> socket.socket:
    """A connection to the process that listens at the address. Raises OSError."""
    seconds = min(max(until - time.monotonic(), 0.001), _OPEN_SECONDS)
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


def in_words(target: Target) -> str:
    return f"at {target[0]} port {target[1]}" if isinstance(target, tuple) else "on this host"
