# SPDX-License-Identifier: Apache-2.0
"""Structures that the host and the kernels share. The kernels' sources define them, and the host reads the definitions
there, so each layout is written once, beside the comments that explain it.

The decorator `laid_out` gives a `ctypes.Structure` the fields of a C++ structure. It understands what such structures
need: integers, floats, pointers (integers of 64 bits on the host), arrays, other structures that are laid out, and
lines between `#if MACRO` or `#ifdef MACRO` and `#endif`. Member functions are skipped, and anything else is refused. A
C++ structure that extends another one is laid out as a Python class that extends that one's class; the base structures
have no padding at their ends, so ctypes and C++ compilers agree on the place of the first field that is added.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

CU = Path(__file__).parent / "cu"
_TYPES: dict[str, Any] = {
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "int": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}
S = TypeVar("S", bound=ctypes.Structure)


class Definition(NamedTuple):
    """Where a structure is defined: the file, the name there, the macros by which fields are chosen, and the structures
    that are parts of it."""

    file: str
    name: str
    macros: tuple[str, ...]
    parts: tuple[type[ctypes.Structure], ...]


DEFINITIONS: dict[type[ctypes.Structure], Definition] = {}
"""The definition of every class that is laid out."""


def laid_out(
    file: str,
    name: str = "",
    macros: tuple[str, ...] = (),
    *,
    parts: tuple[type[ctypes.Structure], ...] = (),
    sizes: Mapping[str, int] | None = None,
) -> Callable[[type[S]], type[S]]:
    """Return a decorator that gives a class the fields of the structure `name` (by default, the class's own name) in
    the file `file` of `drvfuse/cu`. `macros` are those that are not 0, `parts` are the structures that are types of
    fields, and `sizes` are the values of the names in sizes of arrays."""

    def decorate(kind: type[S]) -> type[S]:
        found = Definition(file, name or kind.__name__, macros, parts)
        kind._fields_ = list(_fields(found, sizes or {}))
        DEFINITIONS[kind] = found
        return kind

    return decorate


def body(found: Definition) -> str:
    """Return the text between the braces of a structure, without comments, functions and the lines that `macros` leave
    out."""
    text = _text(found.file)
    start = re.search(rf"^struct {found.name}\b[^;{{]*{{", text, re.MULTILINE)
    if start is None:
        raise LookupError(f"{found.file} does not define struct {found.name}")
    end = start.end()
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    inside, kept, taken = re.sub(r"//.*", "", text[start.end() : end - 1]), [], [True]
    for line in inside.splitlines():
        directive = re.match(r"\s*#(?:if|ifdef) (\w+)\s*$", line)
        if directive:
            taken.append(directive[1] in found.macros)
        elif line.strip() == "#endif":
            taken.pop()
        elif all(taken):
            kept.append(line)
    return re.sub(r"[^;{}]*\([^()]*\)[^;{}]*{(?:[^{}]|{[^{}]*})*}", "", "\n".join(kept))


def _fields(found: Definition, sizes: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    types = _TYPES | {DEFINITIONS[part].name: part for part in found.parts}
    for declaration in filter(None, map(str.strip, body(found).split(";"))):
        parts = re.fullmatch(r"(?:const )?(\w+)(\*?) (\w+(?:\[[^]]+\])?(?:, \w+)*)", declaration)
        if parts is None:
            raise SyntaxError(f"{found.file}, struct {found.name}: {declaration!r} is no field that the host can read")
        of_all: Any = ctypes.c_uint64 if parts[2] else types[parts[1]]
        for field in parts[3].split(", "):
            field, _, size = field.rstrip("]").partition("[")
            yield field, of_all * _number(size, sizes) if size else of_all


def _number(size: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a size: a sum of numbers and names."""
    return sum(int(term) if term.isdigit() else sizes[term] for term in size.split(" + "))


def record(kind: type[ctypes.Structure], itemsize: int) -> np.dtype[Any]:
    """Return the numpy dtype of a structure, of which each takes `itemsize` bytes."""
    fields: Any = np.dtype(kind).fields
    names, formats, offsets = list(fields), [of[0] for of in fields.values()], [of[1] for of in fields.values()]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


@functools.cache
def _text(file: str) -> str:
    return (CU / file).read_text()
