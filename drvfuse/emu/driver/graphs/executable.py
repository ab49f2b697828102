# SPDX-License-Identifier: Apache-2.0
"""Executable graphs: instantiation, launches, updates, and changes of single nodes."""

from __future__ import annotations

from typing import Any

from ...bindings import R, T
from ...findings.reports import Report
from ...machine.graphs.executable import AUTO_FREE, DEVICE_LAUNCH, NODE_PRIORITY, UPLOAD, GraphExec, Step
from ...machine.graphs.graph import Cycle, Graph
from ...machine.graphs.update import Unfit, refusal, update
from ...machine.memory.foreign import FOREIGN
from ...machine.process.failure import Failure
from ...machine.process.process import Process
from ...machine.run.work import Command, Copy, Copy3D, Fill, Launch
from ...space import mapped
from ..entry import check, entry, unsupported
from . import commands
from .any_node import command_of, kind_of
from .graph import graph_of, node_of

_N = T.CUgraphNodeType
_RESULT = T.CUgraphInstantiateResult
_FLAGS = AUTO_FREE | UPLOAD | DEVICE_LAUNCH | NODE_PRIORITY


def exec_of(proc: Process, value: Any) -> GraphExec:
    return proc.get(value, GraphExec, R.CUDA_ERROR_INVALID_VALUE)


# Instantiation ------------------------------------------------------------------------------------------------------


def _instantiate(proc: Process, graph: Graph, flags: int) -> GraphExec:
    check(not flags & ~_FLAGS and not (flags & DEVICE_LAUNCH and flags & AUTO_FREE))
    if flags & DEVICE_LAUNCH:
        raise unsupported("graphs that kernels launch (CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) are not emulated")
    if graph.moved:
        raise _refused("the graph was moved into a child graph node: instantiate the graph that has this node")
    if graph.root.executable is not None:
        raise _refused("a graph with allocation or free nodes can have only one executable, and this graph has one")
    return proc.add(GraphExec(proc, graph, flags & ~UPLOAD))


def _refused(why: str, code: Any = R.CUDA_ERROR_INVALID_VALUE) -> Failure:
    return Failure(code, Report("graph", why))


def _cyclic(cycle: Cycle) -> Failure:
    nodes = ", ".join(f"node {node.number} (0x{node.handle:x})" for node in cycle.nodes)
    return _refused(f"the graph has a cycle, in which each node waits for the node before it: {nodes}")


@entry(1)
def cuGraphInstantiate(proc: Process, hGraph: Any, flags: int) -> Any:
    """Makes an executable, which later changes of the graph do not affect. A cycle of edges is refused."""
    check(not flags & UPLOAD)
    try:
        return T.CUgraphExec(_instantiate(proc, graph_of(proc, hGraph), flags).handle)
    except Cycle as cycle:
        raise _cyclic(cycle) from None


@entry(1)
def cuGraphInstantiateWithParams(proc: Process, hGraph: Any, instantiateParams: Any) -> Any:
    """Makes an executable. Writes the result to `instantiateParams` and, if there is a cycle, one node of the cycle."""
    p = instantiateParams
    check(p is not None)
    p.result_out, p.hErrNode_out = _RESULT.CUDA_GRAPH_INSTANTIATE_ERROR, T.CUgraphNode(0)
    flags = int(p.flags)
    stream = proc.stream(p.hUploadStream) if flags & UPLOAD else None
    try:
        made = _instantiate(proc, graph_of(proc, hGraph), flags)
    except Cycle as cycle:
        p.result_out = _RESULT.CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
        p.hErrNode_out = T.CUgraphNode(cycle.nodes[0].handle)
        raise _cyclic(cycle) from None
    if stream is not None:
        proc.graph_memory.back(made.allocates)
    p.result_out = _RESULT.CUDA_GRAPH_INSTANTIATE_SUCCESS
    return T.CUgraphExec(made.handle)


@entry(1)
def cuGraphExecGetFlags(proc: Process, hGraphExec: Any) -> Any:
    return T.cuuint64_t(exec_of(proc, hGraphExec).flags)


@entry(1, optional=True)
def cuGraphExecGetId(proc: Process, hGraphExec: Any) -> int:
    return exec_of(proc, hGraphExec).ident


