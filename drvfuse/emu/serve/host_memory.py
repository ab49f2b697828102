# SPDX-License-Identifier: Apache-2.0
"""A client's host memory that the machine can use: pinned memory and registered memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..machine.memory import host_files
from ..machine.memory.foreign import FOREIGN
from ..space import pages
from ..wire.parameters import Layout

_REGISTERED = 1 << 56
"""The offset that is added to addresses of registered memory in messages. The machine may have memory of its own at the
client's addresses, but none at the sums.
"""


@dataclass(frozen=True)
class _Registration:
    """Registered memory. `file` tells whether the memory is a shared mapping of a file. If it is, the machine maps this
    file too, so that kernels and copies can access the memory.
    """

    nbytes: int
    file: bool


class _Local(threading.local):
    """The state of a thread: `found` tells whether the memory that the thread registered last, or registers now, is a
    shared mapping of a file.
    """

    found = False


class HostMemory:
    """The client's side of host memory (`wire.calls.Caller`). `layout` returns the parameters of a kernel.

    A HostMemory reserves the addresses of the machine's memory in this process. Making one raises OSError if something
    is mapped at these addresses.
    """

    def __init__(self, base: int, nbytes: int, layout: Callable[[int], Layout | None]) -> None:
        pages.keep_free(base, nbytes)
        self._base, self._end = base, base + nbytes
        # `layout` is a method of the object that owns this one. A strong reference to it would make a cycle.
        self._layout = weakref.WeakMethod(layout)
        self._registered: dict[int, _Registration] = {}  # registered memory by its address
        self._pinned: dict[int, int] = {}  # address -> number of bytes
        self._images: dict[int, Any] = {}  # CUlinkState -> its linked image
        self._local = _Local()
        self._release = weakref.finalize(self, pages.give_up, base, nbytes)
        self._release.atexit = False

    def close(self) -> None:
        """Give the addresses back, with the pinned memory. Idempotent."""
        self._release()

    def layout(self, function: int) -> Layout | None:
        ask = self._layout()
        return None if ask is None else ask(function)

    # From addresses of the client to addresses of the machine ---------------------------------------------------------

    def shared(self, address: int) -> int | None:
        if self._base <= address < self._end:
            return address
        found = self._registration_of(address)
        return address + _REGISTERED if found is not None and found.file else None

    def lasting(self, address: int) -> int:
        known = self.shared(address)
        return address + FOREIGN if known is None else known

    def known(self, address: int) -> int:
        return address if self._registration_of(address) is None else address + _REGISTERED

    def back(self, address: int) -> int:
        return address - FOREIGN if address >= FOREIGN else address - _REGISTERED if address >= _REGISTERED else address

    def register(self, address: int) -> int:
        return address + _REGISTERED if address else 0

    @property
    def registers(self) -> bool:
        """True if any memory is registered."""
        return bool(self._registered)

    def keep_registered(self, known: Sequence[int]) -> None:
        """Drop all registered memory except `known`. The other memory was unregistered when its context was
        destroyed.
        """
        gone = self._registered.keys() - {self.back(address) for address in known}
        for address in gone:
            self._registered.pop(address, None)

    def _registration_of(self, address: int) -> _Registration | None:
        found = (r for start, r in list(self._registered.items()) if start <= address < start + r.nbytes)
        return next(found, None) if self._registered else None

    # During and after calls ------------------------------------------------------------------------------------------

    def map_pinned(self, address: int, nbytes: int, descriptor: int) -> None:
        span = pages.round_up(nbytes, mmap.PAGESIZE)
        try:
            pages.map_file(address, span, descriptor, 0)
        finally:
            os.close(descriptor)
        self._pinned[address] = span

    def keep_image(self, state: int, content: bytes) -> int:
        self._images[state] = image = ctypes.create_string_buffer(content)
        return ctypes.addressof(image)

    def registration(self, address: int, nbytes: int) -> tuple[int, int] | None:
        found = host_files.behind(address, nbytes)
        self._local.found = found is not None
        return found

    def after(self, name: str, values: Sequence[Any]) -> None:
        """Called after a driver call has succeeded: record the host memory that the call has allocated or freed."""
        if name in ("cuMemFreeHost", "cuMemFree"):  # cuMemFree frees managed memory too
            address = values[0]
            span = self._pinned.pop(address, None)
            if span is not None and self._release.alive:
                pages.keep_free_again(address, span)
        elif name == "cuLinkDestroy":
            self._images.pop(values[0], None)
        elif name == "cuMemHostRegister":
            self._registered[values[0]] = _Registration(values[1], self._local.found)
        elif name == "cuMemHostUnregister":
            self._registered.pop(values[0], None)
