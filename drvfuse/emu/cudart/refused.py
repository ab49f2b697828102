# SPDX-License-Identifier: Apache-2.0
"""The functions of the runtime that are refused and have no refused counterpart in the driver, with the reasons."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from ..findings.reports import Report
from .state import Failed, State
from .structs import NOT_SUPPORTED

NEWER = "it is newer than the functions that the emulated runtime has"
_REASONS = {
    r"Array|Mipmapped|Texture|Surface|GetChannelDesc": "arrays, textures and surfaces are not emulated",
    r"Graphics|VDPAU": "interoperability with graphics is not emulated",
    r"ExecutionCtx|GreenCtx": "green contexts are not emulated",
    r"Conditional": "conditional nodes of graphs are not emulated",
    r"GetKernel$": "functions of the host do not represent kernels here",
}


def reason(name: str) -> str:
    """The reason why a function is refused."""
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, name)), NEWER)


def refuse(name: str, signature: inspect.Signature) -> Callable[..., Any]:
    """The replacement for a refused function. Each call fails with cudaErrorNotSupported. The machine gets a report of
    the first call, unless another process serves the machine.
    """

    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        process = getattr(state.driver, "process", None)  # None if another process serves the machine
        if process is not None:
            report = Report("unsupported", f"{name} is refused: {reason(name)}", process=process.title)
            with process.machine.lock:
                process.machine.report(report)
        raise Failed(NOT_SUPPORTED)

    return call
