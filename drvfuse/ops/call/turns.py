# SPDX-License-Identifier: Apache-2.0
"""The resources that launches of different calls use in turn: the workspaces of a group, or that of an op on one
device.

`Turns` is what a `Prepared` asks of them before, between and after its launches; here are the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import ArgumentError
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.graph import Graph
from ...runtime.stream import Event, Stream
from . import scratch
from .scratch import Workspace
from .streams import resolve_stream, resolve_streams

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...comm.history import Noted
    from .operands import Operand


class Turns(Protocol):
    """See the module. Positions count the local ranks; an op on one device has position 0 alone. `ranks` are all that
    take part in a call, in whatever process."""

    ranks: int

    def require_open(self) -> None:
        """Raise ClosedError if nothing can be launched any more."""

    def choose(self, streams: Any, rank: Any, stream: Any, inputs: Sequence[Operand]) -> tuple[list[int], list[Stream]]:
        """Positions and streams for the arguments of `Prepared.launch`; no positions: all, on the streams returned, or
        on those of `prepare` where none are."""

    def admit(self, streams: Sequence[Stream]) -> None:
        """Raise what earlier launches have reported, and reset the state that they left behind."""

    def follow(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        """Order the streams after the launches of the previous turn."""

    def begin(self, positions: Sequence[int], call: Noted) -> None:
        """Called before launches of `call` at these positions, outside of captures."""

    def abandon(self) -> None:
        """Called when not all launches of a call were made."""

    def launched(self, position: int, stream: Stream, event: Event | None, capture: int | None) -> None:
        """Called after the launch at `position` was queued; where the stream is foreign, `event` was recorded after
        it.
        """

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        """Called after the launch of `call` at `position` was captured into `graph`, or into a graph of another library
        (None).
        """

    @property
    def more(self) -> Sequence[Array]:
        """Memory besides the call's own arrays that each launch uses."""


class GroupTurns:
    """Collectives of a group, one at a time."""

    more: Sequence[Array] = ()

    def __init__(self, group: Group) -> None:
        self.group = group
        self.require_open, self.admit = group.require_open, group.admit
        self.begin, self.abandon = group.begin, group.abandon
        self.ranks = group.size
        self._ranks = group.ranks

    def choose(self, streams: Any, rank: Any, stream: Any, inputs: Sequence[Operand]) -> tuple[list[int], list[Stream]]:
        if rank is None:
            if stream is not None:
                raise ArgumentError("stream", repr(stream), "given together with rank=; use streams= for all ranks")
            return [], resolve_streams(self.group, streams, inputs)
        if streams is not None:
            raise ArgumentError("streams", repr(streams), "None together with rank=; use stream=")
        for position, local in enumerate(self._ranks):
            if local.index == rank and not isinstance(rank, bool):
                return [position], [] if stream is None else [local.wrap(stream)]
        raise ArgumentError("rank", repr(rank), f"a local rank, one of {[local.index for local in self._ranks]}")

    def follow(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        for index, stream in enumerate(streams):
            rank = self._ranks[positions[index]]
            if rank.order.last is not stream or stream.foreign:
                rank.order.admit(stream, rank.index)

    def launched(self, position: int, stream: Stream, event: Event | None, capture: int | None) -> None:
        order = self._ranks[position].order
        if order.last is not stream or stream.foreign:  # else it knows
            order.launched(stream, event, capture)

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        self.group.captured(position, graph, call)


class DeviceTurns:
    """An op on one device that needs no workspace."""

    ranks = 1
    more: Sequence[Array] = ()

    def __init__(self, device: Device) -> None:
        self.device = device
        self.require_open = device.driver.require_open

    def choose(self, streams: Any, rank: Any, stream: Any, inputs: Sequence[Operand]) -> tuple[list[int], list[Stream]]:
        for name, value in () if streams is rank is None else (("streams", streams), ("rank", rank)):
            if value is not None:
                raise ArgumentError(name, repr(value), "left out: the op is on one device; use stream=")
        return [], [resolve_stream(self.device, stream, inputs)]

    def admit(self, streams: Sequence[Stream]) -> None:
        pass

    def follow(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        pass

    def begin(self, positions: Sequence[int], call: Noted) -> None:
        pass

    def abandon(self) -> None:
        pass

    def launched(self, position: int, stream: Stream, event: Event | None, capture: int | None) -> None:
        pass

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        pass


class WorkspaceTurns(DeviceTurns):
    """An op on one device with a workspace: the caller's, or that of the stream on which it is launched."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        given: Array | None,
        nbytes: int,
        bind: Callable[[Workspace], None],
        kind: str = "",
    ) -> None:
        """`bind` writes the workspace to the parameters. Raises CaptureError where one must be made in a capture."""
        super().__init__(device)
        self._nbytes, self._bind, self._kind, self._own = nbytes, bind, kind, given is None
        self._scratch = device.part(scratch.Scratch)
        self.space = scratch.own(device, stream, nbytes, kind) if given is None else scratch.brought(device, given)
        self.more = (self.space.array,)
        bind(self.space)

    def admit(self, streams: Sequence[Stream]) -> None:
        stream = streams[0]
        if self._own and (self._scratch.last is not self.space or self.space.user is not stream):
            space = scratch.own(self.device, stream, self._nbytes, self._kind)
            if space is not self.space:
                self._bind(space)
                self.space, self.more = space, (space.array,)
        self.space.admit(stream)

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        if graph is not None:
            graph.before_launch(self.space.admit)
