# SPDX-License-Identifier: Apache-2.0
"""The handshake by which a rank and the server of a board authenticate each other.

    server  {"nonce": n}                                    a fresh random number
    rank    {"group", "rank", "size", "pid", "nonce": m, "proof": HMAC(secret, rank's role, n, m, group, rank, size)}
    server  {"proof": HMAC(secret, server's role, n, m, group, rank, size)}   or   {"refused", ...}

The secret is never sent. Each side proves that it knows the secret before the other side acts on its messages. On
sockets of one host, whose kernel tells which user is at the other end, the secret is empty. `group` distinguishes
groups and jobs that use one address: a server refuses a rank of another group with "another group", and the rank then
looks for the board of its own group.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct

VERSION = 1
PROCESS_ENDED = "its process has ended"
_CREDENTIALS = struct.Struct("3i")


def nonce() -> str:
    """An unpredictable random number for one handshake."""
    return secrets.token_hex(16)


def proof(secret: bytes, role: str, theirs: str, own: str, group: str, rank: int, size: int) -> str:
    """An HMAC that only a holder of `secret` can compute. `role` is the role of the sender, "server" or "rank"."""
    text = "\0".join((f"drvfuse board {VERSION}", role, theirs, own, group, str(rank), str(size)))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Whether the proof of the other end is right. The comparison takes equally long for all wrong proofs."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def credentials(connected: socket.socket) -> tuple[int, int] | None:
    """The process and the user at the other end of a Unix socket, from the kernel; None for other sockets.

    The process is 0 if it is outside this process's PID namespace.
    """
    if connected.family != socket.AF_UNIX:
        return None
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def same_user(connected: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user. True for TCP, where it is unknown."""
    known = credentials(connected)
    return known is None or known[1] == os.getuid()


def notice_loss(connected: socket.socket) -> None:
    """Make a TCP connection send without delay, and fail within half a minute if the other host does not respond."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def loss(error: OSError) -> str:
    """The reason why a transfer has failed, as a statement about the process at the other end."""
    ended = error.errno in (errno.EPIPE, errno.ECONNRESET)
    return PROCESS_ENDED if ended else f"the connection to it was lost ({error.strerror})"
