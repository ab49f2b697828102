# SPDX-License-Identifier: Apache-2.0
"""Launches of a kernel: the configuration, which is checked once, and prepared launches with their own arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, kind_of, require_integer
from . import calls
from .array import mark_used
from .device import Device
from .graph import capturing
from .launch_attributes import LaunchAttribute, LaunchCompletionEvent, ProgrammaticEvent
from .packing import Argument, Arguments, Struct
from .stream import Stream, StreamLike

if TYPE_CHECKING:
    from .array import Array
    from .kernel import Kernel


class Configuration:
    """A kernel on a device with its grid, block, shared memory and launch attributes. Made by `Kernel.configure`.

    `function` is the loaded kernel, `smem` the bytes of dynamic shared memory.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: Device,
        function: object,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        smem: int,
        attributes: Sequence[object],
    ) -> None:
        self.kernel, self.device, self.function = kernel, device, function
        self.grid, self.block, self.smem = grid, block, smem
        self.events = [a.event for a in attributes if isinstance(a, (LaunchCompletionEvent, ProgrammaticEvent))]
        types = device.driver.types
        self._built: list[Any] = [a.build(types) if isinstance(a, LaunchAttribute) else a for a in attributes]
        for attribute in self._built:
            if not isinstance(attribute, types.CUlaunchAttribute):
                raise ArgumentError("attrs", kind_of(attribute), "launch attributes")
        identities = [int(attribute.id) for attribute in self._built]
        if len(set(identities)) != len(identities):
            raise ArgumentError("attrs", "the same attribute twice", "each attribute once")
        self._names = tuple(
            repr(given) if isinstance(given, LaunchAttribute) else built.id.name
            for given, built in zip(attributes, self._built, strict=True)
        )

    def prepare(self, *args: Argument) -> Launch:
        """A launch with the arguments `args`, checked and packed as by `Kernel.prepare`."""
        return Launch(self, Arguments(self.kernel.info, args, self.device))

    def build(self) -> Any:
        """A new CUlaunchConfig without a stream."""
        return config_of(self.device.driver.types, self.grid, self.block, self.smem, self._built)

    def facts(self, arguments: Arguments) -> calls.LaunchFacts:
        """The facts that the record of calls shows about launches with these arguments."""
        info = self.kernel.info
        where = info.name, self.device.index, self.grid, self.block, self.smem
        return calls.LaunchFacts(*where, self._names, info.params, arguments.structures)


class Launch:
    """A prepared launch. A call with a stream queues the kernel and does not wait. One thread at a time may use it.

    It keeps its Arrays alive, and calls their `used_on`.
    """

    def __init__(self, configuration: Configuration, arguments: Arguments) -> None:
        self.kernel, self.device, self.grid = configuration.kernel, configuration.device, configuration.grid
        self.block, self.smem = configuration.block, configuration.smem
        self._function, self._events = configuration.function, configuration.events
        self._arguments, self._config = arguments, configuration.build()
        self._facts = configuration.facts(arguments)
        self._handle_set = 0
        self._most = math.prod(self.grid)
        self._closable: list[Array] = []
        if arguments.arrays:
            self._find_closable()

    def __repr__(self) -> str:
        return f"<Launch {self.kernel.info.name} grid {self.grid} block {self.block} on device {self.device.index}>"

    def set(self, index: int, value: Argument) -> None:
        """Rewrite argument `index` in place, with the checks of `prepare`. Launches that are already queued keep the
        old value.
        """
        self._arguments.set(index, value)
        self._find_closable()

    def _find_closable(self) -> None:
        self._closable = [array for array in self._arguments.arrays.values() if array.closable]

    def resize(self, grid: int) -> None:
        """Use another one-dimensional grid from now on: from 1 block to the number that `prepare` has checked."""
        if type(grid) is not int or not 1 <= grid <= self._most:
            grid = require_integer("grid", grid, f"a number of blocks, 1 to {self._most}", 1, self._most)
        self._config.gridDimX = grid
        self.grid = (grid, 1, 1)
        self._facts = self._facts._replace(grid=self.grid)

    def view(self, index: int, kind: type[Struct]) -> Struct:
        """Argument `index` as a struct of class `kind`, which shares the argument's memory: a launch passes what was
        last written to the fields.
        """
        return self._arguments.view(index, kind)

    def __call__(self, stream: StreamLike) -> None:
        """Queue the kernel on `stream`: a Stream of the launch's device, or a stream in any form that `Stream.wrap`
        takes."""
        if not isinstance(stream, Stream) or stream.device is not self.device:
            stream = Stream.wrap(self.device, stream)
        if stream._closed:
            stream._check_open()
        if stream.handle != self._handle_set:
            self._config.hStream = stream.handle
            self._handle_set = stream.handle
        arguments = self._arguments
        for array in self._closable:
            array.require_open()
        for event in self._events:
            event._check_open()
        note = self._facts, self._handle_set, bytes(arguments.packed)  # a copy: arguments may change in place
        with self.device.use():
            self.device.driver.launch(note, self._config, self._function, arguments.address, 0)
        if arguments.arrays:
            outside = stream.foreign and stream.capture_id() is None
            mark_used(arguments.arrays.values(), stream, stream.mark() if outside else None)
        graph = capturing(stream) if self._closable else None
        if graph is not None:
            graph.keep(*self._closable)


def config_of(types: Any, grid: Sequence[int], block: Sequence[int], smem: int, attributes: list[Any]) -> Any:
    """A CUlaunchConfig without a stream; `attributes` are objects of the bindings."""
    config = types.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.attrs, config.numAttrs = smem, attributes, len(attributes)
    return config
