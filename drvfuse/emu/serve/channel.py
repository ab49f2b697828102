# SPDX-License-Identifier: Apache-2.0
"""Messages over a stream socket: a head, words and bytes, and descriptors.

The two ends take turns, so a reader never meets the beginning of a second message behind the first.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
from enum import IntEnum
from typing import Any

from ..wire.message import Incoming, Outgoing

_HEAD = struct.Struct("<QHH")  # bytes behind it, tag, descriptors
_PIECE = 1 << 16
_MOST_DESCRIPTORS = 16
_ROOM = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)


class Tag(IntEnum):
    """What a message is; a driver call has the function's number instead."""

    HELLO = 0xFF00
    ASK = 0xFF01
    INTERRUPT = 0xFF02
    RESULT = 0xFF10
    RAISED = 0xFF11
    CALLBACK = 0xFF12


class Ended(Exception):
    """The other end has closed the connection."""


def send(connection: socket.socket, tag: int, out: Outgoing) -> None:
    """Raises Ended. The descriptors of `out.own` are closed in any case."""
    try:
        nbytes = sum(len(part) for part in out.parts)
        head = _HEAD.pack(nbytes, tag, len(out.descriptors))
        if nbytes < _PIECE:
            first, rest = b"".join((head, *out.parts)), []
        else:
            first, rest = head, out.parts
        if out.descriptors:
            sent = socket.send_fds(connection, [first], out.descriptors)
            if sent < len(first):
                connection.sendall(first[sent:])
        else:
            connection.sendall(first)
        for part in rest:
            connection.sendall(part)
    except (BrokenPipeError, ConnectionResetError):
        raise Ended from None
    finally:
        for descriptor in out.own:
            os.close(descriptor)
        out.own.clear()


def receive(connection: socket.socket) -> tuple[int, Incoming]:
    """(tag, content) of the next message. Raises Ended."""
    descriptors: list[int] = []
    content = bytearray()
    wanted = _HEAD.size
    tag = count = 0
    try:
        while len(content) < wanted:
            room = _ROOM if not content else 0
            piece, control, _, _ = connection.recvmsg(
                min(max(wanted - len(content), _PIECE), 1 << 24), room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, raw in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += array.array("i", raw[: len(raw) - len(raw) % 4])
            if not piece:
                raise Ended
            begins = len(content) < _HEAD.size
            content += piece
            if begins and len(content) >= _HEAD.size:
                nbytes, tag, count = _HEAD.unpack_from(content)
                wanted = _HEAD.size + nbytes
        if len(descriptors) != count or len(content) != wanted:
            raise Ended
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ConnectionResetError):
            raise Ended from None
        raise
    return tag, Incoming(memoryview(content)[_HEAD.size :], descriptors)


def close_rest(incoming: Incoming) -> None:
    """Close the descriptors of a message that nobody took."""
    for descriptor in incoming.descriptors:
        if descriptor is not None:
            os.close(descriptor)
    incoming.descriptors.clear()


def packed(value: Any) -> Outgoing:
    """A Python value as a message; only for two ends of one user and one version."""
    out = Outgoing()
    out.data(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return out


def unpacked(incoming: Incoming) -> Any:
    return pickle.loads(incoming.data() or b"")
