# SPDX-License-Identifier: Apache-2.0
"""The edges of graphs: queries, and changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...bindings import R, T
from ...machine.graphs.graph import COMPLETE, Edge, Graph, Node
from ...machine.process.process import Process
from ...machine.run.work import Launch
from ..entry import check, entry
from .graph import graph_of, node_of, some

_PORTS = (1, 2)  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, _LAUNCH_ORDER

# Queries ------------------------------------------------------------------------------------------------------------


def data_of(edges: Iterable[Edge], count: int) -> list[Any]:
    """The CUgraphEdgeData of `count` edges. If there are fewer edges, the others are zeroed."""
    found = []
    for edge in [*edges][:count]:
        data = T.CUgraphEdgeData()
        data.from_port, data.to_port, data.type = edge
        found.append(data)
    return [*found, *(T.CUgraphEdgeData() for _ in range(count - len(found)))]


def lossless(edges: Iterable[Edge]) -> None:
    """Raise Failure if an edge has data other than zero, as a query without data would lose the data."""
    check(all(edge == COMPLETE for edge in edges), R.CUDA_ERROR_LOSSY_QUERY)


@entry(4, bindings=12, name="cuGraphGetEdges_v2")
@entry(4, bindings=13, name="cuGraphGetEdges")
def _edges(proc: Process, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], list[Any], int]:
    found = graph_of(proc, hGraph).edges()
    first, number = some((before for before, _, _ in found), numEdges)
    second, _ = some((node for _, node, _ in found), numEdges)
    return first, second, data_of((edge for *_, edge in found), numEdges), number


@entry(3, bindings=12)
def cuGraphGetEdges(proc: Process, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], int]:
    lossless(edge for *_, edge in graph_of(proc, hGraph).edges())
    first, second, _, number = _edges(proc, hGraph, numEdges)
    return first, second, number


def _neighbours(found: dict[Node, Edge], count: int) -> tuple[list[Any], list[Any], int]:
    nodes, number = some(found, count)
    return nodes, data_of(found.values(), count), number


@entry(3, bindings=12, name="cuGraphNodeGetDependencies_v2")
@entry(3, bindings=13, name="cuGraphNodeGetDependencies")
def _dependencies(proc: Process, hNode: Any, numDependencies: int = 0) -> tuple[list[Any], list[Any], int]:
    return _neighbours(node_of(proc, hNode).dependencies, numDependencies)


@entry(3, bindings=12, name="cuGraphNodeGetDependentNodes_v2")
@entry(3, bindings=13, name="cuGraphNodeGetDependentNodes")
def _dependents(proc: Process, hNode: Any, numDependentNodes: int = 0) -> tuple[list[Any], list[Any], int]:
    return _neighbours(node_of(proc, hNode).dependents, numDependentNodes)


@entry(2, bindings=12)
def cuGraphNodeGetDependencies(proc: Process, hNode: Any, numDependencies: int = 0) -> tuple[list[Any], int]:
    found = node_of(proc, hNode).dependencies
    lossless(found.values())
    return some(found, numDependencies)


@entry(2, bindings=12)
def cuGraphNodeGetDependentNodes(proc: Process, hNode: Any, numDependentNodes: int = 0) -> tuple[list[Any], int]:
    found = node_of(proc, hNode).dependents
    lossless(found.values())
    return some(found, numDependentNodes)


# Changes ------------------------------------------------------------------------------------------------------------


def edges_of(data: Sequence[Any] | None, count: int) -> list[Edge]:
    """The edges that CUgraphEdgeData describe. Without data, each edge waits for the end of its first node."""
    if not data:
        return [COMPLETE] * count
    return [Edge(int(item.from_port), int(item.to_port), int(item.type)) for item in data[:count]]


def require_edge(before: Node, after: Any, edge: Edge) -> None:
    """Raise Failure unless an edge may lead from a node to a node with the command `after`. An edge may
    begin at a port other than the end of a node only if it is a programmatic edge between kernels.
    """
    check(edge.to_port == 0 and edge.kind in (0, 1))
    if edge.programmatic:
        check(edge.from_port in _PORTS and isinstance(before.command, Launch) and isinstance(after, Launch))
    else:
        check(edge.from_port == 0)


def dependencies_of(
    proc: Process, graph: Graph, nodes: Sequence[Any] | None, data: Sequence[Any] | None, count: int
) -> dict[Node, Edge]:
    """The nodes of a graph for which a new node waits, each once, with their edges."""
    found = [node_of(proc, node) for node in (nodes or [])[:count]]
    check(len(found) == count == len(set(found)) and all(node.graph is graph for node in found))
    return dict(zip(found, edges_of(data, count), strict=True))


def _pairs(proc: Process, graph: Graph, first: Any, second: Any, count: int) -> list[tuple[Node, Node]]:
    check(len(first) >= count and len(second) >= count)
    found = [(node_of(proc, a), node_of(proc, b)) for a, b in zip(first[:count], second[:count], strict=True)]
    check(all(node.graph is graph for pair in found for node in pair))
    return found


@entry(bindings=12, name="cuGraphAddDependencies_v2")
@entry(bindings=13, name="cuGraphAddDependencies")
def _add_edges(proc: Process, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: int) -> None:
    """Add all of the edges, or none. A cycle is found later, when the graph is instantiated."""
    if numDependencies == 0:
        return
    graph = graph_of(proc, hGraph)
    pairs = _pairs(proc, graph, from_ or [], to or [], numDependencies)
    check(len(set(pairs)) == len(pairs) and all(b is not a and b not in a.dependents for a, b in pairs))
    edges = edges_of(edgeData, numDependencies)
    for (before, after), edge in zip(pairs, edges, strict=True):
        require_edge(before, after.command, edge)
    for (before, after), edge in zip(pairs, edges, strict=True):
        graph.connect(before, after, edge)


@entry(bindings=12, name="cuGraphRemoveDependencies_v2")
@entry(bindings=13, name="cuGraphRemoveDependencies")
def _remove_edges(proc: Process, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: int) -> None:
    """Remove all of the edges, or none. Each edge has to exist with the given data."""
    if numDependencies == 0:
        return
    graph = graph_of(proc, hGraph)
    check(not graph.of_memory())
    pairs = _pairs(proc, graph, from_ or [], to or [], numDependencies)
    edges = edges_of(edgeData, numDependencies)
    check(len(set(pairs)) == len(pairs))
    check(all(a.dependents.get(b) == edge for (a, b), edge in zip(pairs, edges, strict=True)))
    for before, after in pairs:
        graph.disconnect(before, after)


@entry(bindings=12)
def cuGraphAddDependencies(proc: Process, hGraph: Any, from_: Any, to: Any, numDependencies: int) -> None:
    _add_edges(proc, hGraph, from_, to, None, numDependencies)


@entry(bindings=12)
def cuGraphRemoveDependencies(proc: Process, hGraph: Any, from_: Any, to: Any, numDependencies: int) -> None:
    _remove_edges(proc, hGraph, from_, to, None, numDependencies)
