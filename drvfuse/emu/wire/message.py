# SPDX-License-Identifier: Apache-2.0
"""Messages as their sender writes them and their receiver reads them: 64-bit words and byte strings in order, and file
descriptors.
"""

from __future__ import annotations

import struct
from typing import Any

NONE = (1 << 64) - 1
"""The word that means None."""
_WORD = struct.Struct("<Q")
_REAL = struct.Struct("<d")


class Outgoing:
    """A message that is being written. `descriptors` are sent with it. Those in `own` are closed after it was sent."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.descriptors: list[int] = []
        self.own: list[int] = []

    def word(self, value: int) -> None:
        self.parts.append(_WORD.pack(value & NONE))

    def real(self, value: float) -> None:
        self.parts.append(_REAL.pack(value))

    def data(self, value: Any) -> None:
        """Write bytes, a view of bytes, or None."""
        if value is None:
            self.word(NONE)
        else:
            self.word(len(value))
            self.parts.append(value)

    def descriptor(self, number: int, *, own: bool) -> None:
        """Send a copy of a descriptor. With `own`, the sender's descriptor is closed afterwards."""
        self.word(len(self.descriptors))
        self.descriptors.append(number)
        if own:
            self.own.append(number)


class Incoming:
    """A message that is being read. Its descriptors belong to the reader, who closes those that it does not take."""

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
        """A byte string that `data` has written, as a view of the message without a copy."""
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
        """Take the descriptor to which the next word of the message refers. None if no such descriptor was sent."""
        place = self.word()
        if not 0 <= place < len(self.descriptors):
            return None
        found, self.descriptors[place] = self.descriptors[place], None
        return found
