# SPDX-License-Identifier: Apache-2.0
"""The calls that were launched on the ranks of a group since its last reset, so that a time-out can name its call.

A rank's epoch in the workspace counts the barriers of its completed calls, and a report holds the epoch at which the
call that gave up began. Every call has a known number of barriers, so the epoch tells which of the launched calls gave
up, with two exceptions. Push calls of an even number of rounds do not change the epoch, so several calls may have begun
with the same epoch. Replays of a graph that another library captured or replays are not recorded here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..dtypes import DType
    from ..runtime.graph import Graph
    from ..runtime.stream import Event, Stream

KEPT = 512  # launches and replays that can be named; older launches are only counted, with their barriers


class CallNote(NamedTuple):
    """The facts about a call for messages: what its name is made of, by how much it advances the epoch (`barriers`),
    whether its kernel waits for peers at all (`waits`), and whether its launches have another form while the group is
    alone on its devices (`adapts`).

    It keeps nothing of the call alive.
    """

    op: str
    algo: str
    ranks: int
    shape: tuple[int, ...]
    dtype: DType
    barriers: int
    waits: bool
    adapts: bool

    def __str__(self) -> str:
        count = f"{self.ranks} x " if self.ranks > 1 else ""
        return f"{self.op}{self.algo and ' ' + self.algo} of {count}{self.shape} {self.dtype}"


class Noted(Protocol):
    """A call that a group can record. `note` has the facts about it that messages need."""

    @property
    def note(self) -> CallNote: ...


@dataclass
class Totals:
    """How many calls were launched on a rank, and how many barriers they have in all.

    Some calls wait for peers without a barrier. `waiting` is the number, from 1, of the first such call after the last
    call with barriers, or 0 if there is none.
    """

    calls: int = 0
    barriers: int = 0
    waiting: int = 0

    def count(self, note: CallNote) -> None:
        """Count a further call, which was launched on the rank after the calls counted so far."""
        self.add(Totals(1, note.barriers, int(note.waits and not note.barriers)))

    def add(self, other: Totals) -> None:
        """Add the totals of further calls, which were launched on the rank after the calls counted so far."""
        if other.barriers:
            self.barriers += other.barriers
            self.waiting = 0
        if other.waiting and not self.waiting:
            self.waiting = self.calls + other.waiting
        self.calls += other.calls


class GraphCalls:
    """The calls of a group in one graph, by rank."""

    def __init__(self, history: History, ranks: int) -> None:
        self._history = history
        self.notes: list[list[CallNote]] = [[] for _ in range(ranks)]
        self.totals = [Totals() for _ in range(ranks)]

    def add(self, position: int, note: CallNote) -> None:
        self.notes[position].append(note)
        self.totals[position].count(note)

    def after_replay(self, stream: Stream, event: Event | None) -> None:
        """Record that the graph was launched on `stream`. Called after each launch."""
        self._history.replayed(self, inside_graph=stream.capture_id() is not None)


class History:
    """The calls of the ranks `indices`, those of this process, oldest first.

    Calls are counted from 1, and a reset does not restart the count. For messages, a rank of another process is taken
    to have made the same calls as the first of these ranks.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices, ranks = tuple(indices), len(indices)
        self._entries: list[tuple[Sequence[int], CallNote] | GraphCalls] = []
        self._older = [Totals() for _ in range(ranks)]  # the totals of the calls that are no longer in `_entries`
        self._settled = [0] * ranks  # how many calls of each rank are known to be complete
        self._graphs: weakref.WeakKeyDictionary[Graph, GraphCalls] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._complete = True  # whether every replay of a graph is recorded

    def launched(self, positions: Sequence[int], note: CallNote) -> None:
        """Record a launch on the ranks at `positions`."""
        if len(self._entries) >= KEPT:
            self._forget(KEPT // 2)
        self._entries.append((positions, note))

    def captured(self, position: int, graph: Graph | None, note: CallNote) -> None:
        """Record that `graph`, None for a graph of another library, holds the launch of a call on the rank at
        `position`.
        """
        if graph is None:
            self._complete = False
            return
        calls = self._graphs.setdefault(graph, GraphCalls(self, len(self._older)))
        calls.add(position, note)
        graph.after_launch(calls.after_replay)

    def replayed(self, calls: GraphCalls, inside_graph: bool) -> None:
        """Record the launch of a graph that holds `calls`. With `inside_graph` the launch was captured into another
        graph, whose own launches are unknown.
        """
        if inside_graph:
            self._complete = False
            return
        if len(self._entries) >= KEPT:
            self._forget(KEPT // 2)
        self._entries.append(calls)

    def settle(self) -> None:
        """Drop the entries of all calls. Called when all calls are complete and none has timed out."""
        self._forget(len(self._entries))
        self._settled = [totals.calls for totals in self._older]
        for totals in self._older:
            totals.waiting = 0

    def _forget(self, count: int) -> None:
        with self._lock:
            forgotten = self._entries[:count]
            del self._entries[: len(forgotten)]
            everywhere = Totals()  # calls on all ranks, to be added to `_older`
            for entry in forgotten:
                if not isinstance(entry, GraphCalls) and len(entry[0]) == len(self._older):
                    everywhere.count(entry[1])
                    continue
                self._add_to_all(everywhere)
                everywhere = Totals()
                if isinstance(entry, GraphCalls):
                    for totals, more in zip(self._older, entry.totals, strict=True):
                        totals.add(more)
                else:
                    for position in entry[0]:
                        self._older[position].count(entry[1])
            self._add_to_all(everywhere)

    def _add_to_all(self, calls: Totals) -> None:
        for totals in self._older:
            totals.add(calls)

    def clear(self) -> None:
        """Forget all calls. The next call gets the number after the highest number of a call on any rank of this
        process. Called when the group was reset, so that all epochs are zero.
        """
        last = max(self._count(position) for position in range(len(self._older)))
        self._entries.clear()
        self._older = [Totals(last) for _ in self._older]
        self._settled = [last for _ in self._older]

    def find(self, rank: int, peer: int, epoch: int) -> str:
        """A text for messages: the call which `rank` began when its epoch was `epoch`, or the calls of which it is one.
        If `peer`, for which `rank` has waited, was not launched with that call, the text says so.
        """
        here = rank in self._indices
        position = self._indices.index(rank) if here else 0
        older = self._older[position]
        number, barriers = older.calls, older.barriers
        first = self._settled[position] + 1
        if not self._complete:
            unseen = "one in a graph whose replays the group cannot see"
            last = self._count(position)
            return f"one of the calls {first} to {last} of the group, or {unseen}" if first <= last else unseen
        if epoch < barriers:
            return f"one of the calls {first} to {number} of the group"
        possible, named = ([older.waiting, older.calls] if epoch == barriers and older.waiting else []), ""
        for note, where in self._notes(position):
            number += 1
            # every epoch of the call is possible, since any of its kernels may have written the report
            if barriers <= epoch < barriers + max(note.barriers, 1) and note.waits:
                possible.append(number)
                named = f", {note}{where}"
            barriers += note.barriers
        if not possible and not here:
            return f"a call after call {number} of the group, which rank {self._indices[0]} was not launched with"
        if not possible:
            possible = [first, number] if first < number else [number]
        if len(possible) > 1:
            return f"one of the calls {possible[0]} to {possible[-1]} of the group"
        late = peer in self._indices and self._count(self._indices.index(peer)) < possible[0]
        missing = f", which rank {peer} was not launched with" if late else ""
        return f"call {possible[0]} of the group{named}{missing}"

    def _notes(self, position: int) -> Iterator[tuple[CallNote, str]]:
        """Yield the note of each kept call of a rank, and a text for messages: the call's place in its graph, or
        "" without a graph."""
        for entry in self._entries:
            if isinstance(entry, GraphCalls):
                notes = entry.notes[position]
                for number, note in enumerate(notes, 1):
                    yield note, f", call {number} of {len(notes)} in the replay of a graph"
            elif position in entry[0]:
                yield entry[1], ""

    def _count(self, position: int) -> int:
        return self._older[position].calls + sum(1 for _ in self._notes(position))
