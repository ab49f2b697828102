# SPDX-License-Identifier: Apache-2.0
"""The parameters of graph nodes in messages, together with the memory that their pointers point to.

A node may run long after the call that made it. So the parameters of a copy node give host memory by an address that
the machine can still use then (`Caller.lasting`). The parameters of a kernel are sent as one parameter block
(`parameters`), and arrays of structures as their bytes. If a call returns parameters, their pointers point to memory of
the caller's process, as with the real driver.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..bindings import T
from ..space import mapped
from . import inputs, outputs
from .arguments import Invalid
from .calls import Call, Run
from .message import Incoming, Outgoing
from .parameters import lay_out, pack
from .rows import set_address, side_of
from .structs import STRUCTS, Structure

_N = T.CUgraphNodeType
_ROOM = 1 << 16  # the maximum number of elements of an array; drivers accept fewer


def elements(c: str, address: int | None, count: int) -> list[Any] | None:
    """Copies of the structures of an array. None if they cannot be read."""
    kind = Structure(c)
    if not count:
        return []
    content = mapped.copied(address or 0, count * kind.size) if count <= _ROOM else None
    if content is None:
        return None
    return [kind.made_of(content[i : i + kind.size]) for i in range(0, len(content), kind.size)]


class _Kernel:
    """The parameters of a kernel: the parameter block, and the offsets of the parameters in the block. In all classes
    of this module, `p` is a ctypes structure, which may be part of the structure that is sent, and `value` is the
    structure of the bindings.
    """

    def put(self, p: Any, out: Outgoing, call: Call) -> None:
        """Write to `out` the memory that `p` points to. Replace those addresses in `p` that are different on the
        machine.
        """
        layout = call.caller.layout(p.func or p.kern or 0)
        both = p.kernelParams and p.extra
        self._put_block(out, layout, None if both else p.kernelParams or 0, p.extra or 0)

    def take(self, p: Any, incoming: Incoming, run: Run) -> None:
        """Read the memory that `put` has written to a message, and make `p` point to it."""
        found = self._take_block(incoming)
        p.kernelParams = p.extra = None
        if found is not None:
            p.kernelParams, keep = found
            run.keep.append(keep)

    def put_result(self, p: Any, out: Outgoing, run: Run) -> None:
        """Write to `out` the memory that `p` points to, like `put`, but for parameters that a call returns."""
        self._put_block(out, run.machine.layout(p.func or 0), p.kernelParams, 0)

    def take_result(self, value: Any, incoming: Incoming, call: Call) -> None:
        found = self._take_block(incoming)
        if found is not None:
            _, (block, pointers) = found
            pointers.block = block
            value.kernelParams = pointers  # `value` keeps the pointers alive

    @staticmethod
    def _put_block(out: Outgoing, layout: Any, given: int | None, extra: int) -> None:
        block = None if layout is None or given is None else pack(layout, given, extra)
        out.data(block)
        if block is not None:
            out.word(len(layout.parameters))
            for offset, _ in layout.parameters:
                out.word(offset)

    @staticmethod
    def _take_block(incoming: Incoming) -> Any:
        block = incoming.data()
        return None if block is None else lay_out(block, [incoming.word() for _ in range(incoming.word())])


class _Copy:
    """The source and the destination of a copy, by addresses that the machine can use when the node runs."""

    def put(self, p: Any, out: Outgoing, call: Call) -> None:
        for name, usable in (("src", mapped.readable), ("dst", mapped.writable)):
            side = side_of(p, name)
            if side.host:
                if call.caller.shared(side.base) is None and not usable(side.start, side.nbytes):
                    raise Invalid
                set_address(p, side.path, call.caller.lasting(side.base))

    def take(self, p: Any, incoming: Incoming, run: Run) -> None:
        pass

    def put_result(self, p: Any, out: Outgoing, run: Run) -> None:
        pass

    def take_result(self, value: Any, incoming: Incoming, call: Call) -> None:
        p = STRUCTS["CUDA_MEMCPY3D"].from_address(int(value.getPtr()))
        for name in ("src", "dst"):
            side = side_of(p, name)
            if side.host:
                set_address(p, side.path, call.caller.back(side.base))


class _Array:
    """A pointer to an array of structures of the C type `c`. `field` and `count` are the names of the fields that hold
    the address and the length of the array.
    """

    def __init__(self, c: str, field: str, count: str) -> None:
        self._kind, self._field, self._count = Structure(c), field, count

    def put(self, p: Any, out: Outgoing, call: Call) -> None:
        found = elements(self._kind.c, getattr(p, self._field), getattr(p, self._count))
        if found is None:
            raise Invalid
        out.data(b"".join(self._kind.bytes_of(item) for item in found))

    def take(self, p: Any, incoming: Incoming, run: Run) -> None:
        setattr(p, self._field, run.memory(incoming.data() or b""))

    def put_result(self, p: Any, out: Outgoing, run: Run) -> None:
        nbytes = getattr(p, self._count) * self._kind.size
        out.data(ctypes.string_at(getattr(p, self._field), nbytes) if nbytes else b"")

    def take_result(self, value: Any, incoming: Incoming, call: Call) -> None:
        content, size = incoming.data() or b"", self._kind.size
        made = [self._kind.made_of(content[i : i + size]) for i in range(0, len(content), size)]
        setattr(value, self._field, made)


class _Host:
    """A host function, which stays in the calling process."""

    def put(self, p: Any, out: Outgoing, call: Call) -> None:
        if p.fn and not mapped.executable(p.fn):
            raise Invalid

    def take(self, p: Any, incoming: Incoming, run: Run) -> None:
        pass

    def put_result(self, p: Any, out: Outgoing, run: Run) -> None:
        pass

    def take_result(self, value: Any, incoming: Incoming, call: Call) -> None:
        pass


_POINTERS: dict[str, Any] = {
    "CUDA_KERNEL_NODE_PARAMS": _Kernel(),
    "CUDA_MEMCPY3D": _Copy(),
    "CUDA_HOST_NODE_PARAMS": _Host(),
    "CUDA_MEM_ALLOC_NODE_PARAMS": _Array("CUmemAccessDesc", "accessDescs", "accessDescCount"),
    "CUDA_BATCH_MEM_OP_NODE_PARAMS": _Array("CUstreamBatchMemOpParams", "paramArray", "count"),
}
_MEMBERS = {
    int(_N.CU_GRAPH_NODE_TYPE_KERNEL): ("CUDA_KERNEL_NODE_PARAMS", ("kernel",)),
    int(_N.CU_GRAPH_NODE_TYPE_MEMCPY): ("CUDA_MEMCPY3D", ("memcpy", "copyParams")),
    int(_N.CU_GRAPH_NODE_TYPE_HOST): ("CUDA_HOST_NODE_PARAMS", ("host",)),
    int(_N.CU_GRAPH_NODE_TYPE_MEM_ALLOC): ("CUDA_MEM_ALLOC_NODE_PARAMS", ("alloc",)),
    int(_N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP): ("CUDA_BATCH_MEM_OP_NODE_PARAMS", ("memOp",)),
}
"""By the type of a node: the part of CUgraphNodeParams that has pointers."""


def _part(c: str, p: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """What is needed to send the parameters `p` of the C type `c`: (the object that writes the memory to which the
    pointers in the parameters point, the structure with these pointers, the path of fields to that structure). If there
    are no pointers, the object is None.
    """
    path: tuple[str, ...] = ()
    if c == "CUgraphNodeParams":
        c, path = _MEMBERS.get(p.type, ("", ()))
        p = functools.reduce(getattr, path, p.of)
    return _POINTERS.get(c), p, path


class NodeParams(inputs.Struct):
    """Parameters of a graph node that a call reads."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if value is None:
            out.data(None)
            return
        whole, rest = self.kind.plain(value), Outgoing()
        how, p, _ = _part(self.kind.c, whole)
        if how is not None:
            how.put(p, rest, call)
        out.data(bytes(whole))
        out.parts += rest.parts

    def take(self, incoming: Incoming, run: Run) -> Any:
        content = incoming.data()
        if content is None:
            return None
        whole = STRUCTS[self.kind.c].from_buffer_copy(content)
        how, p, _ = _part(self.kind.c, whole)
        if how is not None:
            how.take(p, incoming, run)
        return self.kind.made_of(bytes(whole))


