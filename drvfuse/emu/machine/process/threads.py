# SPDX-License-Identifier: Apache-2.0
"""The state that the emulated driver keeps per thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..objects import Context


class Threads(threading.local):
    """The state of the calling thread in one process: its stack of contexts, its capture mode, and the `number` that it
    has in records.
    """

    _waiting: set[int] = set()

    def __init__(self) -> None:
        self.contexts: list[Context | None] = []
        self.capture_mode = 0
        self.in_host_function = False
        self.number: int | None = None

    def others(self) -> bool:
        """True if a Python thread other than the calling one may queue work, as it is not in a call that waits."""
        mine = threading.get_ident()
        return any(t.ident != mine and t.ident not in self._waiting for t in threading.enumerate())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager: in the body of the `with` statement, the calling thread waits and queues nothing."""
        self._waiting.add(threading.get_ident())
        try:
            yield
        finally:
            self._waiting.discard(threading.get_ident())

    @contextlib.contextmanager
    def host_function(self) -> Iterator[None]:
        """Context manager: in the body of the `with` statement, the calling thread runs a host function, which may not
        call the driver.
        """
        self.in_host_function = True
        try:
            yield
        finally:
            self.in_host_function = False
