# SPDX-License-Identifier: Apache-2.0
"""Conversion of the runtime's arguments to arguments of the driver, and of the driver's results to those of the
runtime.

Enums have the same numbers in both APIs. Handles of the runtime are handles of the driver, or have the same number. The
structures of the two APIs have the same layout, but one of them may be longer. So the bytes of an argument are copied
to the driver's structure, as many as both structures have, and copied back after the call. `structs` has the structures
whose layouts differ.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..bindings import T
from . import structs
from .state import Failed, State
from .types import RT

_LIST = re.compile(r"(?:Optional\[)?(?:tuple\[(\w+)\] \| )?list\[(\w+)\]\]?")
_OPTIONAL = re.compile(r"Optional\[(\w+)\]")
_NAMED = re.compile(r"(list\[)?:py:obj:`~\.(\w+)`")


@dataclass
class Argument:
    """An argument for the driver. `finish` copies to the caller's structure what the driver call has written."""

    value: Any
    finish: Callable[[], None] = lambda: None


ArgumentMaker = Callable[[State, Any], Argument]


def argument_maker(name: str, annotation: Any, other: Any) -> ArgumentMaker:
    """The function that converts arguments of the parameter `name`. It depends on `annotation`, the parameter's
    annotation in the runtime's signature, and `other`, the one in the driver's. Both are text or
    `inspect.Parameter.empty`.
    """
    if not isinstance(annotation, str):
        return lambda state, value: Argument(_plain(value))
    many, one = _LIST.fullmatch(annotation), _OPTIONAL.fullmatch(annotation)
    there = re.findall(r"\w+", str(other))
    if many:
        return _list_of(_element(name, many[2], there[-1]))
    make = _element(name, one[1] if one else annotation, there[-1])
    return lambda state, value: Argument(None) if value is None else make(state, value)


def _list_of(make: ArgumentMaker) -> ArgumentMaker:
    def made(state: State, value: Any) -> Argument:
        if not isinstance(value, list | tuple):
            return Argument(value)  # None, or a value that the driver refuses
        elements = [make(state, item) for item in value]

        def finish() -> None:
            for element in elements:
                element.finish()

        return Argument([element.value for element in elements], finish)

    return made


def _element(name: str, type_name: str, other: str) -> ArgumentMaker:
    kind: Any = getattr(RT, type_name, None)
    target = getattr(T, other, None)
    if is_structure(kind) and target is not None:
        return lambda state, value: _structure(state, structs.given(name, value, kind), kind, target)
    if is_enum(kind) and is_enum(target):
        return lambda state, value: Argument(enum_of(target, value))
    return lambda state, value: Argument(_plain(value))


def is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, int)


def is_structure(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "getPtr") and not hasattr(kind, "__int__")


def enum_of(kind: Any, value: Any) -> Any:
    """The member of the enum `kind` whose number is `value`. Fails with cudaErrorInvalidValue if there is none."""
    try:
        return kind(int(value))
    except ValueError:
        raise Failed(1) from None


def _plain(value: Any) -> Any:
    """The number of a handle or a function pointer whose class only the runtime has. Other values are unchanged."""
    kind = type(value)
    foreign = kind.__module__ == RT.__name__ and hasattr(kind, "__int__") and not is_enum(kind)
    return int(value) if foreign and len(kind.__mro__) == 2 else value


def _structure(state: State, value: Any, kind: Any, target: Any) -> Argument:
    special = structs.TO_DRIVER.get(kind.__name__)
    if special is not None:
        return Argument(special(state, value))
    made = target()
    copy(made, value)
    return Argument(made, lambda: copy(value, made))


def copy(target: Any, source: Any) -> None:
    """Copy the bytes of one structure to another."""
    sizes = [api.sizeof(type(value)) for value in (target, source) for api in (_api(type(value)),)]
    ctypes.memmove(int(target.getPtr()), int(source.getPtr()), min(sizes))


def _api(kind: type) -> Any:
    return RT if kind.__module__ == RT.__name__ else T


def result_maker(text: str) -> Callable[[Any], Any]:
    """The function that converts a result of the driver, given the type that the runtime function's docstring names for
    it, such as "int", "Any", ":py:obj:`~.cudaStream_t`" or "list[...]".
    """
    found = _NAMED.match(text)
    if found is None:
        return _plain_result if text == "Any" else {"float": float, "bytes": bytes}.get(text, _number)
    kind = getattr(RT, found[2], int)
    make: Callable[[Any], Any] = _structure_of(kind) if is_structure(kind) else lambda value: kind(int(value))
    return (lambda values: [make(value) for value in values or []]) if found[1] else make


def _number(value: Any) -> Any:
    return [_number(item) for item in value] if isinstance(value, list | tuple) else int(value)


def _plain_result(value: Any) -> Any:
    """The value that the runtime API returns for `value`. A CUdeviceptr becomes its number, others are unchanged."""
    return int(value) if isinstance(value, T.CUdeviceptr) else value


def _structure_of(kind: Any) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        special = structs.FROM_DRIVER.get(kind.__name__)
        if special is not None:
            return special(value)
        made = kind()
        copy(made, value)
        return made

    return make
