# SPDX-License-Identifier: Apache-2.0
"""Graphs: their creation, their nodes and edges, clones, and references to user objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..bindings import R, T
from ..machine.graph import COMPLETE, Edge, Graph, Node
from ..machine.process import Process
from ..machine.work import Launch, release, retain
from .entry import check, entry, present
from .user_object import user_object

_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE
_PORTS = (1, 2)  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, _LAUNCH_ORDER


def graph_of(proc: Process, value: Any) -> Graph:
    return proc.get(value, Graph, R.CUDA_ERROR_INVALID_VALUE)


def node_of(proc: Process, value: Any) -> Node:
    return proc.get(value, Node, R.CUDA_ERROR_INVALID_VALUE)


def register(proc: Process, graph: Graph) -> Graph:
    """Give handles to a graph and all that is in it."""
    for item in graph.everything():
        proc.add(item)
    return graph


def discard(proc: Process, items: Iterable[Graph | Node]) -> None:
    """Take handles back, and the references to user objects that go with graphs."""
    for item in items:
        proc.remove(item)
        if isinstance(item, Graph):
            release(proc, item.user_objects)
    proc.graph_memory.sweep()


@entry(1)
def cuGraphCreate(proc: Process, flags: int) -> Any:
    check(flags == 0)
    return T.CUgraph(proc.add(Graph()).handle)


@entry()
def cuGraphDestroy(proc: Process, hGraph: Any) -> None:
    """Executables of it stay. The graph of a child graph node goes with that node alone."""
    graph = graph_of(proc, hGraph)
    check(graph.parent is None)
    discard(proc, list(graph.everything()))


@entry(1)
def cuGraphClone(proc: Process, originalGraph: Any) -> Any:
    graph = graph_of(proc, originalGraph)
    check(not graph.of_memory())
    clone = register(proc, graph.clone())
    retain(clone.all_objects())
    return T.CUgraph(clone.handle)


@entry(1)
def cuGraphNodeFindInClone(proc: Process, hOriginalNode: Any, hClonedGraph: Any) -> Any:
    original, clone = node_of(proc, hOriginalNode), graph_of(proc, hClonedGraph)
    return T.CUgraphNode(present(next((node for node in clone.nodes if node.origin is original), None)).handle)


@entry()
def cuGraphDestroyNode(proc: Process, hNode: Any) -> None:
    """Its edges go with it, and the graph of a child graph node."""
    node = node_of(proc, hNode)
    check(not node.graph.of_memory())
    node.graph.remove(node)
    discard(proc, [node, *(node.child.everything() if node.child is not None else ())])


# Queries ------------------------------------------------------------------------------------------------------------


def _some(nodes: Iterable[Node], count: int) -> tuple[list[Any], int]:
    """cuda.bindings' two-step protocol: without a count only the number, then as many as asked for."""
    found = [T.CUgraphNode(node.handle) for node in nodes]
    if count == 0:
        return [], len(found)
    return [*found[:count], *[T.CUgraphNode(0)] * (count - len(found))], min(count, len(found))


def _data(edges: Iterable[Edge], count: int) -> list[Any]:
    """The CUgraphEdgeData of so many edges, zeroed where there are fewer."""
    found = []
    for edge in [*edges][:count]:
        data = T.CUgraphEdgeData()
        data.from_port, data.to_port, data.type = edge
        found.append(data)
    return [*found, *(T.CUgraphEdgeData() for _ in range(count - len(found)))]


def _lossless(edges: Iterable[Edge]) -> None:
    """Failure if a caller who does not take the data of edges would miss something."""
    check(all(edge == COMPLETE for edge in edges), R.CUDA_ERROR_LOSSY_QUERY)


@entry(2)
def cuGraphGetNodes(proc: Process, hGraph: Any, numNodes: int = 0) -> tuple[list[Any], int]:
    """In the order in which they were added."""
    return _some(graph_of(proc, hGraph).nodes, numNodes)


@entry(2)
def cuGraphGetRootNodes(proc: Process, hGraph: Any, numRootNodes: int = 0) -> tuple[list[Any], int]:
    return _some(graph_of(proc, hGraph).roots(), numRootNodes)


@entry(4, bindings=12, name="cuGraphGetEdges_v2")
@entry(4, bindings=13, name="cuGraphGetEdges")
def _edges(proc: Process, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], list[Any], int]:
    found = graph_of(proc, hGraph).edges()
    first, number = _some((before for before, _, _ in found), numEdges)
    second, _ = _some((node for _, node, _ in found), numEdges)
    return first, second, _data((edge for *_, edge in found), numEdges), number


