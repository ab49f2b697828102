# SPDX-License-Identifier: Apache-2.0
"""The messages on the sockets of a board: frames of one JSON object and bytes, both of bounded size.

A frame is two 32-bit lengths in network order, a JSON object in UTF-8, and uninterpreted bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

LARGEST_VALUE = 1 << 20
"""The most bytes that a rank may pass to a step."""

_HEAD = struct.Struct("!II")
_STRANGER = 4096, 0
_LARGEST_MESSAGE = 1 << 20


NOT_A_MESSAGE = (KeyError, TypeError, ValueError, OverflowError)
"""The exceptions that reading a malformed message raises. OverflowError comes from JSON numbers that are infinite."""


class Malformed(Exception):
    """The received bytes are not a frame, or the frame is too large."""


def pack(message: dict[str, Any], data: bytes = b"") -> bytes:
    """The bytes of the frame that holds `message` and `data`."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(len(text), len(data)) + text + data


class Unpacker:
    """Splits the bytes of one connection into frames. Only small frames are accepted before `trust()`."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._largest = _STRANGER

    def trust(self, values: int) -> None:
        """From now on accept larger frames, with up to `values` values of at most LARGEST_VALUE bytes."""
        self._largest = _LARGEST_MESSAGE, values * LARGEST_VALUE

    def feed(self, received: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take the bytes `received`, and yield the frames that are complete. Raises Malformed."""
        self._bytes += received
        while len(self._bytes) >= _HEAD.size:
            text_bytes, data_bytes = _HEAD.unpack_from(self._bytes)
            if text_bytes > self._largest[0] or data_bytes > self._largest[1]:
                limit = "{} + {}".format(*self._largest)
                raise Malformed(f"a frame of {text_bytes} + {data_bytes} bytes (JSON + data), above the limit {limit}")
            data_begin = _HEAD.size + text_bytes
            end = data_begin + data_bytes
            if len(self._bytes) < end:
                return
            try:
                message = json.loads(self._bytes[_HEAD.size : data_begin])
            except (ValueError, RecursionError):
                raise Malformed("a frame that is not JSON") from None
            if not isinstance(message, dict):
                raise Malformed("a frame that is no JSON object")
            data = bytes(self._bytes[data_begin:end])
            del self._bytes[:end]
            yield message, data
