# SPDX-License-Identifier: Apache-2.0
"""Writes and reads 2D copies, 3D copies and batches of copies as messages. A message also has the contents of host
memory that the machine cannot access.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..space import mapped
from .arguments import Invalid
from .calls import Call, Run
from .host_inputs import put_bytes, put_target, take_bytes, take_target
from .inputs import Array, Struct, StructArray
from .message import NONE, Incoming, Outgoing
from .structs import CUDA_MEMCPY3D_BATCH_OP, STRUCTS

_HOST, _UNIFIED = 1, 4  # CUmemorytype
_POINTER = 1  # CUmemcpy3DOperandType
_MASK = (1 << 64) - 1


class Side(NamedTuple):
    """The source or the destination of a copy, whose bytes lie in rows and layers.

    base     the address that the caller gave
    path     the fields that lead to this address in the structure of the copy
    host     whether `base` may be an address of host memory
    skipped  the offset from `base` of the first byte that is copied
    pitch    the distance between rows in bytes
    layer    the distance between layers in bytes
    shape    what is copied: (bytes of each row, number of rows, number of layers)
    """

    base: int
    path: tuple[str, ...]
    host: bool
    skipped: int
    pitch: int
    layer: int
    shape: tuple[int, int, int]

    @property
    def start(self) -> int:
        return self.base + self.skipped

    @property
    def nbytes(self) -> int:
        width, height, depth = self.shape
        return (depth - 1) * self.layer + (height - 1) * self.pitch + width if all(self.shape) else 0

    def rows(self) -> Iterator[int]:
        """The offsets of the rows from the first byte."""
        _, height, depth = self.shape
        return (z * self.layer + y * self.pitch for z in range(depth) for y in range(height))


def side_of(p: Any, end: str) -> Side:
    """The source ("src") or destination ("dst") of a CUDA_MEMCPY2D, CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER."""
    kind, width, height = getattr(p, f"{end}MemoryType"), p.WidthInBytes, p.Height
    field = f"{end}Host" if kind == _HOST else f"{end}Device"
    x, y, z = getattr(p, f"{end}XInBytes"), getattr(p, f"{end}Y"), getattr(p, f"{end}Z", 0)
    pitch = getattr(p, f"{end}Pitch") or width + x
    layer = (getattr(p, f"{end}Height", 0) or height + y) * pitch
    base = getattr(p, field) or 0
    host = kind in (_HOST, _UNIFIED) and bool(base)
    return Side(base, (field,), host, z * layer + y * pitch + x, pitch, layer, (width, height, getattr(p, "Depth", 1)))


def _operand(p: Any, end: str) -> Side:
    """The source or destination of a CUDA_MEMCPY3D_BATCH_OP, whose elements are bytes."""
    operand, extent = getattr(p, end), p.extent
    at, shape = operand.op.ptr, (extent.width, extent.height, extent.depth)
    pitch = at.rowLength or extent.width
    host = operand.type == _POINTER and bool(at.ptr)
    return Side(at.ptr, (end, "op", "ptr", "ptr"), host, 0, pitch, (at.layerHeight or extent.height) * pitch, shape)


def set_address(p: Any, path: tuple[str, ...], address: int) -> None:
    for name in path[:-1]:
        p = getattr(p, name)
    setattr(p, path[-1], address & _MASK)


def _put(out: Outgoing, p: Any, sides: tuple[Side, Side], call: Call) -> None:
    """Write a structure that describes a copy. If the machine cannot access the memory of the source, also write the
    contents of the source. If it cannot access the memory of the destination, also write the size of the destination.
    Raises Invalid if such a source cannot be read, or such a destination cannot be written.
    """
    local = []
    for side in sides:
        known = call.caller.shared(side.base) if side.host else side.base
        local.append(known is None)
        if known is not None and side.host:
            set_address(p, side.path, known)
    source, target = sides
    readable = not local[0] or mapped.readable(source.start, source.nbytes)
    if not readable or (local[1] and not mapped.writable(target.start, target.nbytes)):
        raise Invalid
    out.data(bytes(p))
    out.data((ctypes.c_char * source.nbytes).from_address(source.start) if local[0] else None)
    out.word(target.nbytes if local[1] else NONE)
    if local[1]:
        call.lent.append(_scatter(target))


def _take(p: Any, sides: tuple[Side, Side], incoming: Incoming, run: Run) -> bytes:
    """The bytes of the structure `p`, which `_put` has written. Read the rest of what `_put` has written, and replace
    the addresses in `p` that the machine cannot access by those of buffers in the machine's process.
    """
    rows, lent = incoming.view(), incoming.word()
    here = None if rows is None else run.memory(rows), None if lent == NONE else run.lend(lent)
    for side, address in zip(sides, here, strict=True):
        if address is not None:
            set_address(p, side.path, address - side.skipped)
    return bytes(p)


class Rows(Struct):
    """A structure that describes one 2D or 3D copy, with the contents of host memory that the machine cannot access."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if value is None:
            out.data(None)
        else:
            p = STRUCTS[self.kind.c].from_buffer_copy(self.kind.bytes_of(value))
            _put(out, p, (side_of(p, "src"), side_of(p, "dst")), call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        content = incoming.data()
        if content is None:
            return None
        p = STRUCTS[self.kind.c].from_buffer_copy(content)
        return self.kind.made_of(_take(p, (side_of(p, "src"), side_of(p, "dst")), incoming, run))


class RowsArray(StructArray):
    """A list of CUDA_MEMCPY3D_BATCH_OP, each of which describes one copy, as in `Rows`."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for item in value:
            p = CUDA_MEMCPY3D_BATCH_OP.from_buffer_copy(self.kind.bytes_of(item))
            _put(out, p, (_operand(p, "src"), _operand(p, "dst")), call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        found = []
        for _ in range(incoming.word()):
            p = CUDA_MEMCPY3D_BATCH_OP.from_buffer_copy(incoming.data() or b"")
            content = _take(p, (_operand(p, "src"), _operand(p, "dst")), incoming, run)
            found.append(self.kind.made_of(content))
        return found


def _scatter(target: Side) -> Callable[[Any], None]:
    """A function that stores in `target` the rows that the machine has sent back. It leaves the bytes between rows
    unchanged.
    """

    def store(content: Any) -> None:
        width = target.shape[0]
        for at in target.rows() if content else ():
            ctypes.memmove(target.start + at, bytes(content[at : at + width]), width)

    return store


class Batch(Array):
    """Addresses of memory ranges that copies read or write. The list `sizes` has the sizes of the ranges in bytes."""

    @property
    def reads(self) -> bool:
        return self.name == "srcs"

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        sizes = [*call.value("sizes"), *[0] * len(value)]
        for address, nbytes in zip(value, sizes, strict=False):
            (put_bytes if self.reads else put_target)(out, address, nbytes, call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        take = take_bytes if self.reads else take_target
        return [take(incoming, run) for _ in range(incoming.word())]
