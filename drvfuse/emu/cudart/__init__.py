# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime API on the emulated driver, with `cuda.bindings.runtime`'s names, types and results.

Most functions make one call of the driver; they are derived from the signatures of the runtime's function and of the
driver's function (`pairs`). The functions that the runtime implements itself are written by hand: the current device of
a thread, its primary context and the last error (`state`, `devices`), null pointers and pitches (`memory`), the kinds
of copies (`copies`). Error codes have the same numbers in both APIs.

`EmulatedRuntime(driver)` is the namespace for the driver API of a machine or of one of its processes. Functions that
need no driver, such as `cudaGetErrorName`, are those of cuda.bindings.
"""

from __future__ import annotations

from typing import Any

from . import copies, devices, graphs, memory  # noqa: F401  they register their functions
from .pairs import paired
from .state import FUNCTIONS, State
from .types import RT, is_function

_WITHOUT_DRIVER = {"cudaCreateChannelDesc", "cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion"}


class EmulatedRuntime:
    """The runtime functions as attributes. All other attributes are those of cuda.bindings.runtime."""

    def __init__(self, driver: Any) -> None:
        self._state = State(driver)

    def __getattr__(self, name: str) -> Any:
        value = getattr(RT, name)
        if is_function(name, value) and name not in _WITHOUT_DRIVER:
            function = FUNCTIONS.get(name) or paired(name)
            value = self._state.bound(function)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(RT)})
