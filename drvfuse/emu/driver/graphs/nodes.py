# SPDX-License-Identifier: Apache-2.0
"""Nodes of graphs by their kinds: adding them, their parameters, their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bindings import R, T
from ...machine.graphs.graph import Edge, Graph, Node
from ...machine.process.failure import Failure
from ...machine.process.process import Process
from ...machine.run.work import Command, Launch, retain
from ..entry import check, entry
from ..launch import Attributes
from . import commands
from .edges import dependencies_of, require_edge
from .graph import graph_of, node_of, register

_N = T.CUgraphNodeType
_ID = T.CUlaunchAttributeID
_CLONE, _MOVE = 0, 1  # CUgraphChildGraphNodeOwnership


def place(proc: Process, graph: Any, nodes: Any, count: int, data: Any = None) -> tuple[Graph, Mapping[Node, Edge]]:
    """Check the arguments of a call that adds a node. Returns the graph, and the nodes for which the new node waits."""
    found = graph_of(proc, graph)
    return found, dependencies_of(proc, found, nodes, data, count)


def insert(proc: Process, where: tuple[Graph, Mapping[Node, Edge]], command: Command | None) -> Node:
    """Add a node with a command."""
    graph, after = where
    for before, edge in after.items():
        require_edge(before, command, edge)
    return proc.add(graph.add(Node(graph, command), after))


def handle(node: Node) -> Any:
    return T.CUgraphNode(node.handle)


def of_kind(proc: Process, value: Any, kind: Any) -> Node:
    """The node of a handle, which must be of a certain kind."""
    node = node_of(proc, value)
    check(node.kind == kind)
    return node


def assign(node: Node, command: Command | None, given: tuple[bytes, ...] = ()) -> None:
    """Give a node another command of the same kind."""
    for before, edge in node.dependencies.items():
        require_edge(before, command, edge)
    node.command, node.given = command, given


# Empty nodes and child graphs ---------------------------------------------------------------------------------------


@entry(1)
def cuGraphAddEmptyNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int) -> Any:
    return handle(insert(proc, place(proc, hGraph, dependencies, numDependencies), None))


def add_child(proc: Process, where: tuple[Graph, Mapping[Node, Edge]], child: Graph, ownership: int) -> Node:
    """Add a node with a copy of a graph or, if the graph is moved, with the graph itself."""
    check(ownership in (_CLONE, _MOVE))
    if ownership == _MOVE:
        check(child.parent is None and child.executable is None and where[0].root is not child)
        made = child
    else:
        check(not child.of_memory())
        made = child.clone()
    node = insert(proc, where, None)
    node.child, made.parent, made.moved = made, node, ownership == _MOVE
    if ownership == _CLONE:
        register(proc, made)
        retain(made.all_objects())
    return node


@entry(1)
def cuGraphAddChildGraphNode(
    proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, childGraph: Any
) -> Any:
    """Adds a node with a copy of the graph."""
    where = place(proc, hGraph, dependencies, numDependencies)
    return handle(add_child(proc, where, graph_of(proc, childGraph), _CLONE))


def child_handle(node: Node) -> Any:
    assert node.child is not None
    return T.CUgraph(node.child.handle)


@entry(1)
def cuGraphChildGraphNodeGetGraph(proc: Process, hNode: Any) -> Any:
    """Returns the child graph itself, which still belongs to the node."""
    return child_handle(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_GRAPH))


# Kernels ------------------------------------------------------------------------------------------------------------


@entry(1)
def cuGraphAddKernelNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any) -> Any:
    where = place(proc, hGraph, dependencies, numDependencies)
    return handle(insert(proc, where, commands.kernel(proc, nodeParams)))


def kernel_node(proc: Process, value: Any) -> tuple[Node, Launch]:
    node = node_of(proc, value)
    if not isinstance(node.command, Launch):
        raise Failure(R.CUDA_ERROR_INVALID_VALUE)
    return node, node.command


@entry(1)
def cuGraphKernelNodeGetParams(proc: Process, hNode: Any) -> Any:
    """Returns the parameters. The memory of `kernelParams` is valid until the next query of the node or its
    destruction.
    """
    node, _ = kernel_node(proc, hNode)
    p = T.CUDA_KERNEL_NODE_PARAMS()
    commands.describe_kernel(node, p)
    return p


@entry()
def cuGraphKernelNodeSetParams(proc: Process, hNode: Any, nodeParams: Any) -> None:
    """Sets the parameters of a node. Its attributes do not change."""
    node, launch = kernel_node(proc, hNode)
    assign(node, commands.kernel(proc, nodeParams, launch))


@entry(1)
def cuGraphKernelNodeGetAttribute(proc: Process, hNode: Any, attr: Any) -> Any:
    _, launch = kernel_node(proc, hNode)
    value = T.CUkernelNodeAttrValue()
    Attributes.of(launch).get(_ID(int(attr)), value)
    return value


@entry()
def cuGraphKernelNodeSetAttribute(proc: Process, hNode: Any, attr: Any, value: Any) -> None:
    node, launch = kernel_node(proc, hNode)
    check(value is not None)
    attributes = Attributes.of(launch)
    attributes.set(_ID(int(attr)), value)
    assign(node, commands.with_attributes(proc, launch, attributes))


@entry()
def cuGraphKernelNodeCopyAttributes(proc: Process, dst: Any, src: Any) -> None:
    (node, launch), (_, source) = kernel_node(proc, dst), kernel_node(proc, src)
    check(launch.context is source.context)
    assign(node, commands.with_attributes(proc, launch, Attributes.of(source)))


# Copies and fills ---------------------------------------------------------------------------------------------------


@entry(1)
def cuGraphAddMemcpyNode(
    proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, copyParams: Any, ctx: Any
) -> Any:
    where = place(proc, hGraph, dependencies, numDependencies)
    return handle(insert(proc, where, commands.copy(proc, copyParams, commands.context_of(proc, ctx))))


@entry(1)
def cuGraphMemcpyNodeGetParams(proc: Process, hNode: Any) -> Any:
    p = T.CUDA_MEMCPY3D()
    commands.describe_copy(proc, of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_MEMCPY), p)
    return p


@entry()
def cuGraphMemcpyNodeSetParams(proc: Process, hNode: Any, nodeParams: Any) -> None:
    node = of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_MEMCPY)
    assert node.command is not None
    assign(node, commands.copy(proc, nodeParams, node.command.context))


@entry(1)
def cuGraphAddMemsetNode(
    proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, memsetParams: Any, ctx: Any
) -> Any:
    where = place(proc, hGraph, dependencies, numDependencies)
    return handle(insert(proc, where, commands.fill(proc, memsetParams, commands.context_of(proc, ctx))))


@entry(1)
def cuGraphMemsetNodeGetParams(proc: Process, hNode: Any) -> Any:
    p = T.CUDA_MEMSET_NODE_PARAMS()
    commands.describe_fill(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_MEMSET), p)
    return p


@entry()
def cuGraphMemsetNodeSetParams(proc: Process, hNode: Any, nodeParams: Any) -> None:
    node = of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_MEMSET)
    assert node.command is not None
    assign(node, commands.fill(proc, nodeParams, node.command.context))


# Host functions, events and memory operations -----------------------------------------------------------------------


@entry(1)
def cuGraphAddHostNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any) -> Any:
    return handle(insert(proc, place(proc, hGraph, dependencies, numDependencies), commands.host(proc, nodeParams)))


@entry(1)
def cuGraphHostNodeGetParams(proc: Process, hNode: Any) -> Any:
    p = T.CUDA_HOST_NODE_PARAMS()
    commands.describe_host(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_HOST), p)
    return p


@entry()
def cuGraphHostNodeSetParams(proc: Process, hNode: Any, nodeParams: Any) -> None:
    node = of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_HOST)
    assign(node, commands.host(proc, nodeParams))


def event_handle(node: Node) -> Any:
    return T.CUevent(commands.event_in(node).handle)


@entry(1)
def cuGraphAddEventRecordNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, event: Any) -> Any:
    """Adds a node that records an event. From the launch of the graph on, calls see the event as recorded."""
    where = place(proc, hGraph, dependencies, numDependencies)
    return handle(insert(proc, where, commands.record(proc, event)))


@entry(1)
def cuGraphEventRecordNodeGetEvent(proc: Process, hNode: Any) -> Any:
    return event_handle(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD))


@entry()
def cuGraphEventRecordNodeSetEvent(proc: Process, hNode: Any, event: Any) -> None:
    assign(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD), commands.record(proc, event))


@entry(1)
def cuGraphAddEventWaitNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, event: Any) -> Any:
    """Adds a node that waits for an event as it was last recorded before the launch of the graph."""
    return handle(insert(proc, place(proc, hGraph, dependencies, numDependencies), commands.wait(proc, event)))


@entry(1)
def cuGraphEventWaitNodeGetEvent(proc: Process, hNode: Any) -> Any:
    return event_handle(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_WAIT_EVENT))


@entry()
def cuGraphEventWaitNodeSetEvent(proc: Process, hNode: Any, event: Any) -> None:
    assign(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_WAIT_EVENT), commands.wait(proc, event))


@entry(1)
def cuGraphAddBatchMemOpNode(
    proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any
) -> Any:
    node = insert(proc, place(proc, hGraph, dependencies, numDependencies), commands.batch(proc, nodeParams))
    node.given = commands.given_batch(nodeParams)
    return handle(node)


@entry(1)
def cuGraphBatchMemOpNodeGetParams(proc: Process, hNode: Any) -> Any:
    p = T.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    commands.describe_batch(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP), p)
    return p


@entry()
def cuGraphBatchMemOpNodeSetParams(proc: Process, hNode: Any, nodeParams: Any) -> None:
    node = of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
    assign(node, commands.batch(proc, nodeParams), commands.given_batch(nodeParams))