@entry()
def cuGraphExecDestroy(proc: Process, hGraphExec: Any) -> None:
    """Destroys an executable. Launches that are queued still run."""
    exec_of(proc, hGraphExec).destroy()


# Launches -----------------------------------------------------------------------------------------------------------


@entry()
def cuGraphLaunch(proc: Process, hGraphExec: Any, hStream: Any) -> None:
    """Queues all nodes with their present parameters. In a capture, the launch becomes a child graph node."""
    found, stream = exec_of(proc, hGraphExec), proc.stream(hStream)
    if stream.capture is None:
        _require_modules(proc, found)
        _require_host_memory(proc, found)
        found.launch(stream)
        return
    if found.allocates or found.frees:
        stream.refuse_captured(R.CUDA_ERROR_NOT_SUPPORTED)
    stream.capture.record_graph(stream, found)


def _require_modules(proc: Process, executable: GraphExec) -> None:
    """Raise Failure if the module of a kernel was unloaded, as the graph has no code for the kernel then."""
    for step in executable.plan.everything():
        command = step.command
        if isinstance(command, Launch) and step.enabled and not command.context.destroyed:
            name = command.function.name
            if proc.handles.get(command.function.handle) is not command.function:
                message = f"the graph launches kernel {name}, whose module or library was unloaded"
                raise Failure(R.CUDA_ERROR_INVALID_HANDLE, Report("module", message, name))


def _require_host_memory(proc: Process, executable: GraphExec) -> None:
    """Raise Failure if pageable memory that a node copies is not mapped any more, as the copy would crash the
    process.
    """
    for step in executable.plan.everything():
        for at in step.command.accesses() if isinstance(step.command, Copy | Copy3D) and step.enabled else ():
            local = at.address < FOREIGN and not proc.machine.window.contains(at.address)
            if local and not mapped.usable(at.address, at.nbytes, at.write):
                verb = "writes" if at.write else "reads"
                raise _refused(
                    f"node {step.node.number} (0x{step.node.handle:x}) {verb} {at.nbytes} bytes of host memory at "
                    f"0x{at.address:x}, which are not mapped any more"
                )


@entry()
def cuGraphUpload(proc: Process, hGraphExec: Any, hStream: Any) -> None:
    """Reserves the device memory that the graph allocates, so that the first launch has it."""
    found, stream = exec_of(proc, hGraphExec), proc.stream(hStream)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    proc.graph_memory.back(found.allocates)


# Updates ------------------------------------------------------------------------------------------------------------


def _unfit(unfit: Unfit, code: Any) -> Failure:
    at = "" if unfit.node is None else f": node {unfit.node.number} (0x{unfit.node.handle:x})"
    before = "" if unfit.before is None else f", which waits for node {unfit.before.number} (0x{unfit.before.handle:x})"
    return _refused(f"{unfit.result.name}: {unfit.why}{at}{before}", code)


@entry(1)
def cuGraphExecUpdate(proc: Process, hGraphExec: Any, hGraph: Any) -> Any:
    """Replaces the commands of an executable graph by those of a graph of the same shape. If the graph does not fit,
    nothing changes, and the result is CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE. The report gives the reason, as
    cuda.bindings return no CUgraphExecUpdateResultInfo with an error.
    """
    executable, graph = exec_of(proc, hGraphExec), graph_of(proc, hGraph)
    check(not graph.moved)
    try:
        update(executable, executable.plan, graph)
    except Unfit as unfit:
        raise _unfit(unfit, R.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) from None
    info = T.CUgraphExecUpdateResultInfo()
    info.result = T.CUgraphExecUpdateResult.CU_GRAPH_EXEC_UPDATE_SUCCESS
    return info


@entry()
def cuGraphExecChildGraphNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, childGraph: Any) -> None:
    """Sets the parameters of the nodes in a child graph to those in `childGraph`, a graph of the same shape."""
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_GRAPH)
    assert step.inner is not None
    try:
        update(executable, step.inner, graph_of(proc, childGraph))
    except Unfit as unfit:
        raise _unfit(unfit, R.CUDA_ERROR_INVALID_VALUE) from None


