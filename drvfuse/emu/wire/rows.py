# SPDX-License-Identifier: Apache-2.0
"""How copies of rows and of batches travel: with the host memory of theirs that the machine does not know."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .arguments import whole
from .calls import Call, Run
from .inputs import Array, Struct, put_bytes, store
from .message import NONE, Incoming, Outgoing
from .structs import STRUCTS

_HOST, _UNIFIED = 1, 4  # CUmemorytype
_POINTER = 1  # CUmemcpy3DOperandType
_MASK = (1 << 64) - 1


class _Side(NamedTuple):
    """One end of a copy of layers of rows: the address that is given and how it is written in the structure (a path of
    fields), whether it may be host memory, how far behind it the first byte is, and how far apart rows and layers are.
    """

    base: int
    path: tuple[str, ...]
    host: bool
    skipped: int
    pitch: int
    layer: int
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        width, height, depth = self.shape
        return (depth - 1) * self.layer + (height - 1) * self.pitch + width if all(self.shape) else 0

    def rows(self) -> Iterator[int]:
        """Where rows begin, from the first byte on."""
        _, height, depth = self.shape
        return (z * self.layer + y * self.pitch for z in range(depth) for y in range(height))


def _side(p: Any, end: str) -> _Side:
    """Of a CUDA_MEMCPY2D, CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER."""
    kind, width, height = getattr(p, f"{end}MemoryType"), p.WidthInBytes, p.Height
    field = f"{end}Host" if kind == _HOST else f"{end}Device"
    x, y, z = getattr(p, f"{end}XInBytes"), getattr(p, f"{end}Y"), getattr(p, f"{end}Z", 0)
    pitch = getattr(p, f"{end}Pitch") or width + x
    layer = (getattr(p, f"{end}Height", 0) or height + y) * pitch
    base = getattr(p, field) or 0
    host = kind in (_HOST, _UNIFIED) and bool(base)
    return _Side(base, (field,), host, z * layer + y * pitch + x, pitch, layer, (width, height, getattr(p, "Depth", 1)))


def _operand(p: Any, end: str) -> _Side:
    """Of a CUDA_MEMCPY3D_BATCH_OP, whose elements are bytes."""
    operand, extent = getattr(p, end), p.extent
    at, shape = operand.op.ptr, (extent.width, extent.height, extent.depth)
    pitch = at.rowLength or extent.width
    host = operand.type == _POINTER and bool(at.ptr)
    return _Side(at.ptr, (end, "op", "ptr", "ptr"), host, 0, pitch, (at.layerHeight or extent.height) * pitch, shape)


def _set(p: Any, path: tuple[str, ...], address: int) -> None:
    for name in path[:-1]:
        p = getattr(p, name)
    setattr(p, path[-1], address & _MASK)


class Rows(Struct):
    """A structure that describes one copy."""

    side: Callable[[Any, str], _Side] = staticmethod(_side)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if value is None:
            out.data(None)
        else:
            self._put(out, self.kind.bytes_of(value, self.name), call)

    def _put(self, out: Outgoing, content: bytes, call: Call) -> None:
        p = STRUCTS[self.kind.c].from_buffer_copy(content)
        sides = [self.side(p, "src"), self.side(p, "dst")]
        local = []
        for side in sides:
            known = call.caller.shared(side.base) if side.host else side.base
            local.append(known is None)
            if known is not None and side.host:
                _set(p, side.path, known)
        out.data(bytes(p))
        source, target = sides
        start = source.base + source.skipped
        out.data((ctypes.c_char * source.nbytes).from_address(start) if local[0] else None)
        out.word(target.nbytes if local[1] else NONE)
        if local[1]:
            call.lent.append(_scatter(target))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content = incoming.data()
        return None if content is None else self.kind.made_of(self._take(content, incoming, run))

    def _take(self, content: bytes, incoming: Incoming, run: Run) -> bytes:
        p = STRUCTS[self.kind.c].from_buffer_copy(content)
        rows, lent = incoming.view(), incoming.word()
        for side, address in (
            (self.side(p, "src"), None if rows is None else run.memory(rows)),
            (self.side(p, "dst"), None if lent == NONE else run.lend(lent)),
        ):
            if address is not None:
                _set(p, side.path, address - side.skipped)
        return bytes(p)


class RowsArray(Rows):
    """A list of structures that describe copies."""

    side = staticmethod(_operand)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(NONE if value is None else len(value))
        for item in value or ():
            self._put(out, self.kind.bytes_of(item, self.name), call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        count = incoming.word()
        if count == NONE:
            return None
        return [self.kind.made_of(self._take(incoming.data() or b"", incoming, run)) for _ in range(count)]


def _scatter(target: _Side) -> Callable[[Any], None]:
    """What lies between the rows is not the copy's to write."""

    def store(content: Any) -> None:
        start, width = target.base + target.skipped, target.shape[0]
        for at in target.rows() if content else ():
            ctypes.memmove(start + at, bytes(content[at : at + width]), width)

    return store


class Batch(Array):
    """Addresses of memory that copies read or write, of as many bytes as the list `sizes` says."""

    @property
    def reads(self) -> bool:
        return self.name == "srcs"

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(NONE if value is None else len(value))
        sizes = list(call.value("sizes") or ())
        for i, item in enumerate(value or ()):
            address = 0 if item is None else whole(item, 0, NONE, "CUdeviceptr")
            nbytes = whole(sizes[i], 0, NONE, "size_t") if i < len(sizes) else 0
            if self.reads:
                put_bytes(out, address, nbytes, call)
            else:
                put_target(out, address, nbytes, call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        count = incoming.word()
        if count == NONE:
            return None
        return [take_bytes(incoming, run) if self.reads else take_target(incoming, run) for _ in range(count)]


def take_bytes(incoming: Incoming, run: Run) -> int:
    """The address of what `put_bytes` has written."""
    address, content = incoming.word(), incoming.view()
    return address if content is None else run.memory(content)


def put_target(out: Outgoing, address: int, nbytes: int, call: Call) -> None:
    """Memory that the call writes before it returns, unless the machine knows it."""
    known = call.caller.shared(address)
    out.word(address if known is None else known)
    out.word(NONE if known is not None or not address else nbytes)
    if known is None and address:
        call.lent.append(lambda content: store(address, content))


def take_target(incoming: Incoming, run: Run) -> int:
    address, nbytes = incoming.word(), incoming.word()
    return address if nbytes == NONE else run.lend(nbytes)
