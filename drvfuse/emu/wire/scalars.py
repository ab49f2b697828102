# SPDX-License-Identifier: Apache-2.0
"""Numbers of C: integers, floats, enums, handles. Each is one word of a message."""

from __future__ import annotations

import functools
from typing import Any

from ..bindings import T
from .arguments import is_enum, whole

_INTEGERS = {
    "int": (-(2**31), 2**31 - 1),
    "unsigned int": (0, 2**32 - 1),
    "unsigned char": (0, 2**8 - 1),
    "unsigned short": (0, 2**16 - 1),
    "size_t": (0, 2**64 - 1),
    "unsigned long long": (0, 2**64 - 1),
    "void*": (0, 2**64 - 1),
}


class Scalar:
    """A C integer of type `c`. `code` is its form in `struct`."""

    code = "Q"

    def __init__(self, c: str) -> None:
        self.c = c
        self.least, self.most = _INTEGERS[c]
        if self.least < 0:
            self.code = "q"

    def read(self, value: Any, argument: str) -> int | float:
        """The number of an argument, as cuda.bindings read it. Raises TypeError or OverflowError."""
        return whole(value, self.least, self.most, self.c)

    def given(self, word: Any) -> Any:
        """What the emulated function gets."""
        return word

    def raw(self, value: Any) -> int | float:
        """The number of a result."""
        return int(value)

    def result(self, word: Any) -> Any:
        """The result that cuda.bindings give."""
        return word


class Real(Scalar):
    code = "d"

    def __init__(self) -> None:
        self.c = "float"

    def read(self, value: Any, argument: str) -> float:
        return float(value)

    def raw(self, value: Any) -> float:
        return float(value)


class Boolean(Scalar):
    def __init__(self) -> None:
        self.c = "bool"
        self.least, self.most = 0, 1

    def result(self, word: Any) -> bool:
        return bool(word)


class Enumeration(Scalar):
    code = "q"

    def __init__(self, c: str) -> None:
        self.c, self.kind = c, getattr(T, c)
        self._members = {int(member): member for member in self.kind}

    def read(self, value: Any, argument: str) -> int:
        is_enum(value, self.kind, argument)
        return int(value)

    def given(self, word: Any) -> Any:
        return self._members.get(word) or self.kind(word)

    result = given


class Handle(Scalar):
    """What cuda.bindings wrap into a class: handles, device pointers, devices. None is 0."""

    def __init__(self, c: str) -> None:
        self.c, self.kind = c, getattr(T, c)
        self.least, self.most = _INTEGERS["int" if c == "CUdevice" else "size_t"]
        self.code = "q" if self.least else "Q"

    def read(self, value: Any, argument: str) -> int:
        return 0 if value is None else whole(value, self.least, self.most, self.c)

    def result(self, word: Any) -> Any:
        return self.kind(word)


@functools.cache
def scalar(c: str) -> Scalar | None:
    """The scalar of a C type, None if it is something else."""
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
