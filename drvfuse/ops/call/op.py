# SPDX-License-Identifier: Apache-2.0
"""The decorator that makes an op from the function that prepares its calls."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, cast

from .prepared import Prepared
from .repeat import Layout, Repeat, Repeats

R = TypeVar("R")
P = ParamSpec("P")


class Op(Protocol[P, R]):
    """An op: calling it prepares and launches; `prepare` takes the same arguments and launches nothing."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[R]: ...


def op(prepare: Callable[P, Prepared[R]]) -> Op[P, R]:
    """Make an op from `prepare`, a function that prepares a call. The op has the name and docstring of this
    function."""

    @functools.wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        layout = Layout.of(prepare, args, kwargs)
        idle: list[Repeat] = [] if layout is None else layout.owner.part(Repeats).get(layout.key, list)
        repeat: Repeat | None
        try:
            # Another thread can take the `Repeat` only after the end of this launch, when it is in the list again.
            repeat = idle.pop()
        except IndexError:
            try:
                prepared = prepare(*args, **kwargs)
            except TypeError:
                _require_arguments(name, signature, args, kwargs)
                raise
            result = prepared.launch()
            repeat = None if layout is None else Repeat.of(prepared, layout.arrays)
            if repeat is None:
                prepared.give_back()
                return result
        else:
            assert layout is not None
            result = repeat.launch(layout, kwargs.get("streams"), kwargs.get("stream"))
        idle.append(repeat)
        return result

    name, signature = prepare.__name__, inspect.signature(prepare)
    returned = str(signature.return_annotation).removeprefix("Prepared[").removesuffix("]")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    call.__annotations__ = {**prepare.__annotations__, "return": returned}
    call.prepare = prepare  # type: ignore[attr-defined]
    prepare.__name__, prepare.__qualname__ = "prepare", f"{name}.prepare"
    prepare.__doc__ = (
        f"Check, plan and load the call `{name}(...)` of these arguments, and launch nothing.\n\n"
        "Launch it with `Prepared.launch()` any number of times. What the call allocates is allocated here, once."
    )
    return cast("Op[P, R]", call)


def _require_arguments(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raise TypeError with the op's name for arguments that its signature does not take: Python's own error would name
    the function `prepare`, and for a misspelt argument only say that the right one is missing."""
    names = signature.parameters
    for key in kwargs:
        if key not in names:
            near = [known for known in names if known.startswith(key) or key.startswith(known)]
            near += difflib.get_close_matches(key, names, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}{hint}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as wrong:
        raise TypeError(f"{name}() {wrong}") from None
