# SPDX-License-Identifier: Apache-2.0
"""Host memory of a process that is another process of the operating system than the machine's.

A call brings such memory along, for its own time. What a graph copies when it runs has to be asked for then, so its
commands name the memory by its address there plus `FOREIGN`. Neither process has memory at these addresses.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..space.window import Window

FOREIGN = 1 << 57


class Foreign(Protocol):
    """The memory of that process, by its own addresses. Failure where there is none any more."""

    def read(self, address: int, nbytes: int) -> bytes: ...

    def write(self, address: int, content: bytes) -> None: ...


def copy(window: Window, foreign: Foreign | None, destination: int, source: int, nbytes: int) -> None:
    """memmove of memory of the machine, of this process, or of a foreign one."""
    if foreign is None or max(destination, source) < FOREIGN:
        window.copy(destination, source, nbytes)
    elif destination < FOREIGN:
        window.view(destination, nbytes)[:] = np.frombuffer(foreign.read(source - FOREIGN, nbytes), np.uint8)
        if window.contains(destination, nbytes):
            window.mark_initialised(destination, nbytes)
    else:
        content = window.view(source, nbytes).tobytes() if source < FOREIGN else foreign.read(source - FOREIGN, nbytes)
        foreign.write(destination - FOREIGN, content)
