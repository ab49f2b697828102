# SPDX-License-Identifier: Apache-2.0
"""A driver whose calls and results are written as bytes and read again, on a machine of this process."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from driver_helpers import primary

from drvfuse.emu import Machine
from drvfuse.emu.bindings import R
from drvfuse.emu.driver import ENTRIES, perform
from drvfuse.emu.driver.launch import layout_of
from drvfuse.emu.machine.memory.foreign import FOREIGN
from drvfuse.emu.machine.objects import Function
from drvfuse.emu.wire.arguments import Invalid
from drvfuse.emu.wire.coder import coder
from drvfuse.emu.wire.message import Incoming, Outgoing
from drvfuse.emu.wire.parameters import Layout


class Loopback:
    """What `drvfuse.emu.wire` needs from the caller's process and from the machine's process, which are one here."""

    def __init__(self, machine: Machine | None) -> None:
        self.machine = machine

    def shared(self, address: int) -> int | None:
        return address if self.machine is not None and self.machine.window.contains(address) else None

    def known(self, address: int) -> int:
        return address

    register = known

    def lasting(self, address: int) -> int:
        return address if self.shared(address) is not None else address + FOREIGN

    def back(self, address: int) -> int:
        return address - FOREIGN if address >= FOREIGN else address

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def layout(self, function: int) -> Layout | None:
        found = None if self.machine is None else self.machine.own.handles.get(function)
        return layout_of(found) if isinstance(found, Function) else None

    def registration(self, address: int, nbytes: int) -> None:
        return None

    def pinned(self, address: int) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def keep_image(self, link: int, content: bytes) -> int:
        self._image = ctypes.create_string_buffer(content)
        return ctypes.addressof(self._image)

    def managed(self, address: int) -> None:
        return None

    def map_pinned(self, address: int, nbytes: int, descriptor: int) -> None:
        os.close(descriptor)

    def call_back(self, function: int, argument: int) -> int:
        return int(ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(function)(argument))


class LoopbackDriver:
    """The driver API of a machine, whose calls and results are written as bytes and read again."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._ends, self.process = machine, Loopback(machine), machine.own
        machine.own.foreign = self._ends
        self._kept: deque[Any] = deque(maxlen=100)

    def __getattr__(self, name: str) -> Any:
        made = coder(name)

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            out = Outgoing()
            try:
                sent = made.write_call(out, made.read(args, kwargs), self._ends)
            except Invalid:
                return ENTRIES[name].failure(R.CUDA_ERROR_INVALID_VALUE)
            incoming = Incoming(memoryview(b"".join(out.parts)), out.descriptors)
            run = made.read_call(incoming, self._ends)
            assert incoming.at == len(incoming.content)
            self._kept.append(run)
            result = perform(self._machine.own, ENTRIES[name], run.values)
            if result[0]:
                out = Outgoing()
                made.write_filled(out, run)
                made.read_filled(Incoming(memoryview(b"".join(out.parts)), []), sent)
                return result
            out = Outgoing()
            made.write_result(out, result[1:], run)
            incoming = Incoming(memoryview(b"".join(out.parts)), out.descriptors)
            found = made.read_result(incoming, sent)
            assert incoming.at == len(incoming.content)
            return (result[0], *found)

        return call


FORMS = ("own", "as bytes")


@contextmanager
def initialised(form: str, devices: int) -> Iterator[Any]:
    """Yield the driver API of a new machine. `form` is one of FORMS: functions are called directly, or all calls are
    written as bytes and read again. The primary context of device 0 is current."""
    with Machine(devices=devices) as machine:
        machine.driver.cuInit(0)
        made = machine.driver if form == "own" else LoopbackDriver(machine)
        primary(made)
        yield made
