# SPDX-License-Identifier: Apache-2.0
"""Structures and enums that Python and the native runtime share, each declared once.

`@layout` gives a ctypes structure its members from their declarations in C++, which `header` copies to the native
runtime. Both sides lay members out by the rules of C. In Python, a pointer is an integer. `@in_cxx` registers an enum,
which `header` writes in C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import Structure, c_uint8, c_uint32, c_uint64, sizeof
from enum import IntEnum
from typing import Any, TypeVar

DECLARATIONS: dict[str, tuple[str, ...]] = {}
"""The declarations of members by the name of a structure, as "type name, name[count], ...", in order of definition."""

ENUMS: dict[type[IntEnum], str] = {}
"""The prefix that the names of an enum's members have in C++, by the enum."""

_E = TypeVar("_E", bound=type[IntEnum])
_S = TypeVar("_S", bound=type[Structure])
_TYPES: dict[str, Any] = {"u8": c_uint8, "u32": c_uint32, "u64": c_uint64, "Ref": c_uint32}
_MEMBER = re.compile(r"(\w+)(?:\[(\d+)\])?")


def in_cxx(prefix: str) -> Callable[[_E], _E]:
    """Register an enum whose members have names in C++ that begin with `prefix`."""

    def registered(enum: _E) -> _E:
        ENUMS[enum] = prefix
        return enum

    return registered


def layout(*declarations: str) -> Callable[[_S], _S]:
    """Give a structure its members, and register the declarations under its name."""

    def laid_out(structure: _S) -> _S:
        fields = []
        for declaration in declarations:
            type_, _, members = declaration.partition(" ")
            element = c_uint64 if type_.endswith("*") else _TYPES[type_]
            for name, count in _MEMBER.findall(members):
                fields.append((name, element * int(count) if count else element))
        structure._fields_ = fields
        DECLARATIONS[structure.__name__] = declarations
        _TYPES[structure.__name__] = structure
        return structure

    return laid_out


def offset(structure: type[Structure], member: str, index: int = 0) -> int:
    """The offset of a member of a structure, or of one element of a member that is an array."""
    field = getattr(structure, member)
    element: Any = dict(structure._fields_)[member]  # type: ignore[arg-type]
    return int(field.offset) + (index * sizeof(element._type_) if index else 0)
