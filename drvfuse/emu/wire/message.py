# SPDX-License-Identifier: Apache-2.0
"""A message at one of its ends: 64-bit words and byte strings in order, and descriptors."""

from __future__ import annotations

import struct
from typing import Any

NONE = (1 << 64) - 1
"""The word for what is not there."""
_WORD = struct.Struct("<Q")
_REAL = struct.Struct("<d")


class Outgoing:
    """A message that is being written. `descriptors` go with it; those of `own` are closed when it was sent."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.descriptors: list[int] = []
        self.own: list[int] = []

    def word(self, value: int) -> None:
        self.parts.append(_WORD.pack(value & NONE))

    def real(self, value: float) -> None:
        self.parts.append(_REAL.pack(value))

    def data(self, value: Any) -> None:
        """Bytes, or any view of bytes, or None."""
        if value is None:
            self.word(NONE)
        else:
            self.word(len(value))
            self.parts.append(value)

    def descriptor(self, number: int, *, own: bool) -> None:
        """Send a descriptor. The receiver gets one of its own; with `own` the sender's is closed afterwards."""
        self.word(len(self.descriptors))
        self.descriptors.append(number)
        if own:
            self.own.append(number)


class Incoming:
    """A message that is being read. Its descriptors belong to the reader; those not taken are its to close."""

    def __init__(self, content: Any, descriptors: list[int]) -> None:
        self.content = content
        self.descriptors: list[int | None] = list(descriptors)
        self.at = 0

    def word(self) -> int:
        (value,) = _WORD.unpack_from(self.content, self.at)
        self.at += 8
        return int(value)

    def real(self) -> float:
        return float(self.take(_REAL)[0])

    def data(self) -> bytes | None:
        found = self.view()
        return None if found is None else bytes(found)

    def view(self) -> Any:
        """A byte string that `data` has written, as a view of the message, without a copy."""
        size = self.word()
        if size == NONE:
            return None
        self.at += size
        return self.content[self.at - size : self.at]

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        found = form.unpack_from(self.content, self.at)
        self.at += form.size
        return found

    def descriptor(self) -> int | None:
        """Take a descriptor that was sent."""
        place = self.word()
        if not 0 <= place < len(self.descriptors):
            return None
        found, self.descriptors[place] = self.descriptors[place], None
        return found