# Single nodes -------------------------------------------------------------------------------------------------------


def _step(proc: Process, hGraphExec: Any, hNode: Any, kind: Any = None) -> tuple[GraphExec, Step]:
    """(executable, the step of the executable that runs the node `hNode`). Raises Failure if there is no such step."""
    executable, node = exec_of(proc, hGraphExec), node_of(proc, hNode)
    step = executable.plan.step(node)
    if step is None:
        raise _refused("the node is not of the graph that the executable was made from")
    check(kind is None or node.kind == kind)
    return executable, step


def _put(executable: GraphExec, step: Step, command: Command) -> None:
    """Replace the command of a step by another one of the same kind, for later launches."""
    was = step.command
    why = refusal(executable, was, command)
    if why is not None:
        raise _refused(why[1])
    if isinstance(was, Copy | Copy3D) and not (_one_row(was) and _one_row(command)):
        raise _refused("a memcpy node can be changed only if the old and the new copy have one row each")
    step.command = command


def _one_row(command: Command) -> bool:
    return isinstance(command, Copy) or (isinstance(command, Copy3D) and command.height == command.depth == 1)


@entry()
def cuGraphExecKernelNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, nodeParams: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_KERNEL)
    _put(executable, step, commands.kernel(proc, nodeParams, step.command))


@entry()
def cuGraphExecMemcpyNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, copyParams: Any, ctx: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_MEMCPY)
    _put(executable, step, commands.copy(proc, copyParams, commands.context_of(proc, ctx)))


@entry()
def cuGraphExecMemsetNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, memsetParams: Any, ctx: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_MEMSET)
    _put(executable, step, commands.fill(proc, memsetParams, commands.context_of(proc, ctx)))


@entry()
def cuGraphExecHostNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, nodeParams: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_HOST)
    _put(executable, step, commands.host(proc, nodeParams))


@entry()
def cuGraphExecEventRecordNodeSetEvent(proc: Process, hGraphExec: Any, hNode: Any, event: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_EVENT_RECORD)
    _put(executable, step, commands.record(proc, event))


@entry()
def cuGraphExecEventWaitNodeSetEvent(proc: Process, hGraphExec: Any, hNode: Any, event: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_WAIT_EVENT)
    _put(executable, step, commands.wait(proc, event))


@entry()
def cuGraphExecBatchMemOpNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, nodeParams: Any) -> None:
    executable, step = _step(proc, hGraphExec, hNode, _N.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
    _put(executable, step, commands.batch(proc, nodeParams))


@entry()
def cuGraphExecNodeSetParams(proc: Process, hGraphExec: Any, hNode: Any, nodeParams: Any) -> None:
    """Changes the parameters of a node in an executable. Allocation and free nodes are refused."""
    kind = kind_of(nodeParams)
    check(kind not in (_N.CU_GRAPH_NODE_TYPE_MEM_ALLOC, _N.CU_GRAPH_NODE_TYPE_MEM_FREE), R.CUDA_ERROR_NOT_SUPPORTED)
    if kind == _N.CU_GRAPH_NODE_TYPE_GRAPH:
        cuGraphExecChildGraphNodeSetParams(proc, hGraphExec, hNode, nodeParams.graph.graph)
        return
    executable, step = _step(proc, hGraphExec, hNode, kind)
    command = command_of(proc, nodeParams, step.command, False)
    if command is not None:
        _put(executable, step, command)


def _switchable(proc: Process, hGraphExec: Any, hNode: Any) -> Step:
    _, step = _step(proc, hGraphExec, hNode)
    check(isinstance(step.command, Launch | Copy | Copy3D | Fill))
    return step


@entry()
def cuGraphNodeSetEnabled(proc: Process, hGraphExec: Any, hNode: Any, isEnabled: int) -> None:
    """Enables or disables a kernel, memcpy or memset node. Later launches skip a disabled node."""
    _switchable(proc, hGraphExec, hNode).enabled = bool(isEnabled)


@entry(1)
def cuGraphNodeGetEnabled(proc: Process, hGraphExec: Any, hNode: Any) -> int:
    return int(_switchable(proc, hGraphExec, hNode).enabled)
