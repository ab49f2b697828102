# SPDX-License-Identifier: Apache-2.0
"""Nodes of all kinds, by the structure CUgraphNodeParams, which contains the structure of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...bindings import R, T
from ...machine.process.failure import Failure
from ...machine.process.process import Process
from ...machine.run.work import Command
from ..entry import check, entry, number, unsupported
from ..refused import CONDITIONAL, EXTERNAL
from . import commands
from .graph import graph_of, node_of
from .memory import add_allocation, add_free, describe_allocation, freed_address
from .nodes import add_child, assign, child_handle, event_handle, handle, insert, of_kind, place

_N = T.CUgraphNodeType
_REFUSED = {
    _N.CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL: EXTERNAL,
    _N.CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT: EXTERNAL,
    _N.CU_GRAPH_NODE_TYPE_CONDITIONAL: CONDITIONAL,
}
"""The kinds of nodes that are not emulated, and the reasons."""


def command_of(proc: Process, p: Any, former: Command | None, strict: bool) -> Command | None:
    """The command that CUgraphNodeParams describe; None for an empty node. Raises Failure for a kind of node whose
    parameters cannot be set.
    """
    kind = kind_of(p)
    makers: dict[Any, Callable[[], Command]] = {
        _N.CU_GRAPH_NODE_TYPE_KERNEL: lambda: commands.kernel(proc, p.kernel, former, strict=strict),
        _N.CU_GRAPH_NODE_TYPE_MEMCPY: lambda: _copy(proc, p.memcpy),
        _N.CU_GRAPH_NODE_TYPE_MEMSET: lambda: commands.fill(proc, p.memset, commands.context_of(proc, p.memset.ctx)),
        _N.CU_GRAPH_NODE_TYPE_HOST: lambda: commands.host(proc, p.host),
        _N.CU_GRAPH_NODE_TYPE_WAIT_EVENT: lambda: commands.wait(proc, p.eventWait.event),
        _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD: lambda: commands.record(proc, p.eventRecord.event),
        _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: lambda: commands.batch(proc, p.memOp),
    }
    if kind == _N.CU_GRAPH_NODE_TYPE_EMPTY:
        return None
    if kind in _REFUSED:
        raise unsupported(f"a node of the kind {kind.name} is refused: {_REFUSED[kind]}")
    check(kind in makers)
    return makers[kind]()


def kind_of(p: Any) -> Any:
    check(p is not None)
    try:
        return p.type
    except ValueError:  # the number is no member of the enum
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None


def _copy(proc: Process, p: Any) -> Command:
    check(p.flags == 0)
    return commands.copy(proc, p.copyParams, commands.context_of(proc, p.copyCtx))


def _add(proc: Process, graph: Any, nodes: Any, data: Any, count: int, p: Any, strict: bool) -> Any:
    where, kind = place(proc, graph, nodes, count, data), kind_of(p)
    if kind == _N.CU_GRAPH_NODE_TYPE_GRAPH:
        return handle(add_child(proc, where, graph_of(proc, p.graph.graph), int(p.graph.ownership)))
    if kind == _N.CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return handle(add_allocation(proc, where, p.alloc))
    if kind == _N.CU_GRAPH_NODE_TYPE_MEM_FREE:
        return handle(add_free(proc, where, number(p.free.dptr)))
    node = insert(proc, where, command_of(proc, p, None, strict))
    if kind == _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        node.given = commands.given_batch(p.memOp)
    return handle(node)


@entry(1, bindings=12)
def cuGraphAddNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any) -> Any:
    return _add(proc, hGraph, dependencies, None, numDependencies, nodeParams, False)


@entry(1, bindings=12, name="cuGraphAddNode_v2")
@entry(1, bindings=13, name="cuGraphAddNode")
def _add_node(
    proc: Process, hGraph: Any, dependencies: Any, dependencyData: Any, numDependencies: int, nodeParams: Any
) -> Any:
    return _add(proc, hGraph, dependencies, dependencyData, numDependencies, nodeParams, False)


@entry(1, bindings=13, optional=True)
def cuGraphAddNode_v3(
    proc: Process, hGraph: Any, dependencies: Any, dependencyData: Any, numDependencies: int, nodeParams: Any
) -> Any:
    """Adds a node, as cuGraphAddNode does, but the context of a kernel node must be that of its function."""
    return _add(proc, hGraph, dependencies, dependencyData, numDependencies, nodeParams, True)


@entry()
def cuGraphNodeSetParams(proc: Process, hNode: Any, nodeParams: Any) -> None:
    """Changes the parameters of a node. Allocation, free and child graph nodes are refused."""
    _set_params(proc, hNode, nodeParams, False)


@entry(bindings=13, optional=True)
def cuGraphNodeSetParams_v2(proc: Process, hNode: Any, nodeParams: Any) -> None:
    _set_params(proc, hNode, nodeParams, True)


def _set_params(proc: Process, hNode: Any, p: Any, strict: bool) -> None:
    node = of_kind(proc, hNode, kind_of(p))
    fixed = (_N.CU_GRAPH_NODE_TYPE_MEM_ALLOC, _N.CU_GRAPH_NODE_TYPE_MEM_FREE, _N.CU_GRAPH_NODE_TYPE_GRAPH)
    check(node.kind not in fixed, R.CUDA_ERROR_NOT_SUPPORTED)
    command = command_of(proc, p, node.command, strict)
    given = commands.given_batch(p.memOp) if node.kind == _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP else ()
    assign(node, command, given)


@entry(1, bindings=13, optional=True)
def cuGraphNodeGetParams(proc: Process, hNode: Any) -> Any:
    node, p = node_of(proc, hNode), T.CUgraphNodeParams()
    p.type, command = node.kind, node.command
    describers: dict[Any, Callable[[], None]] = {
        _N.CU_GRAPH_NODE_TYPE_KERNEL: lambda: commands.describe_kernel(node, p.kernel),
        _N.CU_GRAPH_NODE_TYPE_MEMCPY: lambda: commands.describe_copy(proc, node, p.memcpy.copyParams),
        _N.CU_GRAPH_NODE_TYPE_MEMSET: lambda: commands.describe_fill(node, p.memset),
        _N.CU_GRAPH_NODE_TYPE_HOST: lambda: commands.describe_host(node, p.host),
        _N.CU_GRAPH_NODE_TYPE_WAIT_EVENT: lambda: setattr(p.eventWait, "event", event_handle(node)),
        _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD: lambda: setattr(p.eventRecord, "event", event_handle(node)),
        _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: lambda: commands.describe_batch(node, p.memOp),
        _N.CU_GRAPH_NODE_TYPE_GRAPH: lambda: setattr(p.graph, "graph", child_handle(node)),
        _N.CU_GRAPH_NODE_TYPE_MEM_ALLOC: lambda: describe_allocation(node, p.alloc),
        _N.CU_GRAPH_NODE_TYPE_MEM_FREE: lambda: setattr(p.free, "dptr", freed_address(node)),
        _N.CU_GRAPH_NODE_TYPE_EMPTY: lambda: None,
    }
    describers[node.kind]()
    if node.kind == _N.CU_GRAPH_NODE_TYPE_KERNEL and command is not None:
        p.kernel.ctx = T.CUcontext(command.context.handle)
    elif node.kind == _N.CU_GRAPH_NODE_TYPE_MEMCPY and command is not None:
        p.memcpy.copyCtx = T.CUcontext(command.context.handle)
    elif node.kind == _N.CU_GRAPH_NODE_TYPE_MEMSET and command is not None:
        p.memset.ctx = T.CUcontext(command.context.handle)
    return p
