# SPDX-License-Identifier: Apache-2.0
"""The signatures of the driver functions, parsed from the table of their C prototypes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from dataclasses import dataclass

from ..bindings import MAJOR
from .table import TABLE

_PROTOTYPE = re.compile(r"(?:(\d+): )?(cu\w+)\((.*?)\)")
_PARAMETER = re.compile(r"(?:(in|out|inout) )?(const )?([\w ]+?)(\**) (\w+)(?:\[(\w+)\])?(?: @(\w+))?")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a prototype: its `type`, whether it is `const`, and `stars`, the number of `*` after the type.
    `mode` is "in", "out" or "inout". `extent` is the name of the parameter that has the number of elements, and `role`
    is the annotation, the word after @.
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
        """The C type of the parameter."""
        return f"{'const ' * self.const}{self.type}{'*' * self.stars}"

    @property
    def lent(self) -> bool:
        """Whether the parameter is an argument of the Python function and points to memory of the caller that the call
        may write.
        """
        return (
            self.mode == "out" and not self.role and (self.memory or (self.type == "void" and self.extent is not None))
        )

    @property
    def memory(self) -> bool:
        """Whether the parameter is a device pointer that may also be the address of host memory."""
        return self.type == "CUdeviceptr" and not self.stars and self.extent is not None

    @property
    def given(self) -> bool:
        """Whether the parameter is an argument of the Python function."""
        return self.mode != "out" or self.lent

    @property
    def returned(self) -> bool:
        """Whether the parameter is a result of the Python function."""
        return self.mode != "in" and not self.lent


@dataclass(frozen=True)
class Signature:
    """A function: its parameters in the order of C, its number in the table, and the major versions of cuda.bindings
    that have it.
    """

    name: str
    number: int
    parameters: tuple[Parameter, ...]
    majors: tuple[int, ...]

    @functools.cached_property
    def given(self) -> tuple[Parameter, ...]:
        """The parameters that are arguments of the Python function."""
        return tuple(p for p in self.parameters if p.given)

    @functools.cached_property
    def returned(self) -> tuple[Parameter, ...]:
        """The parameters that are results of the Python function, after the CUresult."""
        return tuple(p for p in self.parameters if p.returned)

    def bind(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        """The arguments by position. Raises TypeError with the messages of a function that Cython has compiled."""
        names = [p.name for p in self.given]
        found = dict(zip(names, args, strict=False))
        if kwargs and not names:
            raise TypeError(f"{self.name}() takes no keyword arguments")
        if len(args) > len(names):
            raise self._miscounted(len(args))
        for name, value in kwargs.items():
            if name not in names:
                raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}")
            if name in found:
                raise TypeError(f"{self.name}() got multiple values for keyword argument {name!r}")
            found[name] = value
        defaults = dict.fromkeys(self._left_out, 0)
        if any(name not in found and name not in defaults for name in names):
            raise self._miscounted(len(args))
        return tuple((defaults | found)[name] for name in names)

    @property
    def _left_out(self) -> list[str]:
        """The parameters that a call may leave out: those that give the number of elements wanted in a result."""
        last = itertools.takewhile(lambda p: p.mode == "inout" and p.type == "size_t", reversed(self.given))
        return [p.name for p in last]

    def _miscounted(self, given: int) -> TypeError:
        most = len(self.given)
        if not most:
            return TypeError(f"{self.name}() takes no arguments ({given} given)")
        least = most - len(self._left_out)
        number = least if given < least else most
        bound = "exactly" if least == most else "at least" if given < least else "at most"
        plural = "" if number == 1 else "s"
        return TypeError(f"{self.name}() takes {bound} {number} positional argument{plural} ({given} given)")


def _parameter(text: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError(f"a parameter that cannot be read: {text!r}")
    mode, const, kind, stars, name, extent, role = match.groups()
    default = "in" if const and len(stars) < 2 or not stars else "out"
    return Parameter(name, kind, len(stars), bool(const), mode or default, extent, role)


def read(table: str) -> list[Signature]:
    """All signatures of a table, including those of other major versions of cuda.bindings."""
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
