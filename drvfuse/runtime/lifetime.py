# SPDX-License-Identifier: Apache-2.0
"""Closing and finalizers of objects that own driver handles.

`close()` frees now and is idempotent. A collected object frees its handle too, but nothing happens at interpreter
exit, in a forked child, or once the driver itself is gone. Finalizers hold the driver weakly: the driver owns devices
and they own streams, so a strong reference from the finalizer registry would keep an emulated machine for ever.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ..errors import ClosedError, DrvfuseError
from .driver import Driver, forked

_log = logging.getLogger("drvfuse.driver")


class Owned:
    """Base of objects that free something once. Subclasses call `_owns` when the handle exists."""

    _finalizer: weakref.finalize[Any, Any] | None = None

    def _owns(self, driver: Driver, free: Callable[..., None], *args: Any) -> None:
        """`free(driver, *args)` will run once, at close() or when this object is collected; args must not hold self."""
        self._finalizer = weakref.finalize(self, _collect, weakref.ref(driver), free, args)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        return self._finalizer is not None and not self._finalizer.alive

    def close(self) -> None:
        """Free the handle now. A second call does nothing; any other use afterwards raises ClosedError."""
        if self._finalizer is None or (state := self._finalizer.detach()) is None:
            return
        weak, free, args = state[2]
        driver = weak()
        if driver is not None and not forked():
            free(driver, *args)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{type(self).__name__} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _collect(weak: weakref.ref[Driver], free: Callable[..., None], args: tuple[Any, ...]) -> None:
    driver = weak()
    if driver is None or forked() or sys.is_finalizing():
        return
    try:
        free(driver, *args)
    except DrvfuseError as error:  # a collector has nobody to raise to
        _log.debug("freeing a collected object: %s", error)
