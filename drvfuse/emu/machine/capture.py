# SPDX-License-Identifier: Apache-2.0
"""Graphs: their nodes, the capture of streams into them, and their replay."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..bindings import R
from .failure import Failure
from .objects import Object, Stream, new_chain
from .work import Command, Launch, Op

if TYPE_CHECKING:
    from .process import Process

_ids = itertools.count(1)


@dataclass(eq=False)
class Node(Object):
    """One command of a graph (None: an empty node). `programmatic`: overlaps its one dependency, a kernel."""

    command: Command | None
    dependencies: list[Node]
    programmatic: bool = False
    graph: Graph | None = None


@dataclass(eq=False)
class Graph(Object):
    """Nodes in an order in which each stands behind its dependencies."""

    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> Node:
        node.graph = self
        self.nodes.append(node)
        return node

    def roots(self) -> list[Node]:
        return [node for node in self.nodes if not node.dependencies]


@dataclass(eq=False)
class GraphExec(Object):
    """A graph made ready to run. Two runs of one never overlap."""

    nodes: tuple[Node, ...]
    flags: int = 0
    last: Op | None = None
    chains: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        continued: set[Node] = set()
        for node in self.nodes:
            before = next((d for d in node.dependencies if d not in continued), None)
            self.chains[node] = new_chain() if before is None else self.chains[before]
            if before is not None:
                continued.add(before)

    def launch(self, process: Process, stream: Stream) -> None:
        """Queue every node; the stream's next operation waits for all of them."""
        progress = process.machine.progress
        process.refuse_implicit(stream)
        # the stream's order, and the former run's, come in by way of a marker
        start = progress.enqueue(stream, Command(stream.context))
        after: list[Op] = [start] if self.last is None else [start, self.last]
        ops: dict[Node, Op] = {}
        leaves: dict[Node, Op] = {}
        for node in self.nodes:
            waits = [ops[d] for d in node.dependencies] or after
            for dependency in node.dependencies:
                leaves.pop(dependency, None)
            command = node.command or Command(stream.context)
            if node.programmatic:
                ops[node] = progress.submit(
                    command, (), chain=self.chains[node], primary=waits[0], priority=stream.priority
                )
                leaves[node.dependencies[0]] = waits[0]
            else:
                ops[node] = progress.submit(command, waits, chain=self.chains[node], priority=stream.priority)
            leaves[node] = ops[node]
        end = progress.submit(Command(stream.context), [*leaves.values(), *after], chain=stream.chain)
        stream.tail, stream.last, self.last = [end], end, end


@dataclass(eq=False)
class Capture:
    """Streams being captured into one graph. It began on `origin` and has to end there."""

    process: Process
    origin: Stream
    mode: int
    graph: Graph = field(default_factory=Graph)
    thread: int = field(default_factory=threading.get_ident)
    streams: list[Stream] = field(default_factory=list)
    invalid: bool = False
    number: int = field(default_factory=_ids.__next__)

    GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

    def __post_init__(self) -> None:
        self.join(self.origin, ())
        self.process.captures.append(self)

    def invalidate(self) -> None:
        """Something illegal was done: nothing can be added any more, and the end gives no graph."""
        self.invalid = True

    def valid(self) -> None:
        if self.invalid:
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)

    def join(self, stream: Stream, nodes: Iterable[Node]) -> None:
        """Make a stream wait for nodes of this capture, which also makes it part of the capture."""
        self.valid()
        if stream.capture is None:
            stream.capture = self
            stream.capture_tail = []
            self.streams.append(stream)
        stream.capture_tail.extend(node for node in nodes if node not in stream.capture_tail)

    def record(self, stream: Stream, command: Command) -> Node:
        """Add a command behind what the stream has to wait for."""
        self.valid()
        tail = stream.capture_tail
        overlaps = (
            isinstance(command, Launch)
            and command.programmatic
            and len(tail) == 1
            and isinstance(tail[0].command, Launch)
        )
        node = self.process.add(self.graph.add(Node(command, list(tail), overlaps)))
        stream.capture_tail = [node]
        return node

    def end(self, stream: Stream) -> Graph:
        """Finish; the streams are ordinary again whatever comes of it."""
        if stream is not self.origin:
            self.invalidate()
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
        if self.mode != self.RELAXED and self.thread != threading.get_ident():
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        unjoined = self._unjoined()
        self.process.captures.remove(self)
        for member in self.streams:
            member.capture, member.capture_tail = None, []
            member.last = None
        self.valid()
        if unjoined:
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        return self.process.add(self.graph)

    def _unjoined(self) -> bool:
        """True if some captured work does not lead to the origin stream."""
        reached: set[Node] = set()
        front: list[Node] = list(self.origin.capture_tail)
        while front:
            node = front.pop()
            if node not in reached:
                reached.add(node)
                front.extend(node.dependencies)
        return any(node not in reached for member in self.streams for node in member.capture_tail)


def edges(nodes: Sequence[Node]) -> list[tuple[Node, Node, bool]]:
    """(from, to, programmatic) of every dependency."""
    return [(d, node, node.programmatic) for node in nodes for d in node.dependencies]
