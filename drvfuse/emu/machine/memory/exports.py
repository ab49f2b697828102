# SPDX-License-Identifier: Apache-2.0
"""Memory and events that processes of a machine share by IPC handles: strings of bytes, which the processes pass to one
another by any means.

Memory has the same address in a process that opens it. The address then belongs to its owner and to all processes that
have opened it, each with the access of its own devices. When the owner frees the memory, it is gone for all of them.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .allocation import Allocation
    from .process_memory import ProcessMemory

HANDLE_BYTES = 64
Item = TypeVar("Item")


class Export:
    """Memory that other processes may open. `home` is the ProcessMemory of the process that owns it, and `allocation`
    the owner's Allocation. `views` has (ProcessMemory, Allocation) of each process that has opened the memory.
    """

    def __init__(self, home: ProcessMemory, allocation: Allocation) -> None:
        self.home, self.allocation = home, allocation
        self.views: list[tuple[ProcessMemory, Allocation]] = []

    @property
    def live(self) -> bool:
        return self.home.at(self.allocation.base) is self.allocation


class Shared:
    """The IPC handles of one machine. A handle does not keep its object alive."""

    def __init__(self) -> None:
        self._mark = b"drvfuse " + os.urandom(16)
        self._numbers = itertools.count(1)
        self._items: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def handle(self, item: object) -> bytes:
        """The handle of an object. It is the same for every call."""
        number = next((n for n, known in self._items.items() if known is item), None)
        if number is None:
            number = next(self._numbers)
            self._items[number] = item
        return (self._mark + number.to_bytes(8, "little")).ljust(HANDLE_BYTES, b"\0")

    def find(self, handle: bytes, kind: type[Item]) -> Item | None:
        """The object of a handle. None if the object is of another kind or machine, or is gone."""
        end = len(self._mark)
        found = self._items.get(int.from_bytes(handle[end : end + 8], "little")) if handle[:end] == self._mark else None
        return found if isinstance(found, kind) else None
