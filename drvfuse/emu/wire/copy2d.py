# SPDX-License-Identifier: Apache-2.0
"""How CUDA_MEMCPY2D travels: with the rows of host memory that the machine does not know."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from . import mapped
from .arguments import Invalid
from .calls import Call, Run
from .inputs import Struct
from .message import NONE, Incoming, Outgoing
from .structs import CUDA_MEMCPY2D

_HOST, _UNIFIED = 1, 4  # CUmemorytype
_MASK = (1 << 64) - 1


class _End:
    """One end of a copy, as the call reads it."""

    def __init__(self, p: Any, end: str) -> None:
        kind = getattr(p, f"{end}MemoryType")
        self.field = f"{end}Host" if kind == _HOST else f"{end}Device"
        self.base = getattr(p, self.field) or 0
        self.host = kind in (_HOST, _UNIFIED) and bool(self.base)
        width, height = p.WidthInBytes, p.Height
        self.pitch = getattr(p, f"{end}Pitch") or width + getattr(p, f"{end}XInBytes")
        self.skipped = getattr(p, f"{end}Y") * self.pitch + getattr(p, f"{end}XInBytes")
        self.start = self.base + self.skipped
        self.nbytes = self.pitch * (height - 1) + width if width and height else 0


class Copy2D(Struct):
    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if value is None:
            out.data(None)
            return
        p = CUDA_MEMCPY2D.from_buffer_copy(self.kind.bytes_of(value))
        ends = [_End(p, "src"), _End(p, "dst")]
        local = []
        for end in ends:
            known = call.caller.shared(end.base) if end.host else end.base
            local.append(known is None)
            if known is not None and end.host:
                setattr(p, end.field, known)
        source, target = ends
        readable = not local[0] or mapped.readable(source.start, source.nbytes)
        if not readable or (local[1] and not mapped.writable(target.start, target.nbytes)):
            raise Invalid
        out.data(bytes(p))
        out.data((ctypes.c_char * source.nbytes).from_address(source.start) if local[0] else None)
        out.word(target.nbytes if local[1] else NONE)
        if local[1]:
            call.lent.append(_scatter(target, p.WidthInBytes))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content = incoming.data()
        if content is None:
            return None
        p = CUDA_MEMCPY2D.from_buffer_copy(content)
        rows, lent = incoming.view(), incoming.word()
        for end, address in (
            (_End(p, "src"), None if rows is None else run.memory(rows)),
            (_End(p, "dst"), None if lent == NONE else run.lend(lent)),
        ):
            if address is not None:
                setattr(p, end.field, (address - end.skipped) & _MASK)
        return self.kind.made_of(bytes(p))


def _scatter(target: _End, width: int) -> Callable[[Any], None]:
    """What lies between the rows is not the copy's to write."""

    def store(content: Any) -> None:
        for at in range(0, len(content), target.pitch or 1):  # there is no pitch where there are no bytes
            ctypes.memmove(target.start + at, bytes(content[at : at + width]), width)

    return store
