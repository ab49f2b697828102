# SPDX-License-Identifier: Apache-2.0
"""Calls that are checked, planned and compiled, and can be launched any number of times."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from ...comm.history import CallNote, Noted
from ...errors import ArgumentError, CaptureError, DrvfuseError
from ...plans.traffic import NONE, Traffic
from ...runtime import held
from ...runtime.array import depend_on
from ...runtime.graph import capturing
from ...runtime.lifetime import Owned, enter_launches, leave_launches
from .operands import Operand, no_overlap
from .order import ReplayOrder, Route
from .planned import Pointed, Ready
from .tracing import CallTrace
from .turns import Turns

if TYPE_CHECKING:
    from ...runtime.array import Array
    from ...runtime.launch import Launch
    from ...runtime.stream import Stream
    from .streams import StreamArgument, Streams

R = TypeVar("R")


class LaunchSequence(Protocol):
    """The launches of one call, in the order that its algorithm needs. `launches[i]` are those of local rank i."""

    @property
    def launches(self) -> Sequence[Sequence[Launch]]: ...

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        """Queue the work of the local ranks at `positions`, all or one, on their streams."""

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        """Raise if the algorithm cannot run on streams in `captures`, or for one rank alone. Queues nothing.

        `captures` has the capture of each stream, None for a stream that is not being captured. `submit` skips
        this check if it launches all ranks and no stream is being captured: every algorithm can run then.
        """


class Direct:
    """A launch sequence with one kernel per rank. The kernels wait for one another on the devices, so they may be
    launched in any order.

    A launch sequence with the attribute `pointed` can be launched again with other arrays (`repeat`). Its launches'
    parameters and the objects in `pointed` hold all addresses of the call's arrays.
    """

    pointed: Sequence[Pointed] = ()

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = [[launch] for launch in launches]

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        """Raise CaptureError if only some of the streams are being captured. A launch of one rank is never
        refused."""
        require_one_side(captures)

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        for index, stream in enumerate(streams):
            self.launches[positions[index]][0](stream)


def require_one_side(captures: Sequence[int | None]) -> None:
    """Raise CaptureError unless all streams are being captured or none is, as the kernels of ranks wait for one
    another."""
    if 0 < captures.count(None) < len(captures):
        inside = [position for position, capture in enumerate(captures) if capture is not None]
        others = [position for position, capture in enumerate(captures) if capture is None]
        raise CaptureError(
            f"the streams of local ranks {inside} are being captured and those of local ranks {others} are not: "
            "these would wait for kernels that only a replay starts. Capture the streams of all ranks, or launch "
            "each rank with launch(rank=i)"
        )


def submit(
    call: Noted,
    turns: Turns,
    sequence: LaunchSequence | None,
    positions: Sequence[int],
    routes: Sequence[Route],
    sections: Sequence[object] = (),
    *,
    alone: bool = False,
) -> None:
    """Queue the launches of `call` for the local ranks at `positions`, each on the stream of its route.

    If `sequence` is None, nothing is queued. A graph that captures the launches keeps the arrays alive, and also
    `sections`, which are sections of a trace. `alone`: only one rank is launched.
    """
    streams = [route.stream for route in routes]
    turns.admit(streams)
    if sequence is None:
        return
    captures = [stream.capture_id() for stream in streams]
    outside = captures.count(None) == len(captures)
    if alone or not outside:
        sequence.check(captures, alone)
    elsewhere = turns.follow(positions, streams)
    for index, route in enumerate(routes):
        if route.producers:
            route.follow_producers(captures[index])
    if outside:
        turns.begin(positions, call)
    enter_launches()
    try:
        sequence.launch(positions, streams)
    except BaseException:
        turns.abandon()
        _record_what_was_queued(call, turns, positions, routes, captures, sections)
        raise
    finally:
        leave_launches()
    _record(call, turns, positions, routes, captures, sections, elsewhere)


def _record(
    call: Noted,
    turns: Turns,
    positions: Sequence[int],
    routes: Sequence[Route],
    captures: Sequence[int | None],
    sections: Sequence[object],
    elsewhere: bool,
) -> None:
    """Record in the arrays of a call that the queued launches use them, let the graphs that capture the launches keep
    the arrays alive, and make the streams on which other libraries reuse their arrays wait for the launches.
    `elsewhere` is the result of `Turns.follow`."""
    more = turns.more
    for index, route in enumerate(routes):
        position, capture = positions[index], captures[index]
        stream = route.stream
        # A foreign stream may be destroyed before other work has to wait for this launch, so the event for that wait is
        # recorded now.
        event = stream.mark() if stream.foreign and capture is None else None
        if elsewhere:
            turns.launched(position, stream, event, capture)
        if more is not route.recorded or event is not None:
            route.record_use(event, more)
        if capture is not None:
            graph = capturing(stream)
            turns.captured(position, graph, call)
            if graph is not None:
                graph.keep(*route.arrays, *turns.more, *sections)
                if route.unordered:
                    graph.after_launch(route.keep_unordered)
                if route.libraries:
                    graph.part(ReplayOrder).add(route.libraries)
        elif route.unordered:
            held.keep(stream, route.unordered)
        if route.owners:
            route.lead_owners(event, capture)


def _record_what_was_queued(
    call: Noted,
    turns: Turns,
    positions: Sequence[int],
    routes: Sequence[Route],
    captures: Sequence[int | None],
    sections: Sequence[object],
) -> None:
    """Do what `_record` does, after an error between the launches of a call. Raises nothing, as the caller raises that
    error.

    A launch sequence does not tell which launches and copies it has queued, so all of them are recorded. It does no
    harm to record a launch that was not queued. Work on the stream of one rank may use the arrays of another rank (the
    copies of "naive"), and the launch sequence may not have ordered the two streams yet. So each stream first follows
    all other streams, except in captures.
    """
    outside = [route.stream for route, capture in zip(routes, captures, strict=True) if capture is None]
    for index, route in enumerate(routes):
        for other in outside if captures[index] is None else ():
            with suppress(DrvfuseError):
                route.stream.follow(other)
        one = slice(index, index + 1)
        try:
            _record(call, turns, positions[one], routes[one], captures[one], sections, True)
        except DrvfuseError:
            # For example, no event can be recorded after the loss of a context. The arrays are never freed then, as
            # nothing would tell when the launches no longer use them.
            route.stream.device.driver.abandoned.extend(route.arrays)


class Replaceable(Protocol):
    """Parameters that may change between launches. `structures[i]` is the second argument of the kernels of local rank
    i, and `operands[i]` are the arrays to which it points."""

    @property
    def structures(self) -> Sequence[ctypes.Structure]: ...

    @property
    def operands(self) -> Sequence[Sequence[Operand]]: ...

    def replaced(self, algo: str, parameters: dict[str, Any]) -> Self:
        """Return a copy with some parameters replaced. Raises ArgumentError for values that `algo` or the compiled
        kernel excludes."""


class Prepared(Generic[R]):
    """A call with its arrays checked, its plan made and its kernels loaded.

    `algo` is the algorithm that was chosen, or "" for an op with one algorithm. The object keeps its arrays alive and
    belongs to one thread. Contents of the arrays may change between launches; their addresses cannot.
    """

    def __init__(
        self,
        op: str,
        turns: Turns,
        result: R,
        reads: list[list[Operand]],
        writes: list[list[Operand]],
        sequence: LaunchSequence | None,
        streams: Sequence[Stream],
        ready: Sequence[Ready] = (),
        *,
        algo: str = "",
        traffic: Callable[[], Traffic] | None = None,
        parameters: Replaceable | None = None,
        trace: CallTrace | None = None,
    ) -> None:
        """`reads[i]` and `writes[i]` are the arrays that local rank i reads and writes; i is 0 for an op on one device.
        The first array of `reads[i]` is the input. The call keeps and changes these lists. `sequence` is None if there
        is nothing to launch. `streams[i]` is the stream of rank i for launches without the argument `streams` or
        `stream`. `give_back` returns the launches `ready` to their plans."""
        self.op, self.algo, self._traffic = op, algo, traffic
        self._turns, self._result, self._sequence, self._ready = turns, result, sequence, ready
        self._reads, self._writes = reads, writes
        if trace is not None:
            for arrays, buffer in zip(self._writes, trace.operands, strict=True):
                arrays.append(buffer)
        self._sections = trace.sections if trace is not None else []
        self._streams, self._parameters = streams, parameters
        self._positions = range(len(self._reads))
        self._routes: dict[tuple[int, Stream], Route] = {}
        self._usual: list[Route] = []  # the `Route` of each rank on its stream in `streams`
        first = self._reads[0][0]
        barriers, waits, adapts = 0, False, False
        for one in ready:
            barriers += one.planned.barriers
            waits = waits or one.planned.awaits_peers
            adapts = adapts or one.planned.adapts is not None
        barriers //= len(self._reads)
        self.note = CallNote(op, algo, turns.ranks, first.shape, first.dtype, barriers, waits, adapts)
        depend_on(self._arrays(), self)

    @property
    def launches(self) -> Sequence[Sequence[Launch]]:
        """The launches of each local rank. A launch that is called directly is neither ordered nor checked."""
        return self._sequence.launches if self._sequence is not None else [[] for _ in self._reads]

    @property
    def traffic(self) -> tuple[int, int]:
        """The (local, remote) bytes that a collective moves over all ranks, and (0, 0) for an op on one device."""
        moved = NONE if self._traffic is None else self._traffic()
        return moved.local, moved.remote

    def describe(self) -> str:
        """Return the call in words, as "allreduce one_stage of 4 x (128, 4096) bfloat16"."""
        return str(self.note)

    def __repr__(self) -> str:
        return f"<Prepared {self.describe()}>"

    def launch(self, streams: Streams = None, *, rank: int | None = None, stream: StreamArgument = None) -> R:
        """Queue the call and return its results, which are valid in the order of the streams.

        Without arguments it runs on the streams given to `prepare` (by default each rank's own). `streams` replaces
        them. With `rank` only that rank's part is queued, on `stream` or on the stream given to `prepare`; every other
        rank must be launched within the time of the `spin_timeout` setting. An op on one device takes only `stream`.

        Raises BarrierTimeout if an earlier call on the group timed out (the next call then resets the group),
        GridTimeout if an earlier call with the op's workspace timed out, CaptureError where stream order cannot be
        established in a capture, Unsupported if the algorithm cannot be launched for one rank alone or in this capture,
        and ClosedError after `group.close()`, and after the `close()` of a buffer that an array of the call belongs to.
        Raises LaunchError if an earlier call was launched on some ranks alone:
        launch that call on the other ranks first.
        """
        if streams is None and rank is None and stream is None:
            if not self._usual:
                self._usual = [self._route(*each) for each in enumerate(self._streams)]
            submit(self, self._turns, self._sequence, self._positions, self._usual, self._sections)
            return self._result
        positions, chosen = self._turns.choose(streams, rank, stream, [arrays[0] for arrays in self._reads])
        if positions:
            self._queue(positions, chosen or [self._streams[positions[0]]], alone=True)
        else:
            self._queue(self._positions, chosen)
        return self._result

    def set(self, **parameters: Any) -> None:
        """Replace parameters of the epilogue for the launches that follow; nothing is compiled.

        A parameter is given as to `Epilogue`, and has the type of the value that it replaces. Launches already queued
        or captured keep the old values.
        """
        old = self._parameters
        if old is None:
            raise ArgumentError("parameters", list(parameters), "empty: this call has no epilogue")
        self._turns.require_open()
        new = old.replaced(self.algo, parameters)
        no_overlap(_flat(new.operands), _flat(self._writes))
        for position, structure in enumerate(new.structures):
            for launch in self._sequence.launches[position] if self._sequence is not None else ():
                launch.set(1, structure)
            kept = self._reads[position][: len(self._reads[position]) - len(old.operands[position])]
            self._reads[position] = [*kept, *new.operands[position]]
        self._routes.clear()
        self._usual = []
        self._parameters = new
        depend_on(self._arrays(), self)

    def owner_closed(self, owner: Owned) -> None:
        """See `runtime.lifetime.Dependent`: the next launch makes its routes anew, and `_route` checks the arrays."""
        self._routes.clear()
        self._usual = []

    def _arrays(self) -> list[Array]:
        """Return the arrays of the call and the memory that its launches use besides."""
        used = [operand.array for arrays in (*self._reads, *self._writes) for operand in arrays]
        return [*used, *self._turns.more]

    def _queue(self, positions: Sequence[int], streams: Sequence[Stream], alone: bool = False) -> None:
        routes = [self._route(*each) for each in zip(positions, streams, strict=True)]
        submit(self, self._turns, self._sequence, positions, routes, self._sections, alone=alone)

    def _route(self, position: int, stream: Stream) -> Route:
        """Return the `Route` of a launch on `stream`. Routes are kept for streams of drvfuse and for those of
        `prepare`: other foreign streams get a new wrapper at each launch, so their routes would never be found again.
        """
        route = self._routes.get((position, stream))
        if route is None:
            for array in self._arrays():
                array.require_open()
            route = Route.of(stream, self._reads[position] + self._writes[position])
            if stream is self._streams[position] or not stream.foreign:
                self._routes[position, stream] = route
        return route

    def give_back(self) -> None:
        """Let other calls use the launches. This call must not be launched again."""
        for ready in self._ready:
            ready.give_back()


def on_device(
    op: str,
    turns: Turns,
    stream: Stream,
    result: R,
    read: list[Operand],
    written: list[Operand],
    ready: Ready | None,
    trace: CallTrace | None = None,
    parameters: Replaceable | None = None,
) -> Prepared[R]:
    """Return the call of an op on one device with the launch `ready`, which is None if there is nothing to launch."""
    sequence, used = (None, []) if ready is None else (Direct([ready.launch]), [ready])
    return Prepared(op, turns, result, [read], [written], sequence, [stream], used, trace=trace, parameters=parameters)


def _flat(found: Iterable[Sequence[Operand]]) -> list[Operand]:
    return [operand for arrays in found for operand in arrays]
