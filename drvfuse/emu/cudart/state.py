# SPDX-License-Identifier: Apache-2.0
"""The state that the runtime keeps between calls, and the steps common to all its calls.

A thread has a current device and a last error. A call that needs a context uses the current context of the driver API;
if there is none, the primary context of the thread's device becomes current. The runtime retains each primary context
once per process, until `cudaDeviceReset`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .types import RT

SUCCESS, INVALID_VALUE, UNKNOWN = 0, 1, 999
_STICKY = frozenset({214, 700, *range(702, 704), *range(709, 712), *range(714, 720)})
"""Sticky errors, after which the context is lost. They are not cleared until the device is reset."""

F = TypeVar("F", bound=Callable[..., Any])


class Failed(Exception):
    """Makes a function fail with a code of the driver or the runtime."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Function:
    """A function of the runtime. `call(state, *arguments)` returns its `outputs` values, or raises Failed."""

    name: str
    call: Callable[..., Any]
    outputs: int
    needs_context: bool


FUNCTIONS: dict[str, Function] = {}
"""The functions that are written by hand."""


def function(outputs: int = 0, *, context: bool = True) -> Callable[[F], F]:
    """Register a function with `outputs` results under its name. With `context`, a call first makes a context current
    if the thread has none.
    """

    def register(call: F) -> F:
        FUNCTIONS[call.__name__] = Function(call.__name__, call, outputs, context)
        return call

    return register


def only(condition: object, code: int = INVALID_VALUE) -> None:
    """Raise Failed(code) unless the condition holds."""
    if not condition:
        raise Failed(code)


class _Thread(threading.local):
    device = 0
    error = SUCCESS


class State:
    """The runtime on one driver. `cu.NAME(...)` calls a driver function and returns its results without the CUresult,
    or raises Failed.
    """

    def __init__(self, driver: Any) -> None:
        self.driver, self.cu = driver, _Checked(driver)
        self.thread = _Thread()
        self._primaries: dict[int, int] = {}
        self._lock = threading.Lock()
        self._started = False

    def _start(self) -> None:
        if not self._started:
            self.cu.cuInit(0)
            self._started = True

    def bound(self, function: Function) -> Callable[..., Any]:
        """The function as cuda.bindings.runtime has it: it returns a tuple that begins with a cudaError_t, and does not
        raise Failed.
        """

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            try:
                self._start()
                if function.needs_context:
                    self.context()
                value = function.call(self, *args, **kwargs)
            except Failed as failed:
                self.thread.error = failed.code
                return (error(failed.code), *(None,) * function.outputs)
            if function.outputs == 0:
                return (error(SUCCESS if value is None else value),)
            return (error(SUCCESS), value) if function.outputs == 1 else (error(SUCCESS), *value)

        real = getattr(RT, function.name)
        call.__name__ = call.__qualname__ = function.name
        call.__doc__ = real.__doc__
        call.__wrapped__ = real  # type: ignore[attr-defined]  # for inspect.signature
        return call

    def context(self) -> int:
        """The current context. If there is none, the primary context of the thread's device becomes current."""
        current = int(self.cu.cuCtxGetCurrent())
        if not current:
            current = self.primary(self.thread.device)
            self.cu.cuCtxSetCurrent(current)
        return current

    def primary(self, device: int) -> int:
        """The primary context of a device, retained for the runtime."""
        with self._lock:
            if device not in self._primaries:
                self._primaries[device] = int(self.cu.cuDevicePrimaryCtxRetain(device))
            return self._primaries[device]

    def drop_primary(self, device: int) -> None:
        with self._lock:
            self._primaries.pop(device, None)

    def last_error(self, *, clear: bool) -> int:
        found = self.thread.error
        if clear and found not in _STICKY:
            self.thread.error = SUCCESS
        return found


class _Checked:
    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._driver, name)

        def call(*args: Any) -> Any:
            code, *values = function(*args)
            if code:
                raise Failed(int(code))
            return values[0] if len(values) == 1 else tuple(values) or None

        setattr(self, name, call)
        return call


def error(code: int) -> Any:
    """The cudaError_t with the number of a CUresult. It is cudaErrorUnknown if the runtime has no error of that
    number.
    """
    try:
        return RT.cudaError_t(code)
    except ValueError:
        return RT.cudaError_t(UNKNOWN)
