# SPDX-License-Identifier: Apache-2.0
"""The capture of streams into graphs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...bindings import R
from ..objects import Stream
from ..process.failure import Failure
from ..run.work import Command, Launch, retain
from .graph import COMPLETE, TRIGGERED, Edge, Graph, Node

if TYPE_CHECKING:
    from ..process.process import Process
    from .executable import GraphExec

_ids = itertools.count(1)


@dataclass(eq=False)
class Capture:
    """The capture of streams into one graph: a new graph, or the graph `given`. In `given`, the first captured nodes
    wait for the nodes of `after`. The capture began on the stream `origin` and has to end there.
    """

    process: Process
    origin: Stream
    mode: int
    given: Graph | None = None
    after: Mapping[Node, Edge] = field(default_factory=dict)
    graph: Graph = field(init=False)
    thread: int = field(default_factory=threading.get_ident)
    streams: list[Stream] = field(default_factory=list)
    invalid: bool = False
    number: int = field(default_factory=_ids.__next__)

    GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

    def __post_init__(self) -> None:
        self.graph = Graph() if self.given is None else self.given
        self.join(self.origin, self.after)
        self.process.captures.append(self)

    def invalidate(self) -> None:
        """Allow no further commands in the capture; `end` then returns no graph. Called after an illegal operation."""
        self.invalid = True

    def valid(self) -> None:
        if self.invalid:
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)

    def join(self, stream: Stream, nodes: Mapping[Node, Edge]) -> None:
        """Make a stream wait for nodes of this capture, which also makes it part of the capture."""
        self.valid()
        if stream.capture is None:
            stream.capture = self
            stream.capture_tail = {}
            self.streams.append(stream)
        for node, edge in nodes.items():
            stream.capture_tail.setdefault(node, edge)

    def record(self, stream: Stream, command: Command) -> Node:
        """Add a node for a command, after the nodes for which the stream has to wait. The node of a kernel gets the
        priority of the stream.
        """
        if isinstance(command, Launch) and command.priority is None and stream.priority:
            command = replace(command, priority=stream.priority)
        node = Node(self._ready(), command)
        tail = stream.capture_tail
        only = next(iter(tail)) if len(tail) == 1 else None
        if isinstance(command, Launch) and command.programmatic and only and isinstance(only.command, Launch):
            tail = {only: TRIGGERED}
        return self._append(stream, node, tail)

    def record_graph(self, stream: Stream, executable: GraphExec) -> Node:
        """Add a child graph with the present commands of an executable graph."""
        node = Node(self._ready())
        node.child = executable.plan.graph(node)
        retain(node.child.all_objects())
        for item in node.child.everything():
            self.process.add(item)
        return self._append(stream, node, stream.capture_tail)

    def _ready(self) -> Graph:
        self.valid()
        return self.graph

    def _append(self, stream: Stream, node: Node, tail: Mapping[Node, Edge]) -> Node:
        """Add a node that depends on the last nodes of a stream. It is the stream's last node afterwards."""
        self.graph.add(node, {before: edge for before, edge in tail.items() if before in self.graph.nodes})
        stream.capture_tail = {node: COMPLETE}
        return self.process.add(node)

    def end(self, stream: Stream) -> Graph:
        """End the capture and return its graph. Raises Failure if the capture is invalid, or if `stream` does not wait
        for all captured work; the streams are not captured any more then. Also raises Failure if `stream` did not begin
        the capture or, unless its mode is relaxed, if another thread began it; the streams are still captured then.
        """
        if stream is not self.origin:
            self.invalidate()
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
        if self.mode != self.RELAXED and self.thread != threading.get_ident():
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        unjoined = self._unjoined()
        self.process.captures.remove(self)
        for member in self.streams:
            member.capture, member.capture_tail = None, {}
            member.last = None
        if self.given is None and (self.invalid or unjoined):
            for node in self.graph.everything():
                self.process.remove(node)
            self.process.graph_memory.abandon(self.graph)
        self.valid()
        if unjoined:
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        return self.process.add(self.graph)

    def _unjoined(self) -> bool:
        """True if the origin stream does not wait for all captured work."""
        reached: set[Node] = set()
        front: list[Node] = list(self.origin.capture_tail)
        while front:
            node = front.pop()
            if node not in reached:
                reached.add(node)
                front.extend(node.dependencies)
        return any(node not in reached for member in self.streams for node in member.capture_tail)
