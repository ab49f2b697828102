# SPDX-License-Identifier: Apache-2.0
"""Arguments that are code: images and their options, the parameters of kernels, functions of the caller."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..space import mapped
from . import jit_options
from .arguments import Invalid, image_bytes
from .calls import Call, Run
from .inputs import Input, List, StructArray
from .message import Incoming, Outgoing
from .parameters import KernelParameters, lay_out, pack
from .structs import CUDA_LAUNCH_PARAMS


class Image(Input):
    """An image to load, as bytes. None for no image."""

    def read(self, value: Any) -> bytes | None:
        return image_bytes(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.data(value)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return incoming.data()


class Options(List):
    """The values of options, such as those of cuModuleLoadDataEx. The type of each value depends on the option, which
    is in another argument. Of the values, only numbers are sent to the machine; for a list or an error buffer, 0 is
    sent. If the call fails, the caller's process writes the machine's message to the error buffer.
    """

    def read(self, value: Any) -> Any:
        return [] if value is None else value

    def complete(self, value: Any, others: Sequence[Any]) -> list[Any]:
        found = [
            jit_options.read(option, item)
            for option, item in zip(others[self.places[self._options]], value, strict=False)
        ]
        super().complete(value, others)
        return found

    @property
    def _options(self) -> str:
        return {"libraryOptionValues": "libraryOptions", "jitOptionsValues": "jitOptions"}.get(self.name, "options")

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for option, item in zip(call.value(self._options), value, strict=False):
            number = isinstance(item, int | float) and not jit_options.is_buffer(option)
            out.word(int(item) if number else 0)

    def take(self, incoming: Incoming, run: Run) -> Any:
        return [incoming.word() for _ in range(incoming.word())]


class Parameters(Input):
    """The parameters of a kernel. In a message, `kernelParams` is the parameter block, in whichever form it was
    given.
    """

    def read(self, value: Any) -> Any:
        return self.scalar.read(value) if self.name == "extra" else KernelParameters.read(value)

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        if self.name == "extra":
            return
        given = call.signature.given
        function = next(i for i, p in enumerate(given) if p.type == "CUfunction")
        extra = call.values[-1] if given[-1].name == "extra" else 0
        layout = call.caller.layout(call.values[function])
        block = None if layout is None else pack(layout, value, extra)
        out.data(block)
        if block is not None and layout is not None:
            out.word(len(layout.parameters))
            for offset, _ in layout.parameters:
                out.word(offset)

    def take(self, incoming: Incoming, run: Run) -> Any:
        if self.name == "extra":
            return 0
        block = incoming.data()
        if block is None:
            return 0
        address, keep = lay_out(block, [incoming.word() for _ in range(incoming.word())])
        run.keep.append(keep)
        return address


class LaunchArray(StructArray):
    """A list of launches (CUDA_LAUNCH_PARAMS), each with its parameter block."""

    def put(self, out: Outgoing, value: Any, call: Call) -> None:
        out.word(len(value))
        for item in value:
            p = CUDA_LAUNCH_PARAMS.from_buffer_copy(self.kind.bytes_of(item))
            layout = call.caller.layout(p.function or 0)
            block = None if layout is None else pack(layout, p.kernelParams or 0, 0)
            out.data(bytes(p))
            out.data(block)
            offsets = [offset for offset, _ in layout.parameters] if layout is not None and block is not None else []
            for word in (len(offsets), *offsets):
                out.word(word)

    def take(self, incoming: Incoming, run: Run) -> Any:
        found = []
        for _ in range(incoming.word()):
            p = CUDA_LAUNCH_PARAMS.from_buffer_copy(incoming.data() or b"")
            block, offsets = incoming.data(), [incoming.word() for _ in range(incoming.word())]
            p.kernelParams, keep = (0, None) if block is None else lay_out(block, offsets)
            run.keep.append(keep)
            found.append(self.kind.made_of(bytes(p)))
        return found


class Function(Input):
    """The address of a function in the caller's process, or 0. Memory at this address must be executable."""

    def read(self, value: Any) -> int:
        address: int = self.scalar.read(value)
        if address and not mapped.executable(address):
            raise Invalid
        return address


class Callback(Function):
    """A function `size_t f(int)` of the caller's process, which the driver calls before the driver call returns. On the
    machine, a function that lets the caller's process call it takes its place.
    """

    def take(self, incoming: Incoming, run: Run) -> Any:
        address = incoming.word()
        if not address:
            return 0

        def call(argument: int) -> int:
            return run.machine.call_back(address, argument)

        function = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(call)
        run.keep.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value
