# SPDX-License-Identifier: Apache-2.0
"""A line for the person at a terminal who waits for the native runtime to be compiled."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

PATIENCE = 2.0
"""Seconds after which the line is printed."""
_TEXT = "drvfuse: the emulated driver is being compiled for this machine, which takes some ten seconds, once"


@contextlib.contextmanager
def while_compiling() -> Iterator[None]:
    """Print the line on stderr if the block takes longer than `PATIENCE`, and stderr is a terminal."""
    stream = sys.stderr
    try:
        shown = stream.isatty()
    except (AttributeError, ValueError):  # programs replace stderr by objects with fewer methods, or close it
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
