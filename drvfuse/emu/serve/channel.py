# SPDX-License-Identifier: Apache-2.0
"""Messages over a stream socket. A message is a header, words and bytes, and file descriptors.

On most connections the two ends send alternately. So only one message can be in transit, and a reader may read all
available bytes at once. If one end sends several messages without an answer in between, the other end must call
`receive` with `alone=False`.
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

_HEAD = struct.Struct("<QHH")  # the header: number of bytes that follow, tag, number of descriptors
_SMALL = 1 << 16  # up to this size, the parts of a message are joined before they are sent
_FIRST = 1 << 12  # the maximum size of the first read of a message
_MOST_DESCRIPTORS = 16
_ROOM = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)


class Tag(IntEnum):
    """The kind of a message. A driver call has the number of the function in place of a tag."""

    HELLO = 0xFF00
    ASK = 0xFF01
    INTERRUPT = 0xFF02
    RESULT = 0xFF10
    RAISED = 0xFF11
    CALLBACK = 0xFF12
    READ = 0xFF13
    WRITE = 0xFF14


class Ended(Exception):
    """The other end has closed the connection."""


def send(connection: socket.socket, tag: int, out: Outgoing) -> None:
    """Send a message. Raises Ended. The descriptors in `out.own` are closed in any case."""
    try:
        content = out.parts
        nbytes = sum(map(len, content))
        head = _HEAD.pack(nbytes, tag, len(out.descriptors))
        small = nbytes < _SMALL
        first = b"".join((head, *content)) if small else head
        if out.descriptors:
            sent = socket.send_fds(connection, [first], out.descriptors)
            first = first[sent:]
        connection.sendall(first)
        if not small:
            for part in content:
                connection.sendall(part)
    except (BrokenPipeError, ConnectionResetError):
        raise Ended from None
    finally:
        for descriptor in out.own:
            os.close(descriptor)
        out.own.clear()


def receive(connection: socket.socket, *, alone: bool = True, most: int | None = None) -> tuple[int, Incoming]:
    """(tag, content) of the next message. Raises Ended, also for a message of more than `most` bytes, for which no
    memory is taken. With `alone=False`, more messages may follow it."""
    descriptors: list[int] = []
    try:
        # The descriptors come with the first byte of a message, so only this read accepts them. It must not cross the
        # end of the message: if another message may follow, it reads the header only.
        first = _FIRST if alone else _HEAD.size
        piece, control, _, _ = connection.recvmsg(first, _ROOM, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", raw[: len(raw) - len(raw) % 4])
        while 0 < len(piece) < _HEAD.size:
            more = connection.recv(_HEAD.size - len(piece))
            piece = piece + more if more else b""
        if not piece:
            raise Ended
        nbytes, tag, count = _HEAD.unpack_from(piece)
        content = memoryview(piece)[_HEAD.size :]
        if most is not None and nbytes > most:
            raise Ended
        if len(content) < nbytes:
            content = _rest(connection, content, nbytes)
        if len(descriptors) != count or len(content) != nbytes:
            raise Ended
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ConnectionResetError):
            raise Ended from None
        raise
    return tag, Incoming(content, descriptors)


def _rest(connection: socket.socket, begun: memoryview, nbytes: int) -> memoryview:
    """The content of a message of `nbytes`, the beginning of which has been read already."""
    try:
        whole = memoryview(bytearray(nbytes))
    except (MemoryError, OverflowError):  # no valid message is so large
        raise Ended from None
    at = len(begun)
    whole[:at] = begun
    while at < nbytes:
        got = connection.recv_into(whole[at:])
        if not got:
            raise Ended
        at += got
    return whole


def close_rest(incoming: Incoming) -> None:
    """Close those descriptors of a message that its reader has not taken."""
    for descriptor in incoming.descriptors:
        if descriptor is not None:
            os.close(descriptor)
    incoming.descriptors.clear()


def packed(value: Any) -> Outgoing:
    """A message with a pickled Python value. Both ends must belong to the same user and have the same version."""
    out = Outgoing()
    out.data(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return out


def unpacked(incoming: Incoming) -> Any:
    return pickle.loads(incoming.data() or b"")
