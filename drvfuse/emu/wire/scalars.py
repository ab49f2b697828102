# SPDX-License-Identifier: Apache-2.0
"""C numbers: integers, floats, enums and handles. Each is one word of a message.

`read` converts the caller's value to the value that an emulated function gets, which is a number for a handle and a
member for an enum. `result` makes the object that cuda.bindings return.
"""

from __future__ import annotations

import functools
from typing import Any

from ..bindings import T
from .arguments import Invalid, real, whole

_INTEGERS = {
    "int": (-(2**31), 2**31 - 1),
    "unsigned int": (0, 2**32 - 1),
    "unsigned": (0, 2**32 - 1),
    "unsigned char": (0, 2**8 - 1),
    "unsigned short": (0, 2**16 - 1),
    "size_t": (0, 2**64 - 1),
    "unsigned long long": (0, 2**64 - 1),
    "void*": (0, 2**64 - 1),
}
_WORDS = {
    "unsigned": "unsigned int",
    "unsigned long long": "unsigned PY_LONG_LONG",
    "void*": "unsigned PY_LONG_LONG",
}
"""The names of types in Cython's messages that differ from their names in C."""

_HANDLES = {
    "CUdevice": ("int", "int"),
    "CUlogIterator": ("unsigned int", "unsigned int"),
    "cuuint32_t": ("unsigned int", "uint32_t"),
    "cuuint64_t": ("size_t", "uint64_t"),
}
"""(range, name in messages) of classes of the bindings that represent numbers, not pointers."""


class Scalar:
    """A C integer of type `c`. `code` is its format in `struct`."""

    code = "Q"

    def __init__(self, c: str) -> None:
        self.c = c
        self.least, self.most = _INTEGERS[c]
        self._words = _WORDS.get(c, c)
        if self.least < 0:
            self.code = "q"

    def read(self, value: Any) -> Any:
        """Read an argument as cuda.bindings do. Raises TypeError, OverflowError, ValueError or Invalid."""
        if type(value) is int and self.least <= value <= self.most:
            return value
        return whole(value, self.least, self.most, self._words)

    def given(self, word: Any) -> Any:
        """The value that `read` has returned in the caller's process, made from `word`, its number in the message."""
        return word

    def raw(self, value: Any) -> int | float:
        """A result as a number."""
        return int(value)

    def result(self, word: Any) -> Any:
        """The object that cuda.bindings return for a number."""
        return word


class Real(Scalar):
    code = "d"

    def __init__(self) -> None:
        self.c = "float"

    def read(self, value: Any) -> float:
        return real(value)

    def raw(self, value: Any) -> float:
        return float(value)


class Boolean(Scalar):
    def __init__(self) -> None:
        self.c = "bool"
        self.least, self.most = 0, 1

    def read(self, value: Any) -> bool:
        return bool(value)

    def result(self, word: Any) -> bool:
        return bool(word)


class Enumeration(Scalar):
    """An enum. The bindings accept all values that `int` accepts, and the driver refuses numbers that are no
    members.
    """

    code = "q"

    def __init__(self, c: str) -> None:
        self.c, self.kind = c, getattr(T, c)
        self.members = {int(member): member for member in self.kind}

    def read(self, value: Any) -> Any:
        if type(value) is self.kind:
            return value
        found = self.members.get(whole(int(value), -(2**31), 2**32 - 1, f"{self.c}_enum"))
        if found is None:
            raise Invalid
        return found

    def given(self, word: Any) -> Any:
        return self.members.get(word) or self.kind(word)

    result = given


class Handle(Scalar):
    """A number that cuda.bindings wrap in a class: a handle, a device pointer or a device. None is 0."""

    def __init__(self, c: str) -> None:
        self.c, self.kind = c, getattr(T, c)
        plain, self._words = _HANDLES.get(c, ("size_t", "unsigned PY_LONG_LONG"))
        self.least, self.most = _INTEGERS[plain]
        self.code = "q" if self.least else "Q"

    def read(self, value: Any) -> int:
        if type(value) is self.kind:
            return int(value)
        return 0 if value is None else super().read(value)

    def result(self, word: Any) -> Any:
        return self.kind(word)


@functools.cache
def scalar(c: str) -> Scalar | None:
    """The Scalar of a C type. None if the type is no number."""
    if c in _INTEGERS:
        return Scalar(c)
    if c == "float":
        return Real()
    if c == "bool":
        return Boolean()
    kind = getattr(T, c, None)
    if kind is None or not isinstance(kind, type):
        return None
    if hasattr(kind, "__members__"):
        return Enumeration(c)
    return Handle(c) if hasattr(kind, "__int__") else None
