# SPDX-License-Identifier: Apache-2.0
"""Arguments that are memory of the caller, or file descriptors of the caller. `inputs` has the other arguments."""

from __future__ import annotations

import ctypes
import fcntl
import functools
from collections.abc import Sequence
from typing import Any

from ..space import mapped
from .arguments import Address, Invalid, bytes_address, host_address
from .calls import Call, Run
from .inputs import Input
from .message import NONE, Incoming, Outgoing


def lent_to(run: Run, nbytes: int) -> Address:
    """`nbytes` of memory to which the call writes, and which is sent back to the caller."""
    address = run.lend(nbytes)
    return Address.of(address, memoryview(run.lent[-1])[:nbytes])


class Buffer(Input):
    """Memory to which the call writes, given as a bytes object."""

    def read(self, value: Any) -> Address:
        return bytes_address(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(value.keep.nbytes)
        call.lent.append(functools.partial(_store, int(value)))

    def take(self, incoming: Incoming, run: Run) -> Address:
        return lent_to(run, incoming.word())


class HostMemory(Input):
    """Memory of the caller. A buffer may be given for a parameter `void*`, but not for a device pointer."""

    def read(self, value: Any) -> Any:
        return host_address(value) if self.parameter.type == "void" else self.scalar.read(value)


class Lent(HostMemory):
    """Memory whose size is another argument. A buffer must have at least that size."""

    dependent = True

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        nbytes = others[self.places[self.parameter.extent or ""]]
        if type(value) is Address and nbytes > value.keep.nbytes:
            raise Invalid(f"{self.name!r} is a buffer of {value.keep.nbytes} bytes, and the call needs {nbytes}")
        return value


class Source(Lent):
    """Memory that the call reads. A message has the memory's address if the machine can access the memory, otherwise
    its bytes.
    """

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        put_bytes(out, value, call.value(self.parameter.extent), call)
        call.keep.append(value)

    def take(self, incoming: Incoming, run: Run) -> int:
        return take_bytes(incoming, run)


class Target(Lent):
    """Memory to which the call writes. If the machine cannot access it, its bytes are sent back before the call
    returns.
    """

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        put_target(out, value, call.value(self.parameter.extent), call)
        call.keep.append(value)

    def take(self, incoming: Incoming, run: Run) -> int:
        return take_target(incoming, run)


def put_bytes(out: Outgoing, address: int, nbytes: int, call: Call) -> None:
    """Write the address of memory that a call reads and, if the machine cannot access this memory, its bytes. Raises
    Invalid if the bytes cannot be read.
    """
    known = call.caller.shared(address)
    unknown = known is None and address
    if unknown and not mapped.readable(address, nbytes):
        raise Invalid
    out.word(address if known is None else known)
    out.data((ctypes.c_char * nbytes).from_address(address) if unknown and nbytes else b"" if unknown else None)


def take_bytes(incoming: Incoming, run: Run) -> int:
    """The address that `put_bytes` has written to a message or, if bytes follow it, the address of these bytes."""
    address, content = incoming.word(), incoming.view()
    return address if content is None else _brought(run.memory(content), address)


def _brought(here: int, there: int) -> Address:
    """The Address `here` of memory in the machine's process, which replaces the caller's memory at `there`."""
    made = Address(here)
    made.origin = there
    return made


def put_target(out: Outgoing, address: int, nbytes: int, call: Call) -> None:
    """Write the address of memory to which a call writes and, if the machine cannot access this memory, its size. The
    machine then makes a buffer of this size, and sends the contents of the buffer back after the call. Raises Invalid
    if neither the machine nor the caller's process can write the memory.
    """
    known = call.caller.shared(address)
    if known is None and address and not mapped.writable(address, nbytes):
        raise Invalid
    out.word(address if known is None else known)
    out.word(NONE if known is not None or not address else nbytes)
    if known is None and address:
        call.lent.append(functools.partial(_store, int(address)))


def take_target(incoming: Incoming, run: Run) -> int:
    """The address that `put_target` has written or, if a size follows it, the address of a new buffer of this size."""
    address, nbytes = incoming.word(), incoming.word()
    if nbytes == NONE:
        return address
    made = _brought(run.lend(nbytes), address)
    made.keep = run.lent[-1]
    return made


def _store(address: int, content: Any) -> None:
    if content:
        memoryview((ctypes.c_char * len(content)).from_address(address)).cast("B")[:] = content


class Host(HostMemory):
    """An address, which is neither read nor written."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(call.caller.known(value))


class Registered(HostMemory):
    """Memory that the call registers, with its file if it is a shared mapping of a file."""

    dependent = True

    def complete(self, value: Any, others: Sequence[Any]) -> Any:
        if value and not mapped.present(value, others[self.places[self.parameter.extent or ""]]):
            raise Invalid
        return value

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        nbytes = call.value(self.parameter.extent)
        out.word(call.caller.register(value))
        found = call.caller.registration(value, nbytes) if value and nbytes else None
        out.word(NONE if found is None else found[1])
        if found is not None:
            out.descriptor(found[0], own=True)

    def take(self, incoming: Incoming, run: Run) -> Any:
        address, offset = incoming.word(), incoming.word()
        descriptor = None if offset == NONE else incoming.descriptor()
        if descriptor is not None:
            run.received.append(descriptor)
            run.file = descriptor, offset
        return address


class Descriptor(HostMemory):
    """A file descriptor, which still belongs to the caller after the call."""

    def read(self, value: Any) -> int:
        number = host_address(value)
        return number if number < 1 << 31 else -1

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        try:
            fcntl.fcntl(value, fcntl.F_GETFD)
        except (OSError, OverflowError, ValueError):
            out.word(NONE)
        else:
            out.descriptor(value, own=False)

    def take(self, incoming: Incoming, run: Run) -> Any:
        found = incoming.descriptor()
        if found is None:
            return -1
        run.received.append(found)
        return found
