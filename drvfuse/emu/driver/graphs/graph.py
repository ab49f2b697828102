# SPDX-License-Identifier: Apache-2.0
"""Graphs: their creation, their nodes, clones, and references to user objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...bindings import R, T
from ...machine.graphs.graph import Graph, Node
from ...machine.process.process import Process
from ...machine.run.work import release, retain
from ..entry import check, entry, present
from .user_object import user_object

_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE


def graph_of(proc: Process, value: Any) -> Graph:
    return proc.get(value, Graph, R.CUDA_ERROR_INVALID_VALUE)


def node_of(proc: Process, value: Any) -> Node:
    return proc.get(value, Node, R.CUDA_ERROR_INVALID_VALUE)


def register(proc: Process, graph: Graph) -> Graph:
    """Register a graph, with its nodes and child graphs, under their handles."""
    for item in graph.everything():
        proc.add(item)
    return graph


def discard(proc: Process, items: Iterable[Graph | Node]) -> None:
    """Remove the handles of graphs and nodes, and give up what the graphs hold: references to user objects, and the
    memory of their allocation nodes.
    """
    for item in items:
        proc.remove(item)
        if isinstance(item, Graph):
            release(proc, item.user_objects)
            proc.graph_memory.abandon(item)


@entry(1)
def cuGraphCreate(proc: Process, flags: int) -> Any:
    check(flags == 0)
    return T.CUgraph(proc.add(Graph()).handle)


@entry()
def cuGraphDestroy(proc: Process, hGraph: Any) -> None:
    """Destroys a graph. Its executables stay. A child graph is only destroyed with its node."""
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
    """Destroys a node with its edges and, for a child graph node, the child graph."""
    node = node_of(proc, hNode)
    check(not node.graph.of_memory())
    node.graph.remove(node)
    discard(proc, [node, *(node.child.everything() if node.child is not None else ())])


# Queries ------------------------------------------------------------------------------------------------------------


def some(nodes: Iterable[Node], count: int) -> tuple[list[Any], int]:
    """The result of a query of nodes in cuda.bindings, as (list of handles, number). If `count` is 0, the list is empty
    and the number is how many nodes there are. Otherwise the list has `count` handles, the last of which are 0 if there
    are fewer nodes, and the number is how many handles are not 0.
    """
    found = [T.CUgraphNode(node.handle) for node in nodes]
    if count == 0:
        return [], len(found)
    return [*found[:count], *[T.CUgraphNode(0)] * (count - len(found))], min(count, len(found))


@entry(2)
def cuGraphGetNodes(proc: Process, hGraph: Any, numNodes: int = 0) -> tuple[list[Any], int]:
    """Returns the nodes in the order in which they were added."""
    return some(graph_of(proc, hGraph).nodes, numNodes)


@entry(2)
def cuGraphGetRootNodes(proc: Process, hGraph: Any, numRootNodes: int = 0) -> tuple[list[Any], int]:
    return some(graph_of(proc, hGraph).roots(), numRootNodes)


@entry(1)
def cuGraphNodeGetType(proc: Process, hNode: Any) -> Any:
    return node_of(proc, hNode).kind


@entry(1, optional=True)
def cuGraphGetId(proc: Process, hGraph: Any) -> int:
    return graph_of(proc, hGraph).ident


@entry(1, optional=True)
def cuGraphNodeGetLocalId(proc: Process, hNode: Any) -> int:
    """Returns the number of the node in its graph."""
    return node_of(proc, hNode).number


@entry(1, optional=True)
def cuGraphNodeGetToolsId(proc: Process, hNode: Any) -> int:
    return node_of(proc, hNode).handle


@entry(1, optional=True)
def cuGraphNodeGetContainingGraph(proc: Process, hNode: Any) -> Any:
    return T.CUgraph(node_of(proc, hNode).graph.handle)


# User objects -------------------------------------------------------------------------------------------------------


@entry()
def cuGraphRetainUserObject(proc: Process, graph: Any, object: Any, count: int, flags: int) -> None:
    """Gives the graph references to a user object: new references or, with CU_GRAPH_USER_OBJECT_MOVE, the caller's."""
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
    found.user_objects += type(found.user_objects)()  # adding an empty Counter drops the objects with the count 0
    item.release(proc, count)
