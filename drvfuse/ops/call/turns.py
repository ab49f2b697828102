# SPDX-License-Identifier: Apache-2.0
"""Resources that launches of different calls use one after another: a group's workspaces, or one device's workspace.

`Turns` is the interface by which a `Prepared` uses them before and after its launches. `GroupTurns` implements it for
collectives, `DeviceTurns` and `WorkspaceTurns` for ops on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import ArgumentError, shown
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
    """The order of calls that share workspaces: what a `Prepared` uses before and after its launches.

    A position is the index of a local rank; an op on one device has position 0 alone. `ranks` is the number of ranks
    that take part in a call, in all processes.
    """

    ranks: int

    def require_open(self) -> None:
        """Raise ClosedError if nothing can be launched any more."""

    def choose(self, streams: Any, rank: Any, stream: Any, inputs: Sequence[Operand]) -> tuple[list[int], list[Stream]]:
        """Return the positions and streams that the arguments of `Prepared.launch` select.

        No positions means that all ranks are launched, on the returned streams. A position without a stream means that
        this rank is launched on the stream that `prepare` got for it.
        """

    def admit(self, streams: Sequence[Stream]) -> None:
        """Raise the error that an earlier launch has reported. If that error was raised already, reset the state that
        the failed launch has left."""

    def follow(self, positions: Sequence[int], streams: Sequence[Stream]) -> bool:
        """Order the streams after the launches of the previous call. Returns whether a rank's stream may differ from
        the stream of the rank's previous call. If so, `launched` must be called."""

    def begin(self, positions: Sequence[int], call: Noted) -> None:
        """Record that `call` is about to be launched on the ranks at `positions`. Called outside of captures only.
        Raises LaunchError if another call must be launched on one of the ranks first."""

    def abandon(self) -> None:
        """Record that only some launches of a call were made, because of an error: a group must then be reset."""

    def launched(self, position: int, stream: Stream, event: Event | None, capture: int | None) -> None:
        """Record that the launch at `position` was queued on `stream`. Called if `follow` returned True. `capture` is
        the capture that holds the launch, or None. If the stream is foreign and not captured, `event` was recorded
        after the launch; otherwise `event` is None.
        """

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        """Record that the launch of `call` at `position` was captured into `graph`, or into a graph of another library
        (None).
        """

    @property
    def more(self) -> Sequence[Array]:
        """The memory that each launch uses besides the arrays of the call."""


class GroupTurns:
    """The `Turns` of a group, whose collectives use its workspaces one after another."""

    more: Sequence[Array] = ()

    def __init__(self, group: Group) -> None:
        self.group = group
        self.require_open, self.admit = group.require_open, group.admit
        self.begin, self.abandon = group.state.begin, group.state.abandon
        self.ranks = group.size
        self._ranks = group.ranks

    def choose(self, streams: Any, rank: Any, stream: Any, inputs: Sequence[Operand]) -> tuple[list[int], list[Stream]]:
        if rank is None:
            if stream is not None:
                raise ArgumentError("stream", shown(stream), "given together with rank=; use streams= for all ranks")
            return [], resolve_streams(self.group, streams, inputs)
        if streams is not None:
            raise ArgumentError("streams", shown(streams), "None together with rank=; use stream=")
        for position, local in enumerate(self._ranks):
            if local.index == rank and not isinstance(rank, bool):
                return [position], [] if stream is None else [local.wrap(stream)]
        raise ArgumentError("rank", shown(rank), f"a local rank, one of {[local.index for local in self._ranks]}")

    def follow(self, positions: Sequence[int], streams: Sequence[Stream]) -> bool:
        elsewhere = False
        for index, stream in enumerate(streams):
            rank = self._ranks[positions[index]]
            # If the rank's last call was on the same stream of drvfuse, the stream itself orders the two calls.
            if rank.order.last is not stream or stream.foreign:
                rank.order.admit(stream, rank.index)
                elsewhere = True
        return elsewhere

    def launched(self, position: int, stream: Stream, event: Event | None, capture: int | None) -> None:
        self._ranks[position].order.launched(stream, event, capture)

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        self.group.captured(position, graph, call)


class DeviceTurns:
    """The `Turns` of an op that runs on one device and has no workspace. Calls of the op share nothing."""

    ranks = 1
    more: Sequence[Array] = ()

    def __init__(self, device: Device) -> None:
        self.device = device
        self.require_open = device.driver.require_open

    def choose(self, streams: Any, rank: Any, stream: Any, inputs: Sequence[Operand]) -> tuple[list[int], list[Stream]]:
        for name, value in () if streams is rank is None else (("streams", streams), ("rank", rank)):
            if value is not None:
                raise ArgumentError(name, shown(value), "left out: the op is on one device; use stream=")
        return [], [resolve_stream(self.device, stream, inputs)]

    def admit(self, streams: Sequence[Stream]) -> None:
        pass

    def follow(self, positions: Sequence[int], streams: Sequence[Stream]) -> bool:
        return False

    def begin(self, positions: Sequence[int], call: Noted) -> None:
        pass

    def abandon(self) -> None:
        pass

    def launched(self, position: int, stream: Stream, event: Event | None, capture: int | None) -> None:
        pass

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        pass


class WorkspaceTurns(DeviceTurns):
    """The `Turns` of an op that runs on one device and has a workspace: the caller's, or that of the stream on which
    the op is launched."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        given: Array | None,
        nbytes: int,
        bind: Callable[[Workspace], None],
        kind: str = "",
    ) -> None:
        """`bind` writes a workspace to the parameters. Raises CaptureError if a capture would have to allocate one."""
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
