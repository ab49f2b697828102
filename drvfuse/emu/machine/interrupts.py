# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C between two changes of a machine's state and never inside of one.

Python runs signal handlers between any two bytecodes of the main thread, so a KeyboardInterrupt could lose an operation
on its way from one list to the next. A driver call holds SIGINT back while it runs; it takes effect where the call says
that it may (`taken`, `check`), else when the call is over. Handlers of other signals, and other threads, are let alone.

Where another process makes the calls, its Ctrl-C comes as a message: `interrupt(thread)` has the effect in the thread
that does the call, and `held(watcher)` is how the caller learns that there is something to tell.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_c: Any = sys.modules["_signal"]  # the C module: `signal` converts to enums, which takes longer than most driver calls

_handler: Callable[[int, FrameType | None], Any] | None = None  # the process's own handler, while SIGINT is held back
_open = False
_native = False
_pending = False
_watcher: Callable[[], None] | None = None
_interrupted: set[int] = set()  # threads, by their idents


def _note(number: int, frame: FrameType | None) -> None:
    global _open, _pending
    if _watcher is not None and _handler is not None:
        if _pending:  # a second Ctrl-C: the first one had no effect
            _handler(number, frame)
        _pending = True
        _watcher()
    elif _open and not _native and _handler is not None:
        _open = False  # what the handler raises is cleaned up after undisturbed
        _handler(number, frame)
    else:
        _pending = True


class held:
    """Context manager: SIGINT waits until the end of the block. Blocks nest; the outermost one decides.

    With a `watcher`, which is called when SIGINT comes, only the first one waits.
    """

    __slots__ = ("_mine", "_watcher")

    def __init__(self, watcher: Callable[[], None] | None = None) -> None:
        self._watcher = watcher

    def __enter__(self) -> None:
        global _handler, _open, _pending, _watcher
        self._mine: Any = None
        if _handler is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = _c.getsignal(signal.SIGINT)
        if not callable(handler):  # SIGINT is ignored, or ends the process
            return
        _open = _pending = False
        self._mine = handler
        _watcher = self._watcher
        _c.signal(signal.SIGINT, _note)
        _handler = handler  # after the exchange, and gone before the one below: there an interrupt may end this method

    def __exit__(self, *exc: object) -> None:
        global _handler, _pending, _watcher
        handler = self._mine
        if handler is None:
            return
        _handler = _watcher = None
        _c.signal(signal.SIGINT, handler)
        if _pending:
            _pending = False
            handler(signal.SIGINT, None)


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """SIGINT takes effect at once inside the block: nothing in it may be left half done."""
    global _open
    if _handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    check()
    _open = True
    try:
        if _pending:  # the interrupt has just come
            check()
        yield
    finally:
        _open = False


@contextlib.contextmanager
def native() -> Iterator[None]:
    """For native code, which may call Python: a handler must not raise there. SIGINT takes effect after the block, and
    native code that asks for `pending` ends soon.
    """
    global _native
    if threading.current_thread() is not threading.main_thread():
        yield
        check()
        return
    with held():
        _native = True
        try:
            yield
        finally:
            _native = False
    check()


def pending() -> bool:
    """True if this thread was interrupted and has not noticed yet."""
    if _interrupted and threading.get_ident() in _interrupted:
        return True
    return _pending and threading.current_thread() is threading.main_thread()


def interrupt(thread: int) -> None:
    """Let KeyboardInterrupt be raised in a thread where its driver call may be interrupted, as by Ctrl-C."""
    _interrupted.add(thread)


def forget(thread: int) -> None:
    """Forget an interrupt: the call that it was for is over."""
    _interrupted.discard(thread)


def check() -> None:
    """Let a SIGINT that was held back take effect here."""
    global _pending
    if _interrupted and threading.get_ident() in _interrupted:
        forget(threading.get_ident())
        raise KeyboardInterrupt
    if _pending and _handler is not None and threading.current_thread() is threading.main_thread():
        _pending = False
        _handler(signal.SIGINT, None)
