# SPDX-License-Identifier: Apache-2.0
"""Closing and finalizers of objects that own driver handles.

`close()` frees the handle at once and is idempotent. The handle of a garbage-collected object is freed too, but not at
interpreter exit, in a forked child, or after the driver is gone. A finalizer has a weak reference to its driver, and
the arguments of its free are kept in `Driver.owned`. These arguments may be streams and devices, which refer to the
driver: if the registry of finalizers held them, an emulated machine would never be collected.

A finalizer makes no driver call: it queues the free (`retire`). A free can make the driver wait for running kernels,
and the garbage collector may run between the launches of the ranks of one collective. A free that waited at that point
would wait for ever, since the first rank's kernel spins until the last rank's kernel is launched. `flush` runs the
queued frees at the next allocation or synchronisation outside of `launch_group()`, unless an object forbids it
(`hold`).
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from ..errors import CaptureError, ClosedError, DrvfuseError
from .driver import Driver, forked

_log = logging.getLogger("drvfuse.driver")
_open_groups: list[None] = []
_holders: weakref.WeakSet[object] = weakref.WeakSet()


enter_launches: Callable[[], None] = functools.partial(_open_groups.append, None)
leave_launches: Callable[[], None] = _open_groups.pop
"""The two halves of `launch_group`. Every call uses them in its place, since a context manager takes 0.2 us."""


class launch_group:
    """A `with` block for the launches of all ranks of one collective, in which no queued free runs on any thread."""

    def __enter__(self) -> None:
        enter_launches()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        leave_launches()


def hold(owner: object) -> None:
    """Let no queued free run until `release(owner)`, or until `owner` is collected."""
    _holders.add(owner)


def release(owner: object) -> None:
    """End `hold(owner)`. Does nothing if there is none."""
    _holders.discard(owner)


def retire(driver: Driver, free: Callable[..., None], *args: Any) -> None:
    """Queue `free(driver, *args)` for the next flush. No driver call is made, so a finalizer may use this function."""
    driver.retired.append((free, args))


def flush(driver: Driver) -> None:
    """Run the queued frees, unless a `hold` or an open `launch_group` forbids it. The free of memory that a capture
    uses stays queued."""
    queue = driver.retired
    if driver.closed:
        queue.clear()
    if not queue or _open_groups or len(_holders):
        return
    lost_before = driver.lost
    for _ in range(len(queue)):
        try:
            free, args = queue.popleft()
        except IndexError:  # another thread frees the rest
            return
        try:
            free(driver, *args)
        except CaptureError:
            queue.append((free, args))
        except DrvfuseError as error:  # for example a lost context, which the next driver call of the user reports
            _log.debug("freeing a collected object: %s", error)
            driver.lost = lost_before


class Dependent(Protocol):
    """An object that uses the memory of an `Owned` whenever it is launched: a prepared call, or a graph."""

    def owner_closed(self, owner: Owned) -> None:
        """Before the next launch, check that all arrays are still open: `owner` was closed."""


class Owned:
    """Base of objects that free something once. Subclasses call `_owns` when the handle exists."""

    _finalizer: weakref.finalize[Any, Any] | None = None
    _closed = False
    _dependents: weakref.WeakSet[Any] | None = None

    def _owns(self, driver: Driver, free: Callable[..., None], *args: Any) -> None:
        """Let `free(driver, *args)` run once, at close() or at a flush after this object is collected.

        `args` must not hold self.
        """
        key = object()
        driver.owned[key] = free, args
        self._finalizer = weakref.finalize(self, _collect, weakref.ref(driver), key)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Free the handle now. A second call does nothing; any other use afterwards raises ClosedError."""
        if self._finalizer is None or (state := self._finalizer.detach()) is None:
            return
        self._closed = True
        for dependent in list(self._dependents or ()):
            dependent.owner_closed(self)
        weak, key = state[2]
        driver = weak()
        if driver is None:
            return
        free, args = driver.owned.pop(key)
        if not forked() and not driver.closed:
            free(driver, *args)

    def tell(self, dependent: Dependent) -> None:
        """Call `dependent.owner_closed(self)` when this object is closed, before anything is freed. So a launch need
        not ask whether its memory is still there. `dependent` is held weakly."""
        if self._dependents is None:
            self._dependents = weakref.WeakSet()
        self._dependents.add(dependent)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _collect(weak: weakref.ref[Driver], key: object) -> None:
    driver = weak()
    if driver is not None and not forked() and not sys.is_finalizing():
        free, args = driver.owned.pop(key)
        retire(driver, free, *args)
