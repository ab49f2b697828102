# SPDX-License-Identifier: Apache-2.0
"""Terminal output shared by the commands. Text is plain; rich (extra `cli`), if installed, draws the spinner."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

EVERY = 10.0  # seconds between two lines about the progress of a command


def progress(text: str, *, show: bool) -> contextlib.AbstractContextManager[object]:
    """A spinner with `text` on standard error for a `with` block; nothing if not `show` or not on a terminal."""
    if not show or not sys.stderr.isatty():
        return contextlib.nullcontext()
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(text, "...", file=sys.stderr)
        return contextlib.nullcontext()
    return Console(stderr=True).status(text)


@contextlib.contextmanager
def counting(text: str, total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    """Say on standard error how many of `total` are done: in a spinner on a terminal, otherwise in a line every `EVERY`
    seconds; nothing if not `show`. Yields a function; each call counts one more as done."""
    count, start = 0, time.monotonic()

    def said() -> str:
        return f"{count} of {total} {text}"

    with contextlib.ExitStack() as stack:
        status = stack.enter_context(progress(said(), show=show))
        if show and status is None:
            stack.enter_context(_lines(lambda: f"{said()} after {time.monotonic() - start:.0f} s"))

        def done() -> None:
            nonlocal count
            count += 1
            if status is not None:
                status.update(said())  # type: ignore[attr-defined]

        yield done


@contextlib.contextmanager
def _lines(said: Callable[[], str]) -> Iterator[None]:
    """Print what `said` returns every `EVERY` seconds, for a `with` block."""
    ended = threading.Event()

    def speak() -> None:
        while not ended.wait(EVERY):
            print(said(), file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
