# SPDX-License-Identifier: Apache-2.0
"""The table of prototypes as data."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

from ..bindings import MAJOR
from .table import TABLE

_PROTOTYPE = re.compile(r"(?:(\d+): )?(cu\w+)\((.*?)\)")
_PARAMETER = re.compile(r"(?:(in|out|inout) )?(const )?([\w ]+?)(\**) (\w+)(?:\[(\w+)\])?(?: @(\w+))?")


@dataclass(frozen=True)
class Parameter:
    """One parameter: `const` `type` with so many `stars`; `mode` is "in", "out" or "inout", `extent` the parameter that
    counts its elements, `role` the word behind its @.
    """

    name: str
    type: str
    stars: int
    const: bool
    mode: str
    extent: str | None
    role: str | None

    @property
    def c(self) -> str:
        """Its type in C."""
        return f"{'const ' * self.const}{self.type}{'*' * self.stars}"

    @property
    def lent(self) -> bool:
        """Memory that the caller names and the call may write, which cuda.bindings take as an argument."""
        return self.mode == "out" and self.extent is not None and self.type in ("void", "CUdeviceptr") and not self.role

    @property
    def given(self) -> bool:
        """An argument of the function in Python."""
        return self.mode != "out" or self.lent

    @property
    def returned(self) -> bool:
        """A result of the function in Python."""
        return self.mode != "in" and not self.lent


@dataclass(frozen=True)
class Signature:
    """A function: its parameters in the order of C, its number in the table, and the major versions that have it."""

    name: str
    number: int
    parameters: tuple[Parameter, ...]
    majors: tuple[int, ...]

    @functools.cached_property
    def given(self) -> tuple[Parameter, ...]:
        """The arguments in Python; the numbers of elements that are wanted, which may be left out, are the last."""
        return tuple(p for p in self.parameters if p.given)

    @functools.cached_property
    def returned(self) -> tuple[Parameter, ...]:
        """The results in Python behind the CUresult."""
        return tuple(p for p in self.parameters if p.returned)

    def bind(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        """The arguments by position. Raises TypeError as a call of a Python function does."""
        if len(args) == len(self.given) and not kwargs:
            return args
        names = [p.name for p in self.given]
        if len(args) > len(names):
            raise TypeError(f"{self.name}() takes {len(names)} positional arguments but {len(args)} were given")
        found = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names:
                raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}")
            if name in found:
                raise TypeError(f"{self.name}() got multiple values for argument {name!r}")
            found[name] = value
        found = {p.name: 0 for p in self.given if p.mode == "inout" and p.stars and p.type == "size_t"} | found
        missing = [name for name in names if name not in found]
        if missing:
            raise TypeError(f"{self.name}() misses the argument {missing[0]!r}")
        return tuple(found[name] for name in names)


def _parameter(text: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError(f"a parameter that cannot be read: {text!r}")
    mode, const, kind, stars, name, extent, role = match.groups()
    default = "in" if const and len(stars) < 2 or not stars else "out"
    return Parameter(name, kind, len(stars), bool(const), mode or default, extent, role)


def read(table: str) -> list[Signature]:
    """All signatures of a table, those of other major versions too."""
    text = re.sub(r"//.*", "", table)
    found = []
    for number, prototype in enumerate(" ".join(text.split()).rstrip(";").split(";")):
        match = _PROTOTYPE.fullmatch(prototype.strip())
        if match is None:
            raise ValueError(f"a prototype that cannot be read: {prototype!r}")
        major, name, parameters = match.groups()
        majors = (int(major),) if major else (12, 13)
        parsed = tuple(_parameter(p) for p in parameters.split(", ") if p)
        found.append(Signature(name, number, parsed, majors))
    return found


ALL = read(TABLE)
SIGNATURES = {s.name: s for s in ALL if MAJOR in s.majors}
"""The functions of the installed bindings' major version, by name."""
DIGEST = hashlib.sha256(TABLE.encode()).hexdigest()[:16]
