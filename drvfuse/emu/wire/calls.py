# SPDX-License-Identifier: Apache-2.0
"""The state of a call in its two processes, and the functions that each process provides for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .parameters import Layout
from .signatures import Signature


class Caller(Protocol):
    """What this package needs from the process that makes a call."""

    def shared(self, address: int) -> int | None:
        """The address by which the machine accesses the caller's host memory at `address`. None if the machine cannot
        access it.
        """

    def known(self, address: int) -> int:
        """The machine's address of pinned or registered memory at `address`. Any other address is returned
        unchanged.
        """

    def back(self, address: int) -> int:
        """The caller's address for an address of the machine. It is the inverse of `known`."""

    def register(self, address: int) -> int:
        """The address that the machine uses for memory that this call registers."""

    def lasting(self, address: int) -> int:
        """The address that the machine uses for host memory that it needs after the call has returned."""

    def layout(self, function: int) -> Layout | None:
        """The parameters of a kernel. None if there is no such function."""

    def map_pinned(self, address: int, nbytes: int, descriptor: int) -> None:
        """Map new pinned memory in the caller's process at `address`, which is its address on the machine too.
        `descriptor` is the file of this memory, and is closed then.
        """

    def keep_image(self, state: int, content: bytes) -> int:
        """The address of a copy of a linked image, which stays until the linker state `state` (CUlinkState) is
        destroyed. A NUL follows the image.
        """

    def registration(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(descriptor, offset) of a file, if the range is a shared mapping of that file, else None."""


class Machine(Protocol):
    """What this package needs from the machine's process, which runs a call."""

    def pinned(self, address: int) -> int:
        """A file descriptor of the pinned memory at an address."""

    def managed(self, address: int) -> tuple[int, int, int] | None:
        """(address, bytes, file descriptor) of the managed memory that contains an address. None if there is none."""

    def call_back(self, function: int, argument: int) -> int:
        """Call a function `size_t f(int)` in the caller's process."""

    def layout(self, function: int) -> Layout | None:
        """The parameters of a kernel; None if there is no such function."""


@dataclass
class Call:
    """A call in the caller's process. `values` are the values that `Coder.read` has returned for the arguments. For
    each buffer of the caller to which the call may write, `lent` has a function that stores the bytes which come back.
    """

    signature: Signature
    values: Sequence[Any]
    caller: Caller
    lent: list[Callable[[Any], None]] = field(default_factory=list)
    filled: list[Callable[[Any], None]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)

    def value(self, name: str | None) -> Any:
        """The value of the argument with this name."""
        return next(v for p, v in zip(self.signature.given, self.values, strict=True) if p.name == name)


@dataclass
class Run:
    """A call in the machine's process. `lent` are buffers to which the call writes in place of the caller's memory.
    `keep` are objects that must stay alive while queued work may use them.
    """

    signature: Signature
    machine: Machine
    values: list[Any] = field(default_factory=list)
    lent: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)
    filled: list[Callable[[], bytes]] = field(default_factory=list)
    """Structures of the caller that the call has filled in, which it may do even if it fails."""
    keep: list[Any] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    """File descriptors that came with the call, which are closed after it."""
    file: tuple[int, int] | None = None
    """(descriptor, offset) of the file of memory that the call registers."""

    def memory(self, content: Any) -> int:
        """The address of memory with these bytes. It is the memory of `content` itself if `content` is writable."""
        nbytes = len(content)
        if nbytes and not memoryview(content).readonly:
            self.keep.append(content)
            return ctypes.addressof((ctypes.c_char * nbytes).from_buffer(content))
        made = (ctypes.c_char * (nbytes + 1)).from_buffer_copy(bytes(content) + b"\0")
        self.keep.append(made)
        return ctypes.addressof(made)

    def lend(self, nbytes: int) -> int:
        """The address of new memory of `nbytes`, whose contents are sent back to the caller after the call. One more
        byte is allocated, so that the memory is never empty.
        """
        made = (ctypes.c_char * (nbytes + 1))()
        self.keep.append(made)
        self.lent.append(made)
        return ctypes.addressof(made)

    def value(self, name: str | None) -> Any:
        return next(v for p, v in zip(self.signature.given, self.values, strict=False) if p.name == name)
