# SPDX-License-Identifier: Apache-2.0
"""A validated, planned and compiled collective, ready to launch any number of times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, cast

from ...comm.history import CallNote
from ...comm.ordering import same
from ...errors import ArgumentError, CaptureError
from ...plans.traffic import Traffic
from ...runtime.array import mark_used
from ...runtime.graph import capturing
from ...runtime.memory import launch_group
from ..collectives.epilogue_binding import BoundEpilogue, bind
from .streams import resolve_streams
from .tracing import CallTrace
from .validate import RankArray, flatten, no_overlap

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...runtime.kernel import Launch
    from ...runtime.stream import Stream

R = TypeVar("R")
Result = TypeVar("Result", covariant=True)
P = ParamSpec("P")


class Schedule(Protocol):
    """The launches of one call, in the order that its algorithm needs. `launches[i]` are those of local rank i."""

    @property
    def launches(self) -> Sequence[Sequence[Launch]]: ...

    @property
    def barriers(self) -> int:
        """How many barriers between the ranks the call passes on the device."""

    def launch_all(self, streams: Sequence[Stream]) -> None:
        """Queue the work of every local rank."""

    def launch_one(self, position: int, stream: Stream) -> None:
        """Queue the work of one local rank."""

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        """Raise if the algorithm cannot run on streams in these captures, or for one rank alone. Queues nothing."""


class Prepared(Generic[R]):
    """A collective with its arrays checked, its plan made and its kernels loaded on every rank.

    `algo` is the algorithm chosen; `traffic` the (local, remote) bytes that a call moves over all ranks. It keeps its
    arrays alive and belongs to one thread. Contents of the arrays may change between launches; their addresses cannot.
    """

    def __init__(
        self,
        group: Group,
        op: str,
        algo: str,
        result: R,
        reads: Sequence[Sequence[RankArray]],
        writes: Sequence[Sequence[RankArray]],
        schedule: Schedule | None,
        streams: Any,
        traffic: Traffic,
        epilogue: BoundEpilogue | None = None,
        trace: CallTrace | None = None,
    ) -> None:
        """`reads[i]` and `writes[i]` are rank i's arrays, its input first; no schedule means no work."""
        self.group = group
        self.algo = algo
        self.traffic = (traffic.local, traffic.remote)
        self._result = result
        self._reads = [list(of_rank) for of_rank in reads]
        traced = trace.operands if trace is not None else [[] for _ in group]
        self._writes = [[*of_rank, *more] for of_rank, more in zip(writes, traced, strict=True)]
        self._sections = trace.sections if trace is not None else []
        self._schedule = schedule
        self._streams = streams
        self._epilogue = epilogue
        first, barriers = self._reads[0][0].array, schedule.barriers if schedule is not None else 0
        self.note = CallNote(op, algo, first.shape, first.dtype.name, barriers)

    def describe(self) -> str:
        """The call in words: op, algorithm, shape and dtype of its inputs."""
        return str(self.note)

    def __repr__(self) -> str:
        return f"<Prepared {self.describe()} on {self.group!r}>"

    def launch(self, streams: Any = None, *, rank: int | None = None, stream: Any = None) -> R:
        """Queue the collective and return its results, which are valid in the order of the streams.

        Without arguments it runs on the streams given to `prepare` (by default each rank's own). `streams` replaces
        them. With `rank` only that rank's part is queued, on `stream` or its default; every other rank must follow
        within the `spin_timeout` setting.

        Raises BarrierTimeout if an earlier call on the group timed out (the next call then resets the group),
        CaptureError where stream order cannot be established in a capture, Unsupported where the algorithm cannot run
        like this, LaunchError if another rank was launched alone with another call, which must reach this rank first,
        ClosedError after `group.close()`.
        """
        self.group.require_open()
        if rank is None:
            if stream is not None:
                raise ArgumentError("stream", repr(stream), "given together with rank=; use streams= for all ranks")
            self._queue(range(len(self.group)), self._resolve(self._streams if streams is None else streams))
        else:
            if streams is not None:
                raise ArgumentError("streams", repr(streams), "None together with rank=; use stream=")
            position = self._position(rank)
            if stream is None:
                chosen = self._resolve(self._streams)[position]
            else:
                chosen = self.group.ranks[position].wrap(stream)
            self._queue([position], [chosen], alone=True)
        return self._result

    def set(self, **parameters: Any) -> None:
        """Replace parameters of the epilogue for the launches that follow; nothing is compiled.

        Takes what `Epilogue` takes; the types must stay. Launches already queued or captured keep their values.
        """
        if self._epilogue is None:
            raise ArgumentError("parameters", list(parameters), "empty: this collective has no epilogue")
        self.group.require_open()
        old = self._epilogue
        new = bind(self.group, old.epilogue.with_(**parameters))
        if new.text != old.text:
            raise ArgumentError("parameters", "of other types", "of the types that the epilogue was made with")
        if new.epilogue.differs_by_rank and self.algo == "two_stage":
            raise ArgumentError("parameters", "different by rank", 'the same on all ranks, as algo is "two_stage"')
        no_overlap(flatten(new.operands), flatten(self._writes))
        for position, structure in enumerate(new.structures):
            for launch in self._schedule.launches[position] if self._schedule is not None else ():
                launch.set(1, structure)
            kept = self._reads[position][: len(self._reads[position]) - len(old.operands[position])]
            self._reads[position] = [*kept, *new.operands[position]]
        self._epilogue = new

    def _position(self, rank: int) -> int:
        for position, local in enumerate(self.group):
            if local.index == rank and not isinstance(rank, bool):
                return position
        raise ArgumentError("rank", repr(rank), f"a local rank, one of {[local.index for local in self.group]}")

    def _resolve(self, streams: Any) -> list[Stream]:
        return resolve_streams(self.group, streams, [of_rank[0] for of_rank in self._reads])

    def _queue(self, positions: Sequence[int], streams: Sequence[Stream], alone: bool = False) -> None:
        group, schedule = self.group, self._schedule
        group.admit(streams)
        if schedule is None:
            return
        captures = [stream.capture_id() for stream in streams]
        schedule.check(captures, alone)
        for position, stream, capture in zip(positions, streams, captures, strict=True):
            self._order(position, stream, capture)
        if all(capture is None for capture in captures):
            group.begin(positions, self)
        try:
            with launch_group():
                if alone:
                    schedule.launch_one(positions[0], streams[0])
                else:
                    schedule.launch_all(streams)
        except BaseException:
            group.abandon()
            raise
        for position, stream, capture in zip(positions, streams, captures, strict=True):
            self._launched(position, stream, capture)

    def _order(self, position: int, stream: Stream, capture: int | None) -> None:
        """Order `stream`, which is in `capture`, after the rank's last call and the producers of its arrays.

        Inside a capture, what was queued outside it is left to the user: nothing can wait for it there.
        """
        rank = self.group.ranks[position]
        rank.order.admit(stream, rank.index)
        for producer in _distinct((*self._reads[position], *self._writes[position])):
            if same(producer, stream):
                continue
            if producer.closed:
                event = producer.last_event() if capture is None else None
                if event is not None:
                    stream.wait(event)
                continue
            theirs = producer.capture_id()
            if theirs == capture:
                stream.follow(producer)
            elif theirs is not None:
                raise CaptureError(
                    f"rank {rank.index}: {producer!r}, on which an array of the call is produced, is being captured, "
                    f"and {stream!r} is not part of that capture; end the capture first, or join the stream to it"
                )

    def _launched(self, position: int, stream: Stream, capture: int | None) -> None:
        rank, used = self.group.ranks[position], (*self._reads[position], *self._writes[position])
        arrays = [operand.array for operand in used]
        event = stream.mark() if stream.foreign and capture is None else None
        rank.order.launched(stream, event, capture)
        mark_used(arrays, stream, event)
        graph = capturing(stream) if capture is not None else None
        if capture is not None:
            self.group.captured(graph, position, self)
        if graph is not None:
            graph.keep(*arrays, *self._sections)
            graph.before_launch(rank.before_replay)
            graph.after_launch(rank.after_replay)
        for owner in _distinct([operand for operand in used if operand.foreign]):
            if same(owner, stream) or (capture is not None and owner.capture_id() != capture):
                continue
            if event is not None:  # it may reuse the memory in the order of that stream
                owner.wait(event)
            else:
                owner.follow(stream)


def _distinct(found: Iterable[RankArray]) -> Iterable[Stream]:
    """The producers of some arrays, each once."""
    producers = [operand.producer for operand in found if operand.producer is not None]
    return {(stream.device.index, stream.handle, stream.closed): stream for stream in producers}.values()


class Collective(Protocol[P, Result]):
    """A collective: calling it prepares and launches; `prepare` takes the same arguments and launches nothing."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[Any]: ...


def collective(prepare: Callable[P, Prepared[R]]) -> Collective[P, R]:
    """Make a collective of the function that prepares it."""

    @functools.wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return prepare(*args, **kwargs).launch()

    call.prepare = prepare  # type: ignore[attr-defined]
    return cast("Collective[P, R]", call)