class FilledParams(NodeParams):
    """Parameters of a graph node or of an instantiation that a call reads, and in which it writes some fields."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        super().put(out, value, call)
        if value is not None:
            call.filled.append(lambda content: self._store(value, content))

    def take(self, incoming: Incoming, run: Run) -> Any:
        value = super().take(incoming, run)
        if value is not None:
            run.filled.append(lambda: self.kind.bytes_of(value))
        return value

    def _store(self, value: Any, content: Any) -> None:
        """Copy to `value` the fields that the call has written. The other fields may hold addresses in the machine's
        process.
        """
        kind = STRUCTS[self.kind.c]
        written, own = kind.from_buffer_copy(content), kind.from_address(int(value.getPtr()))
        if self.kind.c == "CUDA_GRAPH_INSTANTIATE_PARAMS":
            own.hErrNode_out, own.result_out = written.hErrNode_out, written.result_out
        elif self.kind.c == "CUDA_MEM_ALLOC_NODE_PARAMS":
            own.dptr = written.dptr
        elif written.type == int(_N.CU_GRAPH_NODE_TYPE_MEM_ALLOC):
            own.of.alloc.dptr = written.of.alloc.dptr


class NodeResult(outputs.Struct):
    """Parameters of a graph node that a call returns."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        whole = self.kind.plain(value)
        how, p, _ = _part(self.kind.c, whole)
        out.data(bytes(whole))
        if how is not None:
            how.put_result(p, out, run)

    def take(self, incoming: Incoming, call: Call) -> Any:
        content = incoming.data() or b""
        value = self.kind.made_of(content)
        how, _, path = _part(self.kind.c, self.kind.plain(value))
        if how is not None:
            how.take_result(functools.reduce(getattr, path, value), incoming, call)
        return value