@entry(3, bindings=12)
def cuGraphGetEdges(proc: Process, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], int]:
    _lossless(edge for *_, edge in graph_of(proc, hGraph).edges())
    first, second, _, number = _edges(proc, hGraph, numEdges)
    return first, second, number


def _neighbours(found: dict[Node, Edge], count: int) -> tuple[list[Any], list[Any], int]:
    nodes, number = _some(found, count)
    return nodes, _data(found.values(), count), number


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
    _lossless(found.values())
    return _some(found, numDependencies)


@entry(2, bindings=12)
def cuGraphNodeGetDependentNodes(proc: Process, hNode: Any, numDependentNodes: int = 0) -> tuple[list[Any], int]:
    found = node_of(proc, hNode).dependents
    _lossless(found.values())
    return _some(found, numDependentNodes)


@entry(1)
def cuGraphNodeGetType(proc: Process, hNode: Any) -> Any:
    return node_of(proc, hNode).kind


@entry(1, optional=True)
def cuGraphGetId(proc: Process, hGraph: Any) -> int:
    return graph_of(proc, hGraph).ident


@entry(1, optional=True)
def cuGraphNodeGetLocalId(proc: Process, hNode: Any) -> int:
    """The number of the node in its graph."""
    return node_of(proc, hNode).number


@entry(1, optional=True)
def cuGraphNodeGetToolsId(proc: Process, hNode: Any) -> int:
    return node_of(proc, hNode).handle


@entry(1, optional=True)
def cuGraphNodeGetContainingGraph(proc: Process, hNode: Any) -> Any:
    return T.CUgraph(node_of(proc, hNode).graph.handle)


# Edges --------------------------------------------------------------------------------------------------------------


def edges_of(data: Sequence[Any] | None, count: int) -> list[Edge]:
    """The edges that CUgraphEdgeData describe; all of them plain ones without."""
    if not data:
        return [COMPLETE] * count
    found = []
    for item in data[:count]:
        check(not any(item.reserved))
        found.append(Edge(int(item.from_port), int(item.to_port), int(item.type)))
    return found


def require_edge(before: Node, after: Any, edge: Edge) -> None:
    """Failure unless an edge may lead from a node to what has the command `after`: only kernels have other ports than the
    end of a node, and these belong to programmatic edges between kernels.
    """
    check(edge.to_port == 0 and edge.kind in (0, 1))
    if edge.programmatic:
        check(edge.from_port in _PORTS and isinstance(before.command, Launch) and isinstance(after, Launch))
    else:
        check(edge.from_port == 0)


def dependencies_of(
    proc: Process, graph: Graph, nodes: Sequence[Any] | None, data: Sequence[Any] | None, count: int
) -> dict[Node, Edge]:
    """The nodes of a graph that a new one waits for, each once."""
    found = [node_of(proc, node) for node in (nodes or [])[:count]]
    check(len(found) == count == len(set(found)) and all(node.graph is graph for node in found))
    return dict(zip(found, edges_of(data, count), strict=True))


def _pairs(proc: Process, graph: Graph, first: Any, second: Any, count: int) -> list[tuple[Node, Node]]:
    found = [(node_of(proc, a), node_of(proc, b)) for a, b in zip(first[:count], second[:count], strict=True)]
    check(len(found) == count and all(node.graph is graph for pair in found for node in pair))
    return found


@entry(bindings=12, name="cuGraphAddDependencies_v2")
@entry(bindings=13, name="cuGraphAddDependencies")
def _add_edges(proc: Process, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: int) -> None:
    """All of them, or none. A cycle is found by instantiation."""
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
    """All of them, or none, each of which has to be there with this data."""
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


# User objects -------------------------------------------------------------------------------------------------------


@entry()
def cuGraphRetainUserObject(proc: Process, graph: Any, object: Any, count: int, flags: int) -> None:
    """References of the graph: new ones, or with CU_GRAPH_USER_OBJECT_MOVE those of the caller."""
    found, item = graph_of(proc, graph), user_object(proc, object)
    check(0 < count < 1 << 31 and flags in (0, _MOVE))
    if not flags & _MOVE:
        item.retain(count)
    found.user_objects[item] += count


@entry()
def cuGraphReleaseUserObject(proc: Process, graph: Any, object: Any, count: int) -> None:
    found, item = graph_of(proc, graph), user_object(proc, object)
    check(0 < count <= found.user_objects[item])
    found.user_objects[item] -= count
    found.user_objects += type(found.user_objects)()  # without those of which nothing is left
    item.release(proc, count)
