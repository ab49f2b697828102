# SPDX-License-Identifier: Apache-2.0
"""Terminal output shared by the commands. Text is plain; rich (extra `cli`), if installed, draws the spinner."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


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
    """Show, as `progress` does, how many of `total` are done. Yields a function; each call counts one more as done."""
    with progress(f"0 of {total} {text}", show=show) as status:
        count = 0

        def done() -> None:
            nonlocal count
            count += 1
            if status is not None:
                status.update(f"{count} of {total} {text}")  # type: ignore[attr-defined]

        yield done
