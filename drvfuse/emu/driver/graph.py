# SPDX-License-Identifier: Apache-2.0
"""Graphs: made by capture, instantiated, launched."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.capture import Graph, GraphExec, Node, edges
from ..machine.process import Process
from ..machine.work import Copy, Copy3D, Fill, HostCall, Launch, Record
from .entry import check, entry

_N = T.CUgraphNodeType
_TYPES = {
    Launch: _N.CU_GRAPH_NODE_TYPE_KERNEL,
    Copy: _N.CU_GRAPH_NODE_TYPE_MEMCPY,
    Copy3D: _N.CU_GRAPH_NODE_TYPE_MEMCPY,
    Fill: _N.CU_GRAPH_NODE_TYPE_MEMSET,
    HostCall: _N.CU_GRAPH_NODE_TYPE_HOST,
    Record: _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
}
_INSTANTIATE_FLAGS = 1 | 2 | 8  # auto free, upload, node priority; launching from the device is not emulated


def _graph(proc: Process, value: Any) -> Graph:
    return proc.get(value, Graph, R.CUDA_ERROR_INVALID_VALUE)


def _list(nodes: list[Any], count: int) -> tuple[list[Any], int]:
    """cuda.bindings' two-step protocol: without a count only the number, then as many as asked for."""
    if count == 0:
        return [], len(nodes)
    found = nodes[:count]
    return [*found, *[T.CUgraphNode(0)] * (count - len(found))], len(found)


@entry(1)
def cuGraphCreate(proc: Process, flags: int) -> Any:
    check(flags == 0)
    return T.CUgraph(proc.add(Graph()).handle)


@entry()
def cuGraphDestroy(proc: Process, hGraph: Any) -> None:
    graph = _graph(proc, hGraph)
    for item in (graph, *graph.nodes):
        proc.remove(item)


@entry(2)
def cuGraphGetNodes(proc: Process, hGraph: Any, numNodes: int = 0) -> tuple[list[Any], int]:
    return _list([T.CUgraphNode(node.handle) for node in _graph(proc, hGraph).nodes], numNodes)


@entry(2)
def cuGraphGetRootNodes(proc: Process, hGraph: Any, numRootNodes: int = 0) -> tuple[list[Any], int]:
    return _list([T.CUgraphNode(node.handle) for node in _graph(proc, hGraph).roots()], numRootNodes)


def _edge(programmatic: bool) -> Any:
    data = T.CUgraphEdgeData()
    if programmatic:
        data.type = T.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        data.from_port = 1  # the trigger of the kernel
    return data


@entry(4, bindings=12, name="cuGraphGetEdges_v2")
@entry(4, bindings=13, name="cuGraphGetEdges")
def _edges(proc: Process, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], list[Any], int]:
    found = edges(_graph(proc, hGraph).nodes)
    if numEdges == 0:
        return [], [], [], len(found)
    check(numEdges >= len(found))
    return (
        [T.CUgraphNode(a.handle) for a, _, _ in found],
        [T.CUgraphNode(b.handle) for _, b, _ in found],
        [_edge(programmatic) for _, _, programmatic in found],
        len(found),
    )


@entry(3, bindings=12, name="cuGraphNodeGetDependencies_v2")
@entry(3, bindings=13, name="cuGraphNodeGetDependencies")
def _dependencies(proc: Process, hNode: Any, numDependencies: int = 0) -> tuple[list[Any], list[Any], int]:
    node = proc.get(hNode, Node, R.CUDA_ERROR_INVALID_VALUE)
    nodes, number = _list([T.CUgraphNode(d.handle) for d in node.dependencies], numDependencies)
    return nodes, [_edge(node.programmatic) for _ in nodes], number


@entry(3, bindings=12)
def cuGraphGetEdges(proc: Process, hGraph: Any, numEdges: int = 0) -> tuple[list[Any], list[Any], int]:
    check(not any(p for _, _, p in edges(_graph(proc, hGraph).nodes)), R.CUDA_ERROR_LOSSY_QUERY)
    a, b, _, number = _edges(proc, hGraph, numEdges)
    return a, b, number


@entry(2, bindings=12)
def cuGraphNodeGetDependencies(proc: Process, hNode: Any, numDependencies: int = 0) -> tuple[list[Any], int]:
    nodes, _, number = _dependencies(proc, hNode, numDependencies)
    return nodes, number


@entry(1)
def cuGraphNodeGetType(proc: Process, hNode: Any) -> Any:
    node = proc.get(hNode, Node, R.CUDA_ERROR_INVALID_VALUE)
    return _TYPES.get(type(node.command), _N.CU_GRAPH_NODE_TYPE_EMPTY)


@entry(1)
def cuGraphInstantiateWithParams(proc: Process, hGraph: Any, instantiateParams: Any) -> Any:
    check(instantiateParams is not None)
    return cuGraphInstantiate(proc, hGraph, instantiateParams.flags)


@entry(1)
def cuGraphInstantiate(proc: Process, hGraph: Any, flags: int) -> Any:
    graph, flags = _graph(proc, hGraph), int(flags)
    check(not flags & ~_INSTANTIATE_FLAGS, R.CUDA_ERROR_NOT_SUPPORTED)
    return T.CUgraphExec(proc.add(GraphExec(tuple(graph.nodes), flags)).handle)


def _exec(proc: Process, value: Any) -> GraphExec:
    return proc.get(value, GraphExec, R.CUDA_ERROR_INVALID_VALUE)


@entry()
def cuGraphLaunch(proc: Process, hGraphExec: Any, hStream: Any) -> None:
    """Every launch replays the nodes with the parameters that they were captured with."""
    found, stream = _exec(proc, hGraphExec), proc.stream(hStream)
    stream.refuse_captured(R.CUDA_ERROR_NOT_SUPPORTED)
    found.launch(proc, stream)


@entry()
def cuGraphUpload(proc: Process, hGraphExec: Any, hStream: Any) -> None:
    _exec(proc, hGraphExec)
    proc.stream(hStream)


@entry(1)
def cuGraphExecGetFlags(proc: Process, hGraphExec: Any) -> Any:
    return T.cuuint64_t(_exec(proc, hGraphExec).flags)


@entry()
def cuGraphExecDestroy(proc: Process, hGraphExec: Any) -> None:
    """A launch that is still queued runs."""
    proc.remove(_exec(proc, hGraphExec))
