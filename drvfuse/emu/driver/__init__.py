# SPDX-License-Identifier: Apache-2.0
"""The driver API of emulated machines, with `cuda.bindings.driver`'s names, signatures, types and results.

This module stands for the process-wide default machine (8 devices), so that code written for cuda-python runs on it
with one changed import:

    from drvfuse.emu import driver as cuda
    cuda.cuInit(0)
    error, count = cuda.cuDeviceGetCount()

`EmulatedDriver(machine)` is the same namespace for a machine of one's own. Enums and structs are cuda.bindings' own.
A function of the driver that is not emulated raises `Unsupported` when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import Unsupported
from ..bindings import T
from ..machine.machine import Machine, default_machine
from . import (  # noqa: F401
    context,
    copy,
    device,
    error,
    event,
    function,
    graph,
    launch,
    memory,
    module,
    multicast,
    occupancy,
    pointer,
    pool,
    stream,
    vmm,
)
from .entry import ENTRIES, invoke


class EmulatedDriver:
    """The functions of one machine as attributes; everything else is cuda.bindings.driver's."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        machine = self.machine
        value = _lookup(name, lambda: machine)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(T), *ENTRIES})

    def __repr__(self) -> str:
        return f"<EmulatedDriver of {self.machine!r}>"


def _lookup(name: str, machine: Callable[[], Machine]) -> Any:
    entry = ENTRIES.get(name)
    if entry is not None:

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return invoke(machine(), entry, args, kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = entry.function.__doc__
        return call
    value = getattr(T, name)
    if name.startswith("cu") and callable(value) and not isinstance(value, type):

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise Unsupported(f"{name} is not part of the emulated driver")

        return refuse
    return value


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = _lookup(name, default_machine)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(T), *ENTRIES})
