# SPDX-License-Identifier: Apache-2.0
"""The outputs of calls that return managed memory or its attributes, as messages."""

from __future__ import annotations

from typing import Any

from .calls import Call, Run
from .message import NONE, Incoming, Outgoing
from .outputs import Output


class Managed(Output):
    """The address of memory or of a variable. If the address lies in managed memory, the message has a file descriptor
    of the whole allocation, and the caller's process maps the allocation at the same address, so that its host code can
    use it.
    """

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.word(int(value))
        found = run.machine.managed(int(value))
        out.word(NONE if found is None else found[0])
        if found is not None:
            out.word(found[1])
            out.descriptor(found[2], own=False)

    def take(self, incoming: Incoming, call: Call) -> Any:
        address, base = incoming.word(), incoming.word()
        if base != NONE:
            nbytes, descriptor = incoming.word(), incoming.descriptor()
            assert descriptor is not None
            call.caller.map_pinned(base, nbytes, descriptor)
        return self.scalar.result(address)


class RangeAttribute(Output):
    """Attributes of a range of managed memory. Each is a number or a list of numbers."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        if self.parameter.extent:
            out.word(len(value))
        for item in value if self.parameter.extent else [value]:
            out.word(len(item) if isinstance(item, list) else NONE)
            for number in item if isinstance(item, list) else [item]:
                out.word(number)

    def take(self, incoming: Incoming, call: Call) -> Any:
        found = [_one(incoming) for _ in range(incoming.word() if self.parameter.extent else 1)]
        return found if self.parameter.extent else found[0]


def _one(incoming: Incoming) -> Any:
    count = incoming.word()
    if count == NONE:
        return _signed(incoming.word())
    return [_signed(incoming.word()) for _ in range(count)]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
