# SPDX-License-Identifier: Apache-2.0
"""Each kind of argument: `read` makes what the emulated function gets of what the caller gave, as cuda.bindings read
it; `put` writes that at the caller's end and `take` makes it again at the machine's.

A `void*` becomes an address (`arguments.Address` where something has to stay alive), an image its bytes, a C string
bytes, a list a list. What depends on other arguments, as the length of a list does, is read by `complete`, when all
have been read on their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from collections.abc import Sequence
from typing import Any, cast

from . import jit_options, mapped
from .arguments import Address, Invalid, bytes_address, host_address, image_bytes, items, text, type_name
from .calls import Call, Run
from .message import NONE, Incoming, Outgoing
from .parameters import KernelParameters, lay_out, pack
from .scalars import Enumeration, Handle, Scalar, scalar
from .signatures import Parameter
from .structs import CUDA_LAUNCH_PARAMS, LaunchConfig, Structure
from .table import ATTRIBUTES

_MOST_WANTED = 1 << 24
_FILES = ("fname", "fileName", "path", "pathToFile")


class Input:
    """An argument. This one is a number."""

    dependent = False
    """True for a kind that has `complete`."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter, self.name = parameter, parameter.name
        found = scalar(parameter.type if parameter.type != "void" else "void*")
        self.scalar: Scalar = found or Scalar("void*")
        self.places: dict[str, int] = {}  # of all arguments of the function, by name

    def read(self, value: Any) -> Any:
        """Raises TypeError, OverflowError, ValueError and the like as the bindings do, or Invalid."""
        return self.scalar.read(value)

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        """The same with what was read of all arguments."""
        raise NotImplementedError

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(int(value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        word = incoming.word()
        if self.scalar.code == "q" and word >> 63:
            word -= 1 << 64
        return self.scalar.given(word)


class Wanted(Input):
    """How many elements of a result are wanted, for which the bindings allocate memory."""

    def read(self, value: Any) -> int:
        count: int = self.scalar.read(value)
        if count > _MOST_WANTED:
            raise MemoryError(f"Failed to allocate length x size memory: {count}x8")
        return count


class Member(Input):
    """A member of an enum, which None is not."""

    def read(self, value: Any) -> Any:
        if value is None:
            raise TypeError(f"Argument {self.name!r} must not be None")
        return self.scalar.read(value)


class Kind(Member):
    """What says of which type another argument or a result is. The bindings take its `value` and its `name` too."""

    def read(self, value: Any) -> Any:
        if value is None:
            return super().read(value)
        int(value)
        number, kind = value.value, cast(Enumeration, self.scalar)
        if number not in kind.members:
            raise TypeError(f"Unsupported attribute: {value.name}")
        return kind.members[number]


class Moved(Input):
    """A number in an object of the bindings that the call moves on. It keeps the object; None is 0."""

    def read(self, value: Any) -> int:
        kind = cast(Handle, self.scalar).kind
        if value is None:
            return 0
        if not isinstance(value, kind):
            expected = f"cuda.bindings.driver.{self.scalar.c}"
            raise TypeError(f"Argument {self.name!r} has incorrect type (expected {expected}, got {type_name(value)})")
        return Address.of(int(value), value)


class Buffer(Input):
    """Memory that the call writes, as bytes of Python, which it keeps."""

    def read(self, value: Any) -> Address:
        return bytes_address(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(value.keep.nbytes)
        call.lent.append(functools.partial(_store, int(value)))

    def take(self, incoming: Incoming, run: Run) -> Address:
        return lent_to(run, incoming.word())


def lent_to(run: Run, nbytes: int) -> Address:
    """Memory of so many bytes that goes back to the caller."""
    address = run.lend(nbytes)
    return Address.of(address, memoryview(run.lent[-1])[:nbytes])


class List(Input):
    """A list, or None for an empty one. The bindings compare its length with the count, but for some (@uncounted)."""

    dependent = True

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        count = int(others[self.places[self.parameter.extent or ""]])
        if count > len(value):
            if self.parameter.role == "uncounted":
                if value:
                    raise Invalid  # the driver would read behind the end
                return value  # the driver gets NULL
            raise RuntimeError(f"List is too small: {len(value)} < {count}")
        return value


class Array(List):
    """A list of numbers."""

    def read(self, value: Any) -> Any:
        if isinstance(self.scalar, Enumeration | Handle):
            value, kind, c = [] if value is None else value, self.scalar.kind, self.scalar.c
            expected = f"cydriver.{c}{',' * isinstance(self.scalar, Handle)}"
            found = items(value, lambda item: isinstance(item, kind), expected, self.name)
        else:
            found = items(list(value), lambda item: isinstance(item, int), "int", self.name)
            len(value)  # the bindings raise where it has none
        return [self.scalar.read(item) for item in found]

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for item in value:
            super().put(out, item, call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return [super(Array, self).take(incoming, run) for _ in range(incoming.word())]


class Struct(Input):
    """A structure, or None where it is passed by a pointer."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__(parameter)
        self.kind = LaunchConfig() if parameter.type == "CUlaunchConfig" else Structure(parameter.type)

    def read(self, value: Any) -> Any:
        if isinstance(value, self.kind.kind) or (value is None and self.parameter.stars):
            return value
        expected = f"cuda.bindings.driver.{self.kind.c}"
        raise TypeError(f"Argument {self.name!r} has incorrect type (expected {expected}, got {type_name(value)})")

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(None if value is None else self.kind.bytes_of(value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content = incoming.data()
        return None if content is None else self.kind.made_of(content)


class StructArray(List):
    """A list of structures."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__(parameter)
        self.kind = Structure(parameter.type)

    def read(self, value: Any) -> Any:
        kind = self.kind.kind
        value = [] if value is None else value
        return items(value, lambda item: isinstance(item, kind), f"cydriver.{self.kind.c},", self.name)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(b"".join(self.kind.bytes_of(item) for item in value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content, size = incoming.data() or b"", self.kind.size
        return [self.kind.made_of(content[i : i + size]) for i in range(0, len(content), size)]


class Text(Input):
    """A C string. The name of a file becomes absolute, as the machine has another working directory."""

    def read(self, value: Any) -> bytes:
        return text(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(os.path.abspath(value) if self.name in _FILES and value else value)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.data()


class HostMemory(Input):
    """Memory of the caller: a `void*` takes buffers too, a device pointer does not."""

    def read(self, value: Any) -> Any:
        return host_address(value) if self.parameter.type == "void" else self.scalar.read(value)


class Lent(HostMemory):
    """Memory of so many bytes as another argument says, which a buffer has to have."""

    dependent = True

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        nbytes = others[self.places[self.parameter.extent or ""]]
        if type(value) is Address and nbytes > value.keep.nbytes:
            raise Invalid(f"{self.name!r} is a buffer of {value.keep.nbytes} bytes, and the call is about {nbytes}")
        return value


class Source(Lent):
    """Memory that the call reads: an address that the machine knows, or the bytes."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        put_bytes(out, value, call.value(self.parameter.extent), call)
        call.keep.append(value)

    def take(self, incoming: Incoming, run: Run) -> int:
        return take_bytes(incoming, run)


class Target(Lent):
    """Memory that the call writes before it returns, unless the machine knows it."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        put_target(out, value, call.value(self.parameter.extent), call)
        call.keep.append(value)

    def take(self, incoming: Incoming, run: Run) -> int:
        return take_target(incoming, run)


def put_bytes(out: Outgoing, address: int, nbytes: int, call: Call) -> None:
    """An address, with the bytes there if the machine does not know it. Raises Invalid where they cannot be read."""
    known = call.caller.shared(address)
    unknown = known is None and address
    if unknown and not mapped.readable(address, nbytes):
        raise Invalid
    out.word(address if known is None else known)
    out.data((ctypes.c_char * nbytes).from_address(address) if unknown and nbytes else b"" if unknown else None)


def take_bytes(incoming: Incoming, run: Run) -> int:
    """The address of what `put_bytes` has written."""
    address, content = incoming.word(), incoming.view()
    return address if content is None else _brought(run.memory(content), address)


def _brought(here: int, there: int) -> Address:
    """Memory that has come along with a call."""
    made = Address(here)
    made.origin = there
    return made


def put_target(out: Outgoing, address: int, nbytes: int, call: Call) -> None:
    """An address, with the bytes that the call lends there if the machine does not know it. Raises Invalid where they
    cannot be written.
    """
    known = call.caller.shared(address)
    if known is None and address and not mapped.writable(address, nbytes):
        raise Invalid
    out.word(address if known is None else known)
    out.word(NONE if known is not None or not address else nbytes)
    if known is None and address:
        call.lent.append(functools.partial(_store, int(address)))


def take_target(incoming: Incoming, run: Run) -> int:
    """The address of what `put_target` has lent."""
    address, nbytes = incoming.word(), incoming.word()
    if nbytes == NONE:
        return address
    made = _brought(run.lend(nbytes), address)
    made.keep = run.lent[-1]
    return made


def _store(address: int, content: Any) -> None:
    if content:
        memoryview((ctypes.c_char * len(content)).from_address(address)).cast("B")[:] = content


class Host(HostMemory):
    """An address, which is neither read nor written."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(call.caller.known(value))


class Registered(HostMemory):
    """Memory that is registered, with its file if it is a shared mapping of one."""

    dependent = True

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        if value and not mapped.readable(value, others[self.places[self.parameter.extent or ""]]):
            raise Invalid
        return value

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        nbytes = call.value(self.parameter.extent)
        out.word(call.caller.register(value))
        found = call.caller.registration(value, nbytes) if value and nbytes else None
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
    """An image to load, as bytes; None for none."""

    def read(self, value: Any) -> bytes | None:
        return image_bytes(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(value)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.data()


class Options(List):
    """Values of options, whose types follow from the list of options in front. Numbers travel; lists do not, nor do
    buffers, into which the caller's end writes what the machine says of a call that fails.
    """

    def read(self, value: Any) -> Any:
        return [] if value is None else value

    def complete(self, value: Any, others: Sequence[Any]) -> list[Any]:
        found = [
            jit_options.read(option, item)
            for option, item in zip(others[self.places[self._options]], value, strict=False)
        ]
        super().complete(value, others)
        return found

    @property
    def _options(self) -> str:
        return {"libraryOptionValues": "libraryOptions", "jitOptionsValues": "jitOptions"}.get(self.name, "options")

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for option, item in zip(call.value(self._options), value, strict=False):
            number = isinstance(item, int | float) and not jit_options.is_buffer(option)
            out.word(int(item) if number else 0)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return [incoming.word() for _ in range(incoming.word())]


class Parameters(Input):
    """The parameters of a kernel: `kernelParams` carries the block, whichever of the two forms it came in."""

    def read(self, value: Any) -> Any:
        return self.scalar.read(value) if self.name == "extra" else KernelParameters.read(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if self.name == "extra":
            return
        given = call.signature.given
        function = next(i for i, p in enumerate(given) if p.type == "CUfunction")
        extra = call.values[-1] if given[-1].name == "extra" else 0
        layout = call.caller.layout(call.values[function])
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
            return 0
        address, keep = lay_out(block, [incoming.word() for _ in range(incoming.word())])
        run.keep.append(keep)
        return address


class LaunchArray(StructArray):
    """A list of launches (CUDA_LAUNCH_PARAMS), each with the block of its parameters."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for item in value:
            p = CUDA_LAUNCH_PARAMS.from_buffer_copy(self.kind.bytes_of(item))
            layout = call.caller.layout(p.function or 0)
            block = None if layout is None else pack(layout, p.kernelParams or 0, 0)
            out.data(bytes(p))
            out.data(block)
            offsets = [offset for offset, _ in layout.parameters] if layout is not None and block is not None else []
            for word in (len(offsets), *offsets):
                out.word(word)

    def take(self, incoming: Incoming, run: Run) -> Any:
        found = []
        for _ in range(incoming.word()):
            p = CUDA_LAUNCH_PARAMS.from_buffer_copy(incoming.data() or b"")
            block, offsets = incoming.data(), [incoming.word() for _ in range(incoming.word())]
            p.kernelParams, keep = (0, None) if block is None else lay_out(block, offsets)
            run.keep.append(keep)
            found.append(self.kind.made_of(bytes(p)))
        return found


class Descriptor(HostMemory):
    """A file descriptor, which the caller keeps."""

    def read(self, value: Any) -> int:
        number = host_address(value)
        return number if number < 1 << 31 else -1

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        try:
            fcntl.fcntl(value, fcntl.F_GETFD)
        except (OSError, OverflowError, ValueError):
            out.word(NONE)
        else:
            out.descriptor(value, own=False)

    def take(self, incoming: Incoming, run: Run) -> Any:
        found = incoming.descriptor()
        if found is None:
            return -1
        run.received.append(found)
        return found


class Function(Input):
    """A function of the caller."""

    def read(self, value: Any) -> int:
        address: int = self.scalar.read(value)
        if address and not mapped.executable(address):
            raise Invalid
        return address


class Callback(Function):
    """A `size_t f(int)`, which is called before the call returns."""

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
    """The value of an attribute, whose type is that attribute's: what is a class in the bindings is given as one."""

    dependent = True

    def read(self, value: Any) -> Any:
        return value

    def complete(self, value: Any, others: Sequence[Any]) -> int:
        attribute = next(other for other in others if type(other).__name__ in ATTRIBUTES)
        kind = attribute_scalar(attribute)
        if isinstance(kind, Handle):
            return ctypes.c_uint64.from_address(int(value.getPtr())).value
        return int(kind.read(value))

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(value)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.word()
