# SPDX-License-Identifier: Apache-2.0
"""Host memory of a client: a process of the operating system other than the one that has the machine.

A driver call of a client carries the contents of the host memory that the call uses. But a graph copies host memory
when the graph runs, and only then are the contents requested from the client. In the commands of a graph, the address
of a client's host memory is its address in the client plus `FOREIGN`. No memory of either process lies at such a sum.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...space.window import Window

FOREIGN = 1 << 57


class Foreign(Protocol):
    """Reads and writes the host memory of another process of the operating system, by its addresses in that process.
    Raises Failure if the memory is gone.
    """

    def read(self, address: int, nbytes: int) -> bytes: ...

    def write(self, address: int, content: bytes) -> None: ...


def copy(window: Window, foreign: Foreign | None, destination: int, source: int, nbytes: int) -> None:
    """Copy bytes between memory of the machine, of this process and of another one, which `foreign` reads and writes.
    An address of the other process is given as `FOREIGN` plus that address.
    """
    if foreign is None or max(destination, source) < FOREIGN:
        window.copy(destination, source, nbytes)
    elif destination < FOREIGN:
        window.view(destination, nbytes)[:] = np.frombuffer(foreign.read(source - FOREIGN, nbytes), np.uint8)
        if window.contains(destination, nbytes):
            window.mark_initialised(destination, nbytes)
    else:
        content = window.view(source, nbytes).tobytes() if source < FOREIGN else foreign.read(source - FOREIGN, nbytes)
        foreign.write(destination - FOREIGN, content)
