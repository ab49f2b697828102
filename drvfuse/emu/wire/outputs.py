# SPDX-License-Identifier: Apache-2.0
"""The kinds of results. `put` writes a result to a message in the machine's process. `take` reads it in the caller's
process, and makes the object that cuda.bindings return.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .arguments import Address
from .calls import Call, Run
from .inputs import attribute_scalar
from .message import Incoming, Outgoing
from .scalars import Scalar, scalar
from .signatures import Parameter
from .structs import Structure


class Output:
    """Base class of the kinds of results. It is itself the kind of results that are one number, which `take` may return
    in a class of the bindings, such as a handle.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.scalar: Scalar = scalar(parameter.type if parameter.type != "void" else "void*") or Scalar("void*")

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        _put(out, self.scalar, value)

    def take(self, incoming: Incoming, call: Call) -> Any:
        return _take(incoming, self.scalar)


def _put(out: Outgoing, kind: Scalar, value: Any) -> None:
    if kind.code == "d":
        out.real(float(value))
    else:
        out.word(int(kind.raw(value)))


def _take(incoming: Incoming, kind: Scalar) -> Any:
    if kind.code == "d":
        return kind.result(incoming.real())
    word = incoming.word()
    return kind.result(word - (1 << 64) if kind.code == "q" and word >> 63 else word)


class Moved(Output):
    """A number that is stored in the object that the caller gave, or in a new object if the caller gave none."""

    def take(self, incoming: Incoming, call: Call) -> Any:
        found, given = super().take(incoming, call), call.value(self.parameter.name)
        if type(given) is not Address:
            return found
        size = ctypes.sizeof(ctypes.c_uint)
        ctypes.memmove(int(given.keep.getPtr()), int(found.getPtr()), size)
        return given.keep


class Array(Output):
    """A list whose elements are results of the kind `Output`: numbers, or numbers in a class of the bindings."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.word(len(value))
        for item in value:
            _put(out, self.scalar, item)

    def take(self, incoming: Incoming, call: Call) -> Any:
        return [_take(incoming, self.scalar) for _ in range(incoming.word())]


class Text(Output):
    """A C string."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.data(value)

    def take(self, incoming: Incoming, call: Call) -> Any:
        return incoming.data()


class Struct(Output):
    """A structure."""

    def __init__(self, parameter: Parameter) -> None:
        self.kind = Structure(parameter.type)

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.data(self.kind.bytes_of(value))

    def take(self, incoming: Incoming, call: Call) -> Any:
        return self.kind.made_of(incoming.data() or b"")


class StructArray(Struct):
    """A list of structures."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.word(len(value))
        for item in value:
            super().put(out, item, run)

    def take(self, incoming: Incoming, call: Call) -> Any:
        return [super(StructArray, self).take(incoming, call) for _ in range(incoming.word())]


class Descriptor(Output):
    """A file descriptor, which belongs to the caller after the call."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.descriptor(int(value), own=True)

    def take(self, incoming: Incoming, call: Call) -> Any:
        return incoming.descriptor()


class Pinned(Output):
    """The address of new pinned memory, with a file descriptor of that memory."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.word(int(value))
        out.descriptor(run.machine.pinned(int(value)), own=False)

    def take(self, incoming: Incoming, call: Call) -> Any:
        address, descriptor = incoming.word(), incoming.descriptor()
        assert descriptor is not None
        call.caller.map_pinned(address, call.value("bytesize"), descriptor)
        return address


class Code(Output):
    """The address of a linked image. The linker state (CUlinkState) of the call owns the image."""

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        out.data(value.keep)

    def take(self, incoming: Incoming, call: Call) -> Any:
        return call.caller.keep_image(call.value("state"), incoming.data() or b"")


class Attribute(Output):
    """The value of one attribute, or a list with the values of several attributes."""

    def _kinds(self, end: Call | Run) -> list[Scalar]:
        enum = next(p for p in end.signature.given if p.type.endswith("_attribute"))
        asked = end.value(enum.name)
        return [attribute_scalar(a) for a in (list(asked) if enum.extent else [asked])]

    def put(self, out: Outgoing, value: Any, run: Run) -> None:
        values = value if self.parameter.extent else [value]
        for kind, item in zip(self._kinds(run), values, strict=False):
            out.word(int(kind.raw(item)))

    def take(self, incoming: Incoming, call: Call) -> Any:
        kinds = self._kinds(call)
        wanted = int(call.value(self.parameter.extent)) if self.parameter.extent else 1
        values = [_take(incoming, kind) for kind in kinds[:wanted]]
        found = [call.caller.back(v) if kind.c == "void*" else v for v, kind in zip(values, kinds, strict=False)]
        return found if self.parameter.extent else found[0]
