# SPDX-License-Identifier: Apache-2.0
"""Functions of the runtime without a counterpart in the driver that are refused: which, and why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from .state import Failed, State
from .structs import NOT_SUPPORTED

log = logging.getLogger("drvfuse.emu")

_REASONS = {
    r"Array|Mipmapped|ChannelDesc": "CUDA arrays are not emulated",
    r"Texture|Surface": "textures and surfaces are not emulated",
    r"Graphics|EGL|GL|VDPAU": "interoperability with graphics is not emulated",
    r"External": "interoperability with external resources is not emulated",
    r"ExecutionCtx|GreenCtx|Dev(Sm)?Resource": "green contexts are not emulated",
    r"Conditional": "conditional nodes of graphs are not emulated",
}
_named: set[str] = set()


def reason(name: str) -> str:
    """Why a function is refused."""
    words = "it is newer than what this version of the emulated runtime covers"
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, name)), words)


def refuse(name: str) -> Callable[..., Any]:
    """What stands for such a function: it fails with cudaErrorNotSupported, and is named once in the log."""

    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        if name not in _named:
            _named.add(name)
            log.warning("unsupported: %s: %s", name, reason(name))
        raise Failed(NOT_SUPPORTED)

    return call
