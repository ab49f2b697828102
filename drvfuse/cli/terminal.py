# SPDX-License-Identifier: Apache-2.0
"""Terminal output shared by the commands; rich does the drawing (extra `cli`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import DriverUnavailable

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """A rich console on standard output or standard error."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise DriverUnavailable(
            "terminal output needs rich: pip install 'drvfuse[cli]', or use --json which does not"
        ) from None
    return Console(stderr=stderr, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress(text: str, *, show: bool) -> Iterator[None]:
    """A spinner with `text` on standard error while the block runs; nothing if not `show` or not on a terminal."""
    if not show:
        yield
        return
    with console(stderr=True).status(text):
        yield
