# SPDX-License-Identifier: Apache-2.0
"""Graphs: nodes, and edges between them, as programs build and change them.

A graph keeps its nodes in the order in which they were added, and stores each edge at both of its nodes. An edge makes
one node wait for another. Only edges order nodes, and an edge may lead to a node that was added earlier. Edges can be
added and removed at any time, so a cycle is no error while a graph is built; instantiation finds it (`order`), as the
driver's documentation says. `order` takes one node after another: of the nodes whose dependencies it has taken, the one
that was added first. So a graph that was captured, or in which every node was added after its dependencies, runs in the
order of addition.

A graph itself never runs. `executable.GraphExec` copies its commands and edges, and later changes of the graph do not
affect the copy.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...bindings import T
from ..objects import Object
from ..run.values import ValueOps
from ..run.work import Allocate, Callback, Command, Copy, Copy3D, Fill, Free, HostCall, Launch, Record, Wait

if TYPE_CHECKING:
    from .executable import GraphExec
    from .user_objects import UserObject

_ids = itertools.count(1)
_N = T.CUgraphNodeType
_KINDS = {
    Launch: _N.CU_GRAPH_NODE_TYPE_KERNEL,
    Copy: _N.CU_GRAPH_NODE_TYPE_MEMCPY,
    Copy3D: _N.CU_GRAPH_NODE_TYPE_MEMCPY,
    Fill: _N.CU_GRAPH_NODE_TYPE_MEMSET,
    HostCall: _N.CU_GRAPH_NODE_TYPE_HOST,
    Callback: _N.CU_GRAPH_NODE_TYPE_HOST,
    Record: _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    Wait: _N.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
    Allocate: _N.CU_GRAPH_NODE_TYPE_MEM_ALLOC,
    Free: _N.CU_GRAPH_NODE_TYPE_MEM_FREE,
    ValueOps: _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
}


class Edge(NamedTuple):
    """The contents of a CUgraphEdgeData, which says for which part of the first node the second node waits."""

    from_port: int = 0
    to_port: int = 0
    kind: int = 0

    @property
    def programmatic(self) -> bool:
        """Whether the second node, a kernel, may start before the first one has ended (programmatic launch)."""
        return self.kind == 1


COMPLETE = Edge()
TRIGGERED = Edge(from_port=1, kind=1)
"""The edge of a programmatic launch, from the trigger of the primary kernel."""


class Cycle(Exception):
    """The edges of a graph form a cycle of these nodes, each of which waits for the previous one."""

    def __init__(self, nodes: list[Node]) -> None:
        super().__init__(nodes)
        self.nodes = nodes


@dataclass(eq=False)
class Node(Object):
    """A node of a graph. `number` counts the nodes in the order of addition.

    command     its command; None for an empty node and for a child graph
    child       for a child graph node: the child graph, which belongs to this node
    origin      for a node of a cloned graph: the node of which it is a copy
    given       for a node of batch memory operations: the CUstreamBatchMemOpParams of the call, as bytes
    lent        memory to which a driver call has returned pointers; the node keeps the memory alive
    """

    graph: Graph
    command: Command | None = None
    child: Graph | None = None
    origin: Node | None = None
    given: tuple[bytes, ...] = ()
    lent: Any = None
    dependencies: dict[Node, Edge] = field(default_factory=dict, init=False)
    dependents: dict[Node, Edge] = field(default_factory=dict, init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = next(self.graph.numbers)
        self.graph.nodes[self] = None

    @property
    def kind(self) -> Any:
        """The CUgraphNodeType of the node."""
        if self.command is None:
            return _N.CU_GRAPH_NODE_TYPE_EMPTY if self.child is None else _N.CU_GRAPH_NODE_TYPE_GRAPH
        return _KINDS[type(self.command)]


@dataclass(eq=False)
class Graph(Object):
    """A graph. For a child graph, `parent` is the node to which it belongs, else None. With `moved`, that node was
    given the graph itself and not a copy. `user_objects` counts the references to user objects that the graph holds.
    """

    parent: Node | None = None
    moved: bool = False
    nodes: dict[Node, None] = field(default_factory=dict, init=False)
    user_objects: Counter[UserObject] = field(default_factory=Counter, init=False)
    # For a graph with allocation or free nodes: its executable, of which there may be only one.
    executable: GraphExec | None = field(default=None, init=False)
    ident: int = field(default_factory=_ids.__next__, init=False)
    numbers: Iterator[int] = field(default_factory=itertools.count, init=False)

    @property
    def root(self) -> Graph:
        """The outermost graph that contains this one as a child, directly or not."""
        return self if self.parent is None else self.parent.graph.root

    def connect(self, before: Node, after: Node, edge: Edge = COMPLETE) -> None:
        """Make `after` wait for `before`. The caller has checked that there is no such edge yet."""
        before.dependents[after] = after.dependencies[before] = edge

    def disconnect(self, before: Node, after: Node) -> None:
        del before.dependents[after], after.dependencies[before]

    def add(self, node: Node, after: Mapping[Node, Edge]) -> Node:
        """Add edges to a new node of this graph, so that it waits for the nodes in `after`. Return the node."""
        for before, edge in after.items():
            self.connect(before, node, edge)
        return node

    def remove(self, node: Node) -> None:
        """Remove a node and its edges."""
        for before in list(node.dependencies):
            self.disconnect(before, node)
        for after in list(node.dependents):
            self.disconnect(node, after)
        del self.nodes[node]

    def roots(self) -> list[Node]:
        return [node for node in self.nodes if not node.dependencies]

    def edges(self) -> list[tuple[Node, Node, Edge]]:
        """(from, to, data) of every edge, in the order of the nodes to which the edges lead."""
        return [(before, node, edge) for node in self.nodes for before, edge in node.dependencies.items()]

    def everything(self) -> Iterator[Graph | Node]:
        """The graph, its nodes, and those of its child graphs."""
        yield self
        for node in self.nodes:
            yield node
            if node.child is not None:
                yield from node.child.everything()

    def all_objects(self) -> Counter[UserObject]:
        """The references to user objects, including those of child graphs."""
        graphs = (item for item in self.everything() if isinstance(item, Graph))
        return sum((graph.user_objects for graph in graphs), Counter())

    def of_memory(self) -> bool:
        """Whether the graph, or a child graph, has allocation or free nodes. Many driver calls refuse such a graph."""
        return any(isinstance(item, Node) and isinstance(item.command, Allocate | Free) for item in self.everything())

    def order(self) -> list[Node]:
        """The nodes in an order in which each comes after its dependencies. Raises Cycle if edges form a cycle."""
        waits = {node: len(node.dependencies) for node in self.nodes}
        ready = [(node.number, node) for node, count in waits.items() if not count]
        found = []
        while ready:
            _, node = heapq.heappop(ready)
            found.append(node)
            for after in node.dependents:
                waits[after] -= 1
                if not waits[after]:
                    heapq.heappush(ready, (after.number, after))
        if len(found) < len(self.nodes):
            raise Cycle(_ring(self.nodes.keys() - set(found)))
        return found

    def clone(self, parent: Node | None = None) -> Graph:
        """A graph with the same nodes and edges, including child graphs. The `origin` of a new node is the node of this
        graph that it copies.
        """
        graph = Graph(parent)
        graph.user_objects.update(self.user_objects)
        copies: dict[Node, Node] = {}
        for node in self.nodes:
            copy = copies[node] = Node(graph, node.command, origin=node, given=node.given)
            if node.child is not None:
                copy.child = node.child.clone(copy)
        for before, node, edge in self.edges():
            graph.connect(copies[before], copies[node], edge)
        return graph


def _ring(rest: set[Node]) -> list[Node]:
    """The nodes of a cycle. Each of the given nodes is part of a cycle or depends on one."""
    node = min(rest, key=lambda node: node.number)
    path: dict[Node, None] = {}
    while node not in path:
        path[node] = None
        node = next(before for before in node.dependencies if before in rest)
    nodes = list(path)
    return nodes[nodes.index(node) :][::-1]
