# SPDX-License-Identifier: Apache-2.0
"""Addresses of served machines. They are addresses of Unix sockets. The processes at both ends of a connection belong
to the same user.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct

from ...errors import ArgumentError, DriverUnavailable, shown

EXPECTED = '"unix:@NAME" (a name without a file) or "unix:/PATH"'


def fresh() -> str:
    """An unused address. The socket has no file, so no file remains if the process that listens at the address is
    killed.
    """
    return f"unix:@drvfuse-emu-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"


def parse(text: str, argument: str) -> str:
    """The name of the socket at an address, in the form that Python's `socket` accepts."""
    match = re.fullmatch(r"unix:(?:@([^\0]+)|(/[^\0]*))", text)
    name = "" if match is None else f"\0{match[1]}" if match[1] else match[2]
    if match is None or len(name.encode()) > 107:
        raise ArgumentError(argument, shown(text), EXPECTED)
    return name


def listen(address: str) -> socket.socket:
    """A socket that listens at an address. Raises ArgumentError if the address is taken."""
    name = parse(address, "address")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(name)
        if not name.startswith("\0"):
            os.chmod(name, 0o600)
        made.listen(64)
    except OSError as error:
        made.close()
        raise ArgumentError("address", shown(address), f"free and writable ({error.strerror or error})") from None
    return made


def connect(address: str, argument: str) -> socket.socket:
    """A connection to the machine at an address. Raises DriverUnavailable if no process of the same user listens at the
    address.
    """
    name = parse(address, argument)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(name)
        owner = peer(made)[1]
    except OSError as error:
        made.close()
        raise DriverUnavailable(
            f"no emulated machine is served at {address} ({error.strerror or error}): it has ended, or the address is "
            "wrong; `drvfuse emu serve` prints the address of a new one"
        ) from None
    if owner != os.getuid():
        made.close()
        raise DriverUnavailable(f"{address} belongs to user {owner}, and this process to user {os.getuid()}")
    return made


def peer(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the process at the other end, at the time when it connected or listened."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def close(listening: socket.socket, address: str) -> None:
    """Close a listening socket. This wakes a thread that waits in `accept`, and deletes the file of the socket."""
    name = parse(address, "address")
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    if not name.startswith("\0"):
        with contextlib.suppress(OSError):
            os.unlink(name)
