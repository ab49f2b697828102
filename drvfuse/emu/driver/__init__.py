# SPDX-License-Identifier: Apache-2.0
"""The driver API of emulated machines, with `cuda.bindings.driver`'s names, signatures, types and results.

The functions of this module act on the process-wide default machine (8 devices), so that code written for cuda-python
runs on it with one changed import:

    from drvfuse.emu import driver as cuda
    cuda.cuInit(0)
    error, count = cuda.cuDeviceGetCount()

`EmulatedDriver(process)` is the same namespace for a process of any machine. Enums and structs are those of
cuda.bindings. A driver function that is not emulated is refused when it is called (`refused`).
"""

from __future__ import annotations

from typing import Any

from ..bindings import FUNCTIONS, NAMES, T
from ..machine.machine import default_machine
from ..machine.process.process import Process
from . import (  # noqa: F401
    batch,
    context,
    copy,
    device,
    error,
    event,
    fill,
    function,
    graphs,
    ipc,
    launch,
    legacy_launch,
    link,
    logs,
    managed,
    managed_batch,
    memory,
    module,
    multicast,
    occupancy,
    pointer,
    pool,
    pool_share,
    settings,
    stream,
    stream_attributes,
    values,
    vmm,
)
from .entry import ENTRIES, invoke
from .entry import perform as perform
from .refused import refusal, refuse

__all__ = sorted({*NAMES, *ENTRIES})  # noqa: PLE0605


class EmulatedDriver:
    """The driver functions of one process as attributes. All other attributes are those of cuda.bindings.driver."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __getattr__(self, name: str) -> Any:
        value = _lookup(name, self.process)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(T), *ENTRIES})

    def __repr__(self) -> str:
        return f"<EmulatedDriver of {self.process!r}>"


def _lookup(name: str, process: Process) -> Any:
    entry = ENTRIES.get(name)
    if entry is not None:

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return invoke(process, entry, args, kwargs)

        return _named(call, name)
    if name in FUNCTIONS:
        return _named(lambda *args, **kwargs: refuse(process, name), name)
    return getattr(T, name)


def _of_default_machine(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        result: tuple[Any, ...] = getattr(default_machine().driver, name)(*args, **kwargs)
        return result

    return _named(call, name)


def _named(call: Any, name: str) -> Any:
    """Give a function the name and the signature of the bindings, and a docstring: for an emulated function that of the
    emulation or, if it has none, that of the bindings; for a refused function the reason.
    """
    call.__wrapped__ = original = FUNCTIONS.get(name)
    call.__name__ = call.__qualname__ = name
    call.__doc__ = (ENTRIES[name].function.__doc__ or original.__doc__) if name in ENTRIES else refusal(name)
    return call


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = _of_default_machine(name) if name in ENTRIES or name in FUNCTIONS else getattr(T, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(T), *ENTRIES})
