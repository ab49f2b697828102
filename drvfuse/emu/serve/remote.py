# SPDX-License-Identifier: Apache-2.0
"""The driver API of a machine that another process serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..bindings import FUNCTIONS, T
from ..wire.coder import coder
from ..wire.signatures import SIGNATURES

if TYPE_CHECKING:
    from .client import AttachedMachine


class AttachedDriver:
    """The driver functions as attributes. All other attributes are those of cuda.bindings.driver."""

    def __init__(self, machine: AttachedMachine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        value = self._function(name) if name in FUNCTIONS else getattr(T, name)
        setattr(self, name, value)
        return value

    def _function(self, name: str) -> Any:
        made, machine = coder(name) if name in SIGNATURES else None, self.machine

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return machine.refuse(name) if made is None else machine.call(made, args, kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(T), *SIGNATURES})

    def __repr__(self) -> str:
        return f"<AttachedDriver of {self.machine!r}>"
