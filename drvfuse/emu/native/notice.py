# SPDX-License-Identifier: Apache-2.0
"""The message that the native runtime is being compiled, for a user who waits at a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

PATIENCE = 2.0
"""Seconds after which the message is printed."""
_TEXT = "drvfuse: the emulated driver is being compiled for this machine, which takes some ten seconds, once"


@contextlib.contextmanager
def while_compiling() -> Iterator[None]:
    """A context manager that prints the message if its block takes longer than `PATIENCE` and stderr is a terminal."""
    stream = sys.stderr
    try:
        shown = stream.isatty()
    except (AttributeError, ValueError):  # a program has closed stderr, or replaced it by an object with fewer methods
        shown = False
    if not shown:
        yield
        return
    timer = threading.Timer(PATIENCE, print, (_TEXT,), {"file": stream, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
