# SPDX-License-Identifier: Apache-2.0
"""How each kind of argument travels: `put` writes it at the caller's end, `take` makes the emulated function's."""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import Any

from .arguments import host_address, image_bytes, text, whole
from .calls import Call, Run
from .message import NONE, Incoming, Outgoing
from .parameters import lay_out, pack
from .scalars import Scalar, scalar
from .signatures import Parameter
from .structs import LaunchConfig, Structure
from .table import ATTRIBUTES


class Input:
    """An argument. This one is a number."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter, self.name = parameter, parameter.name
        found = scalar(parameter.type if parameter.type != "void" else "void*")
        self.scalar: Scalar = found or Scalar("void*")

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(int(self.scalar.read(value, self.name)))

    def take(self, incoming: Incoming, run: Run) -> Any:
        word = incoming.word()
        if self.scalar.code == "q" and word >> 63:
            word -= 1 << 64
        return self.scalar.given(word)


class Array(Input):
    """A list of numbers, or None."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(NONE if value is None else len(value))
        for item in value or ():
            super().put(out, item, call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        count = incoming.word()
        return None if count == NONE else [super(Array, self).take(incoming, run) for _ in range(count)]


class Struct(Input):
    """A structure, or None."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__(parameter)
        self.kind = LaunchConfig() if parameter.type == "CUlaunchConfig" else Structure(parameter.type)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(None if value is None else self.kind.bytes_of(value, self.name))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content = incoming.data()
        return None if content is None else self.kind.made_of(content)


class StructArray(Struct):
    """A list of structures, or None."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(None if value is None else b"".join(self.kind.bytes_of(item, self.name) for item in value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content, size = incoming.data(), self.kind.size
        if content is None:
            return None
        return [self.kind.made_of(content[i : i + size]) for i in range(0, len(content), size)]


class Text(Input):
    """A C string. The name of a file becomes absolute, as the machine has another working directory."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        content = text(value).encode()
        out.data(os.path.abspath(content) if self.name == "fname" and content else content)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.data()


class Source(Input):
    """Memory that the call reads: an address that the machine knows, or the bytes."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        address, keep = _address(value, self.parameter)
        nbytes = whole(call.value(self.parameter.extent), 0, NONE, "size_t")
        put_bytes(out, address, nbytes, call)
        call.keep.append(keep)

    def take(self, incoming: Incoming, run: Run) -> int:
        address, content = incoming.word(), incoming.view()
        return address if content is None else run.memory(content)


class Target(Input):
    """Memory that the call writes before it returns, unless the machine knows it."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        address, keep = _address(value, self.parameter)
        nbytes = whole(call.value(self.parameter.extent), 0, NONE, "size_t")
        known = call.caller.shared(address)
        out.word(address if known is None else known)
        out.word(NONE if known is not None or not address else nbytes)
        if known is None and address:
            call.lent.append(lambda content: store(address, content))
        call.keep.append(keep)

    def take(self, incoming: Incoming, run: Run) -> int:
        address, nbytes = incoming.word(), incoming.word()
        return address if nbytes == NONE else run.lend(nbytes)


def _address(value: Any, parameter: Parameter) -> tuple[int, Any]:
    """A `void*` takes buffers too, a device pointer does not."""
    if parameter.type == "void":
        return host_address(value)
    return (0 if value is None else whole(value, 0, NONE, parameter.type)), None


def put_bytes(out: Outgoing, address: int, nbytes: int, call: Call) -> None:
    known = call.caller.shared(address)
    out.word(address if known is None else known)
    unknown = known is None and address
    out.data((ctypes.c_char * nbytes).from_address(address) if unknown and nbytes else b"" if unknown else None)


def store(address: int, content: Any) -> None:
    if content:
        memoryview((ctypes.c_char * len(content)).from_address(address)).cast("B")[:] = content


class Address(Input):
    """An address, which is neither read nor written."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(call.caller.known(host_address(value)[0]))


class Registered(Input):
    """Memory that is registered, with its file if it is a shared mapping of one."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        address = host_address(value)[0]
        nbytes = whole(call.value(self.parameter.extent), 0, NONE, "size_t")
        out.word(call.caller.register(address))
        found = call.caller.registration(address, nbytes) if address and nbytes else None
        out.word(NONE if found is None else found[1])
        if found is not None:
            out.descriptor(found[0], own=True)

    def take(self, incoming: Incoming, run: Run) -> Any:
        address, offset = incoming.word(), incoming.word()
        descriptor = None if offset == NONE else incoming.descriptor()
        if descriptor is not None:
            run.received.append(descriptor)
            run.file = descriptor, offset
        return address


class Image(Input):
    """An image to load."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(image_bytes(value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.data()


class Options(Input):
    """Values of options: how many there are."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(NONE if value is None else len(value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        count = incoming.word()
        return None if count == NONE else [None] * count


class Parameters(Input):
    """The parameters of a kernel: `kernelParams` carries the block, whichever of the two forms it came in."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if self.name == "extra":
            return
        given = call.signature.given
        function = next(i for i, p in enumerate(given) if p.type == "CUfunction")
        extra = call.values[-1] if given[-1].name == "extra" else None
        layout = call.caller.layout(0 if call.values[function] is None else int(call.values[function]))
        block = None if layout is None else pack(layout, value, extra)
        out.data(block)
        if block is not None and layout is not None:
            out.word(len(layout.parameters))
            for offset, _ in layout.parameters:
                out.word(offset)

    def take(self, incoming: Incoming, run: Run) -> Any:
        if self.name == "extra":
            return 0
        block = incoming.data()
        if block is None:
            return None
        address, keep = lay_out(block, [incoming.word() for _ in range(incoming.word())])
        run.keep.append(keep)
        return address


class Descriptor(Input):
    """A file descriptor, which the caller keeps."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        try:
            number = host_address(value)[0]
            fcntl.fcntl(number, fcntl.F_GETFD)
        except (OSError, OverflowError, ValueError):
            out.word(NONE)
        else:
            out.descriptor(number, own=False)

    def take(self, incoming: Incoming, run: Run) -> Any:
        found = incoming.descriptor()
        if found is None:
            return -1
        run.received.append(found)
        return found


class Callback(Input):
    """A `size_t f(int)`, which the caller runs."""

    def take(self, incoming: Incoming, run: Run) -> Any:
        address = incoming.word()
        if not address:
            return 0

        def call(argument: int) -> int:
            return run.machine.call_back(address, argument)

        function = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(call)
        run.keep.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value


def attribute_scalar(attribute: Any) -> Scalar:
    """The type of an attribute's value."""
    kinds = ATTRIBUTES[type(attribute).__name__]
    name = next((k for k in kinds if attribute.name.endswith(f"_{k}")), None)
    found = scalar(kinds[name] if name else "unsigned long long")
    assert found is not None
    return found


class Attribute(Input):
    """The value of an attribute."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(whole(value, -(2**63), NONE, "an attribute"))

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.word()
