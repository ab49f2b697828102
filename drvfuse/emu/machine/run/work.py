# SPDX-License-Identifier: Apache-2.0
"""Commands, which are given to streams and graphs, and operations. An operation is one queued run of a command.

A command never changes, so a graph can queue it any number of times. Each operation has the number of operations for
which it still has to wait, and the list of its dependents.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...findings.race import Ordered
from ..memory import foreign
from ..objects import Context, Event, Function

if TYPE_CHECKING:
    from ..graphs.memory import GraphMemory
    from ..graphs.user_objects import UserObject
    from ..machine import Machine
    from ..memory.allocation import Allocation
    from ..process.process import Process

Dim = tuple[int, int, int]


class Op(Ordered):
    """One queued run of a command. `number` counts the operations of the machine. `primary` is the previous kernel, if
    the operation may overlap it (programmatic launch). `call` is the driver function that queued the operation.
    `allocations` are the numbers of the allocations that the command touches, found when it was queued
    (`queued.touched`).
    """

    __slots__ = (
        "allocations",
        "at",
        "call",
        "command",
        "dependents",
        "launch",
        "order",
        "primary",
        "room",
        "secondaries",
        "time",
        "waits",
    )

    def __init__(self, command: Command, order: tuple[int, ...], number: int) -> None:
        super().__init__(number, command.context.device.index)
        self.command = command
        self.call = ""
        self.order = order
        self.waits = 0
        self.allocations: list[tuple[int, ...]] = []
        self.dependents: list[Op] = []
        self.primary: Op | None = None
        self.secondaries: list[Op] = []
        self.launch: Any = None
        self.room = 0
        self.time = 0
        self.at = 0  # the number of writes of values, and waits for values, that this operation has done

    def __lt__(self, other: Op) -> bool:
        return self.order < other.order


class Access(NamedTuple):
    """A read or a write of a range by a copy or a fill."""

    address: int
    nbytes: int
    write: bool


@dataclass(frozen=True, eq=False)
class Command:
    """What an operation does when it runs. This base class does nothing: it marks a place in a stream, or joins several
    streams. After a fault in its `context`, a command does not run any more.
    """

    context: Context

    @property
    def title(self) -> str:
        """The name of the command in reports."""
        return type(self).__name__.lower()

    def run(self, machine: Machine) -> None:
        """Execute the command at once. Kernels and host functions are executed elsewhere."""

    def accesses(self) -> tuple[Access, ...]:
        """Ranges that contain all memory that `run` reads and writes."""
        return ()

    def touches(self) -> Iterable[Access]:
        """The exact ranges that `run` reads and writes."""
        return self.accesses()


@dataclass(frozen=True, eq=False)
class Copy(Command):
    """A copy. `source` is an address, or the bytes of pageable memory at the time when the copy was queued."""

    destination: int
    source: int | bytes
    nbytes: int
    keep: Any = None

    def run(self, machine: Machine) -> None:
        if isinstance(self.source, bytes):
            machine.window.view(self.destination, self.nbytes)[:] = np.frombuffer(self.source, np.uint8)
            if machine.window.contains(self.destination, self.nbytes):
                machine.window.mark_initialised(self.destination, self.nbytes)
        else:
            foreign.copy(machine.window, self.context.process.foreign, self.destination, self.source, self.nbytes)

    def accesses(self) -> tuple[Access, ...]:
        target = Access(self.destination, self.nbytes, True)
        return (target,) if isinstance(self.source, bytes) else (target, Access(self.source, self.nbytes, False))


class End(NamedTuple):
    """The source or the destination of a copy of rows: its first byte, and the distances between rows and between
    layers. `given` are the fields of the call, by their names in CUDA_MEMCPY3D without "src" or "dst".
    """

    address: int
    pitch: int
    layer: int
    given: Mapping[str, Any]

    def rows(self, height: int, depth: int) -> Iterator[int]:
        """The address of each row of a copy of `depth` layers with `height` rows each."""
        return (self.address + z * self.layer + y * self.pitch for z in range(depth) for y in range(height))

    def span(self, width: int, height: int, depth: int) -> int:
        """The number of bytes from the first to the last byte of a copy. The copy has `depth` layers, a layer has
        `height` rows, and a row has `width` bytes.
        """
        return (depth - 1) * self.layer + (height - 1) * self.pitch + width


@dataclass(frozen=True, eq=False)
class Copy3D(Command):
    """A copy of `depth` layers with `height` rows each; a row has `width` bytes. None of these numbers is 0."""

    destination: End
    source: End
    width: int
    height: int = 1
    depth: int = 1
    keep: Any = None

    def run(self, machine: Machine) -> None:
        for destination, source in zip(self._rows(self.destination), self._rows(self.source), strict=True):
            foreign.copy(machine.window, self.context.process.foreign, destination, source, self.width)

    def _rows(self, end: End) -> Iterator[int]:
        return end.rows(self.height, self.depth)

    def accesses(self) -> tuple[Access, ...]:
        shape = self.width, self.height, self.depth
        return (
            Access(self.destination.address, self.destination.span(*shape), True),
            Access(self.source.address, self.source.span(*shape), False),
        )

    def touches(self) -> Iterable[Access]:
        for destination, source in zip(self._rows(self.destination), self._rows(self.source), strict=True):
            yield Access(destination, self.width, True)
            yield Access(source, self.width, False)


@dataclass(frozen=True, eq=False)
class Fill(Command):
    """A fill of `rows` rows, `pitch` bytes apart, each with `count` copies of a value of `size` bytes."""

    destination: int
    value: int
    size: int
    count: int
    rows: int = 1
    pitch: int = 0

    def run(self, machine: Machine) -> None:
        for row in range(self.rows):
            address = self.destination + row * self.pitch
            machine.window.view(address, self.count * self.size).view(f"<u{self.size}")[:] = self.value
            machine.window.mark_initialised(address, self.count * self.size)

    def accesses(self) -> tuple[Access, ...]:
        return (Access(self.destination, (self.rows - 1) * self.pitch + self.count * self.size, True),)

    def touches(self) -> Iterable[Access]:
        return (Access(self.destination + row * self.pitch, self.count * self.size, True) for row in range(self.rows))


@dataclass(frozen=True, eq=False)
class Allocate(Command):
    """An allocation node of a graph: maps the memory of the node at the address that the node was given."""

    memory: GraphMemory

    def run(self, machine: Machine) -> None:
        self.context.process.graph_memory.occupy(self.memory)


@dataclass(frozen=True, eq=False)
class Free(Command):
    """Frees an allocation. Memory of a pool returns to the pool. Accesses to memory of a graph fault until its
    allocation node runs again.
    """

    allocation: Allocation

    def run(self, machine: Machine) -> None:
        self.context.process.memory.give_back(self.allocation)


@dataclass(frozen=True, eq=False)
class Release(Command):
    """Gives references to user objects back. It runs even after a fault."""

    objects: Mapping[UserObject, int]

    def run(self, machine: Machine) -> None:
        release(self.context.process, self.objects)


@dataclass(frozen=True, eq=False)
class Leave(Command):
    """Closes memory of another process, which this process has opened."""

    view: Allocation

    def run(self, machine: Machine) -> None:
        self.context.process.memory.free(self.view)


@dataclass(frozen=True, eq=False)
class Record(Command):
    """An event record node of a graph. Work outside of the graph can wait for the event."""

    event: Event


@dataclass(frozen=True, eq=False)
class Wait(Command):
    """A wait node of a graph. It waits for the event as it was last recorded before the graph was launched."""

    event: Event


@dataclass(frozen=True, eq=False)
class HostCall(Command):
    """A host function, by its address. It runs without the machine's lock and may not call the driver."""

    function: int
    argument: int
    keep: Any = None

    def arguments(self) -> tuple[int, ...]:
        return (self.argument,)


