# SPDX-License-Identifier: Apache-2.0
"""The state of a call at its two ends, and the functions that it needs of the processes there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .parameters import Layout
from .signatures import Signature


class Caller(Protocol):
    """What a call needs of the process that makes it."""

    def shared(self, address: int) -> int | None:
        """The address by which the machine knows the host memory at `address`; None if it does not know it."""

    def known(self, address: int) -> int:
        """As `shared`, and for registered memory too; any other address stands for itself."""

    def back(self, address: int) -> int:
        """The caller's address for one of `known`: its inverse."""

    def register(self, address: int) -> int:
        """The address that the machine is to use for memory that is registered now."""

    def lasting(self, address: int) -> int:
        """The address that the machine is to use for host memory that it needs after the call has returned."""

    def layout(self, function: int) -> Layout | None:
        """The parameters of a kernel; None if there is no such function."""

    def map_pinned(self, address: int, nbytes: int, descriptor: int) -> None:
        """Put pinned memory at its address. The descriptor is closed."""

    def keep_image(self, link: int, content: bytes) -> int:
        """The address of an image, as a C string, which stays until its link is destroyed."""

    def registration(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(descriptor, offset) of the file that the range is a shared mapping of; None if it is none."""


class Machine(Protocol):
    """What a call needs of the process that runs it."""

    def pinned(self, address: int) -> int:
        """A descriptor of the pinned memory at an address."""

    def managed(self, address: int) -> tuple[int, int, int] | None:
        """(address, bytes, descriptor) of the managed memory that an address is in; None if it is in none."""

    def call_back(self, function: int, argument: int) -> int:
        """Call `size_t f(int)` of the caller."""

    def layout(self, function: int) -> Layout | None:
        """The parameters of a kernel; None if there is no such function."""


@dataclass
class Call:
    """A call at the caller's end, with its arguments as they were read. `lent` are the functions that take what came
    back for memory that it lends.
    """

    signature: Signature
    values: Sequence[Any]
    caller: Caller
    lent: list[Callable[[Any], None]] = field(default_factory=list)
    filled: list[Callable[[Any], None]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)

    def value(self, name: str | None) -> Any:
        """An argument by name."""
        return next(v for p, v in zip(self.signature.given, self.values, strict=True) if p.name == name)


@dataclass
class Run:
    """A call at the machine's end. `lent` stands for memory of the caller that the call writes; all of `keep` has to
    stay as long as work that was queued may use it.
    """

    signature: Signature
    machine: Machine
    values: list[Any] = field(default_factory=list)
    lent: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)
    filled: list[Callable[[], bytes]] = field(default_factory=list)
    """Structures of the caller that the call has filled in, also if it fails."""
    keep: list[Any] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    """Descriptors that came with the call, to be closed after it."""
    file: tuple[int, int] | None = None
    """(descriptor, offset) of the file of memory that the call registers."""

    def memory(self, content: Any) -> int:
        """The address of memory that holds these bytes: themselves, if they can be written."""
        nbytes = len(content)
        if nbytes and not memoryview(content).readonly:
            self.keep.append(content)
            return ctypes.addressof((ctypes.c_char * nbytes).from_buffer(content))
        made = (ctypes.c_char * (nbytes + 1)).from_buffer_copy(bytes(content) + b"\0")
        self.keep.append(made)
        return ctypes.addressof(made)

    def lend(self, nbytes: int) -> int:
        """The address of memory that goes back to the caller; one byte more, so that it has an address."""
        made = (ctypes.c_char * (nbytes + 1))()
        self.keep.append(made)
        self.lent.append(made)
        return ctypes.addressof(made)

    def value(self, name: str | None) -> Any:
        return next(v for p, v in zip(self.signature.given, self.values, strict=False) if p.name == name)
