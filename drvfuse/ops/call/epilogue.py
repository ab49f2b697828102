# SPDX-License-Identifier: Apache-2.0
"""Element-wise epilogues: a CUDA C++ expression that is applied to each fp32 sum before the sum is rounded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ... import dtypes
from ...dtypes import DType
from ...errors import ArgumentError, foreign, shown

IN_SCOPE = ("x", "i", "row", "col", "rank")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_FORBIDDEN = re.compile(r"[;{}#\\\n\r]|//|/\*")
_KEYWORDS = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr
    const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern false
    float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq
    private protected public register reinterpret_cast return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned
    using virtual void volatile wchar_t while xor xor_eq""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Scalar:
    """A scalar parameter of a fixed type. Made by `float32` and `int32`."""

    dtype: DType
    value: float | int


def float32(value: float) -> Scalar:
    """Return a float32 parameter of an epilogue: `value`, a number, rounded to nearest. Raises ArgumentError for
    anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentError("float32", shown(value), "a number")
    with np.errstate(over="ignore"):
        return Scalar(dtypes.get("float32"), float(np.float32(value)))


def int32(value: int) -> Scalar:
    """Return an int32 parameter of an epilogue. Raises ArgumentError for a value that is no integer or does not fit."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -(2**31) <= value < 2**31:
        raise ArgumentError("int32", shown(value), "an integer from -2**31 to 2**31 - 1")
    return Scalar(dtypes.get("int32"), int(value))


@dataclass(frozen=True)
class Replicated:
    """A parameter of an epilogue: a list with one copy for each local rank. The caller promises that the copies are
    equal. The entries of a plain list may differ.
    """

    copies: tuple[Any, ...]

    def __init__(self, copies: Iterable[object]) -> None:
        found = foreign("copies", "one copy for each local rank", lambda: tuple(copies))
        object.__setattr__(self, "copies", found)


_ERROR = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): error: (?P<text>.*(?:\n[ \t].*)+)\n(?P<mark>[ \t]+\^)", re.M)


def explain(log: str, expression: str) -> str:
    """Return the errors in NVRTC's log, each with a mark below its place in `expression`, the part that the user wrote.

    NVRTC sees `expression` as line 1 of a file "epilogue". An error in a later line is marked at the end of the
    expression, an error in another file at its start.
    """
    shown = []
    for error in _ERROR.finditer(log):
        text, _, _ = error["text"].rpartition("\n")  # the text without the source line
        before = error["mark"][2:-1] if error["line"] == "1" else " " * len(expression)
        if error["file"] != "epilogue":
            before = ""
        shown.append(f"error: {text}\n  {expression}\n  {before}^")
    return "\n".join(shown) or log


class Epilogue:
    """An element-wise epilogue, `Epilogue("x * scale + bias[col]", scale=float32(0.5), bias=array)`.

    `expression` is a CUDA C++ expression. In scope: `x`, the fp32 sum over the ranks, not yet rounded; `i`, the flat
    index of the element; `col`, its index along the last dimension; `row`, its flat index along all other dimensions;
    `rank`, the number of the rank (0 for an op on one device). The value of the expression is converted to fp32 and
    rounded once to the output's dtype. Kernels are compiled without contraction of `a * b + c` to fma.

    A parameter is a typed scalar (`float32(v)`, `int32(v)`) or an array; the expression sees the elements of an array
    of any floating dtype as float. A parameter that differs by rank is a list with one entry per local rank; one with
    the same values on each rank is `Replicated([...])` of its copies. A bare array is read by every rank where it lies,
    so it may be overwritten or freed only after the call is complete on all ranks, not just on the rank that holds it.
    Nothing checks indices, and an array parameter must not overlap what the collective writes.

    An epilogue that differs by rank (a list, or `rank` in the expression) needs an algorithm of `allreduce` in which
    each rank computes every element: "push_one_shot", "one_stage" or "naive". "push_two_shot" and "two_stage" compute
    an element on one rank alone. `reduce_scatter` takes such an epilogue with every algorithm.

    Only the expression and the parameters' types enter the kernel, so `with_` and `Prepared.set` never recompile.
    Raises ArgumentError for text that is no single expression, and for a parameter that is a plain number or has a name
    that C++ or the epilogue uses; an expression that does not compile is a CompileError of the call.

    >>> with df.Group.local(2, driver="emu", max_blocks=8) as group:
    ...     xs = [rank.array(np.full(4, 1 + rank.index, np.float32)) for rank in group]
    ...     halved = df.Epilogue("x * scale", scale=df.float32(0.5))
    ...     print(df.allreduce(group, xs, epilogue=halved)[1].numpy())
    [1.5 1.5 1.5 1.5]
    """

    def __init__(self, expression: str, /, **parameters: object) -> None:
        if not isinstance(expression, str) or not expression.strip():
            raise ArgumentError("epilogue", shown(expression), "a CUDA C++ expression")
        found = _FORBIDDEN.search(expression)
        if found:
            raise ArgumentError("epilogue", shown(expression), f"one C++ expression without {found.group()!r}")
        for name, value in parameters.items():
            _check_name(name)
            if isinstance(value, (list, Replicated)):
                if not (value.copies if isinstance(value, Replicated) else value):
                    raise ArgumentError(f"epilogue parameter {name}", "empty", "one value per local rank")
            elif isinstance(value, (bool, int, float, np.number)):
                raise ArgumentError(
                    f"epilogue parameter {name}", shown(value), "float32(value), int32(value) or an array"
                )
        self.expression = expression
        self.parameters: Mapping[str, Any] = MappingProxyType(dict(parameters))

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks may compute different values from the same sum."""
        uses_rank = re.search(r"\brank\b", self.expression) is not None
        return uses_rank or any(isinstance(value, list) for value in self.parameters.values())

    def with_(self, **parameters: object) -> Epilogue:
        """Return a copy with some parameters replaced. Raises ArgumentError for a name that the epilogue does not
        have."""
        for name in parameters:
            if name not in self.parameters:
                raise ArgumentError(f"epilogue parameter {name}", "unknown", f"one of {list(self.parameters)}")
        return Epilogue(self.expression, **{**self.parameters, **parameters})

    def __repr__(self) -> str:
        return f"Epilogue({self.expression!r}, {', '.join(self.parameters)})"


def _check_name(name: str) -> None:
    reserved = name in IN_SCOPE or name in _KEYWORDS or name.startswith("_") or "__" in name
    if reserved or not _IDENTIFIER.fullmatch(name):
        raise ArgumentError(
            f"epilogue parameter {name}",
            "a reserved name" if reserved else "a name that an epilogue cannot use",
            f"a C++ identifier that begins with a letter and is none of {', '.join(IN_SCOPE)}",
        )
