# SPDX-License-Identifier: Apache-2.0
"""The kinds of arguments. `read` converts the caller's value, as cuda.bindings do, to the value that the emulated
function gets. `put` writes the converted value to a message in the caller's process, and `take` reads it in the
machine's process.

A `void*` is converted to an address (an `arguments.Address` if an object must be kept alive), an image to its bytes, a
C string to bytes, and a list to a list. `complete` finishes a value that depends on other arguments, such as the length
of a list, after all arguments have been read. Host memory is in `host_inputs`, code and its parameters in
`code_inputs`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

from ..space import mapped
from .arguments import Address, Invalid, items, text, type_name
from .calls import Call, Run
from .message import Incoming, Outgoing
from .scalars import Enumeration, Handle, Scalar, scalar
from .signatures import Parameter
from .structs import LaunchConfig, Structure
from .table import ATTRIBUTES

_MOST_WANTED = 1 << 24
_FILES = ("fname", "fileName", "path", "pathToFile")


class Input:
    """Base class of the kinds of arguments. It is itself the kind of arguments that are one number, which may be
    wrapped in a class of the bindings, such as a handle.
    """

    dependent = False
    """True for a kind whose value depends on other arguments. `complete` is called only for these kinds."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter, self.name = parameter, parameter.name
        found = scalar(parameter.type if parameter.type != "void" else "void*")
        self.scalar: Scalar = found or Scalar("void*")
        self.places: dict[str, int] = {}  # the positions of all arguments of the function, by name

    def read(self, value: Any) -> Any:
        """Read the caller's value. Raises TypeError, OverflowError, ValueError and so on, as the bindings do, or
        Invalid.
        """
        return self.scalar.read(value)

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        """The final value, after all arguments have been read. Raises what `read` raises."""
        return value

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(int(value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        word = incoming.word()
        if self.scalar.code == "q" and word >> 63:
            word -= 1 << 64
        return self.scalar.given(word)


class Wanted(Input):
    """How many elements of a result the caller wants. The bindings allocate memory for them, so a number for which
    they would not get the memory raises MemoryError.
    """

    def read(self, value: Any) -> int:
        count: int = self.scalar.read(value)
        if count > _MOST_WANTED:
            raise MemoryError(f"Failed to allocate length x size memory: {count}x8")
        return count


class Member(Input):
    """An argument of an enum type. The bindings raise TypeError if it is None."""

    def read(self, value: Any) -> Any:
        if value is None:
            raise TypeError(f"Argument {self.name!r} must not be None")
        return self.scalar.read(value)


class Kind(Member):
    """An enum argument that decides the type of another argument or of a result. As in the bindings, the enum's value
    must have the attributes `value` and `name`.
    """

    def read(self, value: Any) -> Any:
        if value is None:
            return super().read(value)
        int(value)
        number, kind = value.value, cast(Enumeration, self.scalar)
        if number not in kind.members:
            raise TypeError(f"Unsupported attribute: {value.name}")
        return kind.members[number]


class Moved(Input):
    """An object of the bindings that holds a position (CUlogIterator). The call advances the position. None means
    position 0.
    """

    def read(self, value: Any) -> int:
        kind = cast(Handle, self.scalar).kind
        if value is None:
            return 0
        if not isinstance(value, kind):
            expected = f"cuda.bindings.driver.{self.scalar.c}"
            raise TypeError(f"Argument {self.name!r} has incorrect type (expected {expected}, got {type_name(value)})")
        return Address.of(int(value), value)


class List(Input):
    """A list, or None for an empty one. The bindings compare its length with the count, except for @uncounted lists."""

    dependent = True

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        count = int(others[self.places[self.parameter.extent or ""]])
        if count > len(value):
            if self.parameter.role == "uncounted":
                if value:
                    raise Invalid  # the driver would read `count` elements, beyond the end of the list
                return value  # an empty list, for which the bindings pass NULL to the driver
            raise RuntimeError(f"List is too small: {len(value)} < {count}")
        return value


class Array(List):
    """A list whose elements are of the kind `Input`: numbers, members of one enum, or handles of one class."""

    def read(self, value: Any) -> Any:
        if isinstance(self.scalar, Enumeration | Handle):
            value, kind, c = [] if value is None else value, self.scalar.kind, self.scalar.c
            expected = f"cydriver.{c}{',' * isinstance(self.scalar, Handle)}"
            found = items(value, lambda item: isinstance(item, kind), expected, self.name)
        else:
            found = items(list(value), lambda item: isinstance(item, int), "int", self.name)
            # The bindings call `len`, which raises TypeError for an iterable without a length, such as a generator.
            len(value)
        return [self.scalar.read(item) for item in found]

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for item in value:
            super().put(out, item, call)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return [super(Array, self).take(incoming, run) for _ in range(incoming.word())]


class Struct(Input):
    """A structure. A structure that is passed by a pointer may be None."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__(parameter)
        self.kind = LaunchConfig() if parameter.type == "CUlaunchConfig" else Structure(parameter.type)

    def read(self, value: Any) -> Any:
        if isinstance(value, self.kind.kind):
            return self.kind.checked(value)
        if value is None and self.parameter.stars:
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
        found = items(value, lambda item: isinstance(item, kind), f"cydriver.{self.kind.c},", self.name)
        return [self.kind.checked(item) for item in found]

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(b"".join(self.kind.bytes_of(item) for item in value))

    def take(self, incoming: Incoming, run: Run) -> Any:
        content, size = incoming.data() or b"", self.kind.size
        return [self.kind.made_of(content[i : i + size]) for i in range(0, len(content), size)]


class Text(Input):
    """A C string. The name of a file becomes an absolute path, as the machine has another working directory."""

    def read(self, value: Any) -> bytes:
        return text(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(os.path.abspath(value) if self.name in _FILES and value else value)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.data()


def attribute_scalar(attribute: Any) -> Scalar:
    """The type of an attribute's value."""
    kinds = ATTRIBUTES[type(attribute).__name__]
    name = next((k for k in kinds if attribute.name.endswith(f"_{k}")), None)
    found = scalar(kinds[name] if name else "unsigned long long")
    assert found is not None
    return found


class Attribute(Input):
    """The value of an attribute, whose type depends on the attribute. If the type is a class of the bindings, the value
    is an object of that class.
    """

    dependent = True

    def read(self, value: Any) -> Any:
        return value

    def complete(self, value: Any, others: Sequence[Any]) -> int:
        attribute = next(other for other in others if type(other).__name__ in ATTRIBUTES)
        kind = attribute_scalar(attribute)
        if isinstance(kind, Handle):
            content = mapped.copied(int(value.getPtr()), 8)
            if content is None:
                raise Invalid
            return int.from_bytes(content, "little")
        return int(kind.read(value))

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(value)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.word()
