# SPDX-License-Identifier: Apache-2.0
"""File descriptors by which memory and multicast objects pass from one process to another."""

from __future__ import annotations

import os
import select
import weakref
from typing import TYPE_CHECKING

from ..objects import Mappable

if TYPE_CHECKING:
    from .mappables import Mappables

Identity = tuple[int, int]  # device and inode


class Descriptors:
    """The exported objects. Each object is kept alive while a copy of its descriptor is open in some process, or in
    transit.

    For each export there is a pipe. The descriptor is the writing end of the pipe; the reading end stays here. Both
    ends have the same device and inode, by which `find` recognises a copy that another process has sent. When the last
    copy of the writing end is closed, the reading end reports a hang-up. `sweep` checks for hang-ups, and releases the
    objects whose last copy was closed.
    """

    def __init__(self, mappables: Mappables) -> None:
        self._mappables = mappables
        self._exports: dict[Identity, tuple[int, Mappable]] = {}
        self.close = weakref.finalize(self, _close_all, self._exports)
        self.close.atexit = False

    def export(self, item: Mappable) -> int:
        """Make a descriptor of an object, and return it. The caller owns the descriptor."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._exports[_identity(writing)] = reading, item
        self._mappables.hold(item)
        return writing

    def find(self, descriptor: int) -> Mappable | None:
        """The object of a descriptor, or of a copy of one. The caller still owns the descriptor."""
        try:
            found = self._exports.get(_identity(descriptor))
        except OSError:  # the given descriptor is not open
            return None
        return None if found is None else found[1]

    def sweep(self) -> None:
        """Drop each object whose descriptor, with all its copies, is closed in all processes."""
        if not self._exports:
            return
        poll, ends = select.poll(), {reading: identity for identity, (reading, _) in self._exports.items()}
        for reading in ends:
            poll.register(reading, 0)  # 0: no events besides hang-ups, which poll always reports
        for reading, _ in poll.poll(0):
            _, item = self._exports.pop(ends[reading])
            os.close(reading)
            self._mappables.let_go(item)


def _identity(descriptor: int) -> Identity:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _close_all(exports: dict[Identity, tuple[int, Mappable]]) -> None:
    for reading, _ in exports.values():
        os.close(reading)
    exports.clear()
