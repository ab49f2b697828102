# SPDX-License-Identifier: Apache-2.0
"""Makes Ctrl-C take effect between two changes of a machine's state, and never in the middle of one.

Python runs signal handlers between any two bytecodes of the main thread, so a KeyboardInterrupt could lose an operation
that is moved from one list to another. A driver call therefore holds SIGINT back while it runs. SIGINT takes effect at
points that the call allows (`taken`, `check`), else at the end of the call. Handlers of other signals, and other
threads, are not affected.

A driver call may come from a client, which is another process. In the client, `held(watcher)` calls `watcher` when
SIGINT comes; the watcher sends a message. In the process of the machine, `interrupt(thread)` then makes the interrupt
take effect in the thread that executes the call.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# The C module behind `signal`. The functions of `signal` itself convert numbers to enums, which takes longer than most
# driver calls.
_c: Any = sys.modules["_signal"]

_handler: Callable[[int, FrameType | None], Any] | None = None  # the process's own handler, while SIGINT is held back
_open = False
_native = False
_pending = False
_watcher: Callable[[], None] | None = None
_interrupted: set[int] = set()  # identifiers of the threads with a pending interrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _open, _pending
    if _watcher is not None and _handler is not None:
        if _pending:  # this is a second Ctrl-C, and the first one has had no effect yet
            _handler(number, frame)
        _pending = True
        _watcher()
    elif _open and not _native and _handler is not None:
        _open = False  # so that no second interrupt disturbs the handling of the first one
        _handler(number, frame)
    else:
        _pending = True


class held:
    """Context manager that holds SIGINT back until the end of the `with` statement; if `with` statements are nested,
    until the end of the outermost one.

    If there is a `watcher`, each SIGINT calls it. Only the first SIGINT is then held back: if a second one comes before
    the first has taken effect, the second takes effect at once.
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
        _handler = handler  # last, so that it stays None if an interrupt ends this method earlier

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
    """Context manager: in the body of the `with` statement, SIGINT takes effect at once, and may end the body
    anywhere."""
    global _open
    if _handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    check()
    _open = True
    try:
        if _pending:  # SIGINT came after the check above, before `_open` was set
            check()
        yield
    finally:
        _open = False


@contextlib.contextmanager
def native() -> Iterator[None]:
    """Context manager for a call of native code. SIGINT takes effect only after the body of the `with` statement,
    because the native code may call Python code in which a signal handler must not raise an exception. Native code that
    checks `pending` can end early.
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
    """Raise KeyboardInterrupt in a thread, at a point where its driver call allows that, as Ctrl-C does."""
    _interrupted.add(thread)


def forget(thread: int) -> None:
    """Drop the pending interrupt of a thread. Called when the call that it should interrupt has ended."""
    _interrupted.discard(thread)


def check() -> None:
    """Let a SIGINT that was held back, or an `interrupt` of this thread, take effect here."""
    global _pending
    if _interrupted and threading.get_ident() in _interrupted:
        forget(threading.get_ident())
        raise KeyboardInterrupt
    if _pending and _handler is not None and threading.current_thread() is threading.main_thread():
        _pending = False
        _handler(signal.SIGINT, None)