@dataclass(frozen=True, eq=False)
class Callback(HostCall):
    """A host function that gets the stream and its error (cuStreamAddCallback). It runs even after a fault."""

    stream: int = 0

    def arguments(self) -> tuple[int, ...]:
        return self.stream, int(self.context.error or 0), self.argument


@dataclass(frozen=True, eq=False)
class Launch(Command):
    """A kernel launch with packed parameters. `programmatic`: it may overlap the previous kernel. `cluster`: the shape
    of its clusters, or None. `hints`: attributes that have no effect here, by id.
    """

    function: Function
    grid: Dim
    block: Dim
    smem: int
    params: bytes
    cooperative: bool = False
    programmatic: bool = False
    priority: int | None = None
    cluster: Dim | None = None
    hints: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def cluster_blocks(self) -> int:
        """The number of blocks of a cluster, which become resident together."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2] if self.cluster else 1

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


def retain(objects: Mapping[UserObject, int]) -> None:
    """Add references to user objects."""
    for item, count in objects.items():
        item.retain(count)


def release(process: Process, objects: Mapping[UserObject, int]) -> None:
    """Give references to user objects back."""
    for item, count in objects.items():
        item.release(process, count)


def call_host(address: int, *arguments: int) -> None:
    """Call a C function of this operating-system process that takes words and returns nothing."""
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arguments))(address)(*arguments)
