# SPDX-License-Identifier: Apache-2.0
"""The order between a launch and the work of other streams. A launch comes after the work that produces its arrays, and
before later work of the streams in whose order other libraries reuse these arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...comm.ordering import same
from ...errors import CaptureError, DriverError
from ...runtime import held
from ...runtime.array import Array, mark_used
from ...runtime.graph import Graph
from ...runtime.stream import LEGACY, UNKNOWN_HANDLE, Event, Stream
from .operands import Operand


class Route:
    """The streams with which launches of a call on `stream` are ordered, for one local rank and any number of launches.

    A launch comes after the work of `producers`, the streams on which its arrays are produced, and before later work of
    `owners`, the streams in whose order other libraries reuse their arrays. Neither list has `stream` itself, and
    mostly both are empty. `libraries` are all streams of other libraries on which arrays of the call are produced;
    `stream` may be one of them. `unordered` are the foreign arrays whose library names no stream; they must live until
    a launch is complete. `recorded` is the further memory of the launches, such as a workspace, that is already marked
    as used by `stream`; None if none is.
    """

    __slots__ = ("_away", "arrays", "libraries", "owners", "producers", "stream", "recorded", "unordered")

    def __init__(
        self,
        stream: Stream,
        arrays: Sequence[Array],
        away: Sequence[Array],
        producers: Sequence[Stream],
        owners: Sequence[Stream] = (),
        unordered: Sequence[Array] = (),
    ) -> None:
        """`away` are those of `arrays` whose own stream may differ from `stream`. Of `arrays`,
        `record_use` concerns only these."""
        self.stream, self.arrays, self._away, self.producers, self.owners = stream, arrays, away, producers, owners
        self.unordered = unordered
        self.libraries: Sequence[Stream] = ()
        self.recorded: Sequence[Array] | None = None

    @classmethod
    def of(cls, stream: Stream, operands: Sequence[Operand]) -> Route:
        """Return the `Route` of a call with `operands`, launched on `stream`."""
        others = [(p, o.foreign) for o in operands if (p := o.producer) is not stream and p is not None]
        arrays = [operand.array for operand in operands]
        owners = _distinct(p for p, foreign in others if foreign)
        unordered = [o.array for o in operands if o.foreign and (o.producer is None or not o.producer.foreign)]
        route = cls(stream, arrays, arrays, _distinct(p for p, _ in others), owners, unordered)
        route.libraries = _distinct(p for o in operands if o.foreign and (p := o.producer) is not None and p.foreign)
        return route

    @classmethod
    def of_arrays(cls, stream: Stream, arrays: Sequence[Array]) -> Route:
        """Return the `Route` of a call on `stream` with arrays of drvfuse's own pools."""
        away = [array for array in arrays if array.stream is not stream]
        return cls(stream, arrays, away, _distinct(array.stream for array in away) if away else ())

    def follow_producers(self, capture: int | None) -> None:
        """Order the stream, which is in `capture` (None: in none), after the producers.

        A stream in a capture is ordered only after producers in the same capture, since a capture cannot wait for work
        outside it. The caller has to order such work.
        """
        stream = self.stream
        for producer in self.producers:
            if same(producer, stream) or _outside(producer, capture):
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
                    f"{producer!r}, on which an array of the call is produced, is being captured, and {stream!r} is "
                    "not part of that capture; end the capture first, or join the stream to it"
                )

    def record_use(self, event: Event | None, more: Sequence[Array]) -> None:
        """Record that `stream` uses the arrays of the call, and `more`, the other arrays that the launch uses."""
        if self._away:
            mark_used(self._away, self.stream, event)
        if more:
            mark_used(more, self.stream, event)
        # An array remembers each stream of drvfuse that uses it, so later launches need not record the use again.
        if not self.stream.foreign:
            self._away, self.recorded = (), more

    def keep_unordered(self, stream: Stream, event: Event | None) -> None:
        """Keep the arrays `unordered` alive until the graph that was launched on `stream` is complete, even if the
        graph is closed earlier."""
        if stream.capture_id() is None:
            held.keep(stream, self.unordered)

    def lead_owners(self, event: Event | None, capture: int | None) -> None:
        """Make the streams `owners` wait for the launch, so that later work on them may reuse the foreign arrays."""
        for owner in self.owners:
            if owner.closed or same(owner, self.stream) or _outside(owner, capture):
                continue
            if capture is not None and owner.capture_id() != capture:
                continue
            if event is not None:
                owner.wait(event)
            else:
                owner.follow(self.stream)


class ReplayOrder:
    """The streams of other libraries on which the arrays of a graph's calls are produced. `graph.part(ReplayOrder)`
    returns it.

    Each launch of the graph comes after earlier work on these streams, and before later work on them. A stream that its
    library has destroyed is left out.
    """

    def __init__(self, graph: Graph) -> None:
        self._streams: list[Stream] = []
        graph.before_launch(self._before)
        graph.after_launch(self._after)

    def add(self, streams: Sequence[Stream]) -> None:
        """Add `streams` to the streams with which later launches of the graph are ordered."""
        self._streams = _distinct((*self._streams, *streams))

    def _before(self, stream: Stream) -> None:
        capture = stream.capture_id()
        for library in self._streams:
            try:
                Route(stream, (), (), [library]).follow_producers(capture)
            except DriverError as error:
                if error.code not in UNKNOWN_HANDLE:
                    raise
                self._streams = [other for other in self._streams if other is not library]

    def _after(self, stream: Stream, event: Event | None) -> None:
        Route(stream, (), (), (), self._streams).lead_owners(event, stream.capture_id())


def _outside(stream: Stream, capture: int | None) -> bool:
    """Whether there is a `capture` and `stream` is the legacy default stream, which cannot be captured. For this stream
    the driver is not asked, as the question fails while a stream that waits for the legacy stream is being captured."""
    return capture is not None and stream.handle == LEGACY


def _distinct(streams: Iterable[Stream]) -> list[Stream]:
    """Return `streams` without duplicates."""
    return list({(stream.device.index, stream.handle, stream.closed): stream for stream in streams}.values())
