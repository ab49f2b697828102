# SPDX-License-Identifier: Apache-2.0
"""Executable graphs on the emulated driver: snapshots, changes of single nodes, updates by other graphs."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as T
from driver_helpers import R, code, ok, primary
from graph_helpers import BYTES, DEVICE, HOST, PTX, WORDS, Graphs, copy, fill

from drvfuse.emu import Machine
from drvfuse.emu.bindings import MAJOR

AS_MESSAGES = True

FAILED = R.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE


def _why(cuda: Any) -> str:
    """The message of the last report."""
    report = cuda.process.machine.reports[-1]
    assert report.kind == "graph"
    return str(report.message)


def test_later_changes_of_a_graph_do_not_change_its_executable(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    node = g.launch(g.add, 2)
    executable = g.instantiate()
    ok(cuda.cuGraphKernelNodeSetParams(node, g.kernel(g.add, 50)))
    g.launch(g.scale, 7, node)
    ok(cuda.cuGraphDestroy(g.graph))
    g.run(executable, times=2)
    assert g.read() == 5
    assert code(cuda.cuGraphExecKernelNodeSetParams(executable, node, g.kernel(g.add, 1))) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuGraphLaunch(executable, g.stream))
    ok(cuda.cuGraphExecDestroy(executable))
    ok(cuda.cuStreamSynchronize(g.stream))
    assert g.read() == 7
    assert code(cuda.cuGraphLaunch(executable, g.stream)) == R.CUDA_ERROR_INVALID_VALUE


def test_changes_of_an_executable_leave_queued_launches_and_the_graph_alone(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    node = g.launch(g.add, 1)
    executable = g.instantiate()
    ok(cuda.cuGraphLaunch(executable, g.stream))
    ok(cuda.cuGraphExecKernelNodeSetParams(executable, node, g.kernel(g.scale, 10)))
    ok(cuda.cuGraphLaunch(executable, g.stream))
    ok(cuda.cuStreamSynchronize(g.stream))
    assert g.read() == 20
    g.run()  # a new executable is made from the unchanged graph
    assert g.read() == 21
    clone = ok(cuda.cuGraphClone(g.graph))
    twin = ok(cuda.cuGraphNodeFindInClone(node, clone))
    refused = cuda.cuGraphExecKernelNodeSetParams(executable, twin, g.kernel(g.add, 1))
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE and "not of the graph" in _why(cuda)


def test_copies_and_fills_of_an_executable_can_get_new_addresses_and_values(cuda: Any) -> None:
    g = Graphs(cuda)
    other = ok(cuda.cuMemAlloc(BYTES))
    results = np.zeros((2, WORDS), np.uint32)
    first = ok(cuda.cuGraphAddMemsetNode(g.graph, None, 0, fill(g.words, 3, WORDS), g.context))
    down = copy(results[0], HOST, g.words, DEVICE, BYTES)
    last = ok(cuda.cuGraphAddMemcpyNode(g.graph, [first], 1, down, g.context))
    executable = g.instantiate()
    ok(cuda.cuGraphExecMemsetNodeSetParams(executable, first, fill(other, 4, WORDS), g.context))
    down = copy(results[1], HOST, other, DEVICE, BYTES)
    ok(cuda.cuGraphExecMemcpyNodeSetParams(executable, last, down, g.context))
    g.run(executable)
    assert (results[0] == 0).all() and (results[1] == 4).all()
    rows = fill(other, 4, 4, height=2, pitch=32)
    refused = cuda.cuGraphExecMemsetNodeSetParams(executable, first, rows, g.context)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE and "several rows" in _why(cuda)
    down.Height, down.WidthInBytes = 2, 8
    refused = cuda.cuGraphExecMemcpyNodeSetParams(executable, last, down, g.context)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE and "one row" in _why(cuda)
    context = primary(cuda, 1)
    far = ok(cuda.cuMemAlloc(BYTES))
    refused = cuda.cuGraphExecMemcpyNodeSetParams(executable, last, copy(results[1], HOST, far, DEVICE, BYTES), context)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE and "device" in _why(cuda)


def test_a_kernel_of_an_executable_keeps_its_context(cuda: Any) -> None:
    g, far = Graphs(cuda), Graphs(cuda, device=1)
    primary(cuda, 0)
    node = g.launch(g.add, 1)
    executable = g.instantiate()
    refused = cuda.cuGraphExecKernelNodeSetParams(executable, node, far.kernel(far.add, 1))
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE and "context" in _why(cuda)


def test_nodes_can_be_disabled_and_enabled(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    a = g.launch(g.add, 1)
    b = g.launch(g.scale, 10, a)
    g.launch(g.add, 5, b)
    empty = g.empty()
    executable = g.instantiate()
    assert ok(cuda.cuGraphNodeGetEnabled(executable, b)) == 1
    ok(cuda.cuGraphNodeSetEnabled(executable, b, 0))
    assert ok(cuda.cuGraphNodeGetEnabled(executable, b)) == 0
    g.run(executable)
    assert g.read() == 7
    ok(cuda.cuGraphNodeSetEnabled(executable, b, 1))
    g.run(executable)
    assert g.read() == 85
    assert code(cuda.cuGraphNodeSetEnabled(executable, empty, 0)) == R.CUDA_ERROR_INVALID_VALUE


def test_an_executable_takes_over_the_parameters_of_a_graph_of_its_shape(cuda: Any) -> None:
    g = Graphs(cuda, start=1)

    def build(first: Any, one: int, two: int) -> Any:
        graph = ok(cuda.cuGraphCreate(0))
        child = ok(cuda.cuGraphCreate(0))
        g.launch(first, one, graph=child)
        node = ok(cuda.cuGraphAddChildGraphNode(graph, None, 0, child))
        g.launch(g.scale, two, node, graph=graph)
        return graph

    executable = g.instantiate(build(g.add, 1, 2))
    g.run(executable)
    assert g.read() == 4
    info = ok(cuda.cuGraphExecUpdate(executable, build(g.scale, 5, 3)))
    assert info.result == T.CUgraphExecUpdateResult.CU_GRAPH_EXEC_UPDATE_SUCCESS
    g.run(executable)
    assert g.read() == 60


def _other(g: Graphs, name: str) -> tuple[Any, str]:
    """A graph that cannot update an executable of `add` followed by `scale`, and the text that the report must have."""
    cuda, graph = g.cuda, ok(g.cuda.cuGraphCreate(0))
    if name == "more nodes":
        for _ in range(3):
            g.launch(g.add, 1, graph=graph)
        return graph, "TOPOLOGY_CHANGED: the graph has 3 nodes"
    if name == "more ends":
        for _ in range(2):
            g.launch(g.add, 1, graph=graph)
        return graph, "TOPOLOGY_CHANGED: the graph has 2 nodes for which no other node waits"
    if name == "another kind":
        first = ok(cuda.cuGraphAddEmptyNode(graph, None, 0))
        g.launch(g.scale, 1, first, graph=graph)
        return graph, "NODE_TYPE_CHANGED"
    first = g.launch(g.add, 1, graph=graph)
    second = g.launch(g.scale, 1, graph=graph)
    data = T.CUgraphEdgeData()
    if name == "another edge":
        data.from_port, data.type = 1, 1
    function = cuda.cuGraphAddDependencies_v2 if MAJOR == 12 else cuda.cuGraphAddDependencies
    ok(function(graph, [first], [second], [data], 1))
    if name == "another edge":
        return graph, "TOPOLOGY_CHANGED: a node and its counterpart in the executable have different dependencies"
    value = T.CUkernelNodeAttrValue()
    value.cooperative = 1
    ok(cuda.cuGraphKernelNodeSetAttribute(second, T.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    return graph, "ATTRIBUTES_CHANGED"


@pytest.mark.parametrize("name", ["more nodes", "more ends", "another kind", "another edge", "attributes"])
def test_an_update_that_does_not_fit_says_why_and_changes_nothing(cuda: Any, name: str) -> None:
    g = Graphs(cuda, start=1)
    g.launch(g.scale, 2, g.launch(g.add, 1))
    executable = g.instantiate()
    graph, why = _other(g, name)
    assert cuda.cuGraphExecUpdate(executable, graph) == (FAILED, None)
    assert why in _why(cuda)
    g.run(executable)
    assert g.read() == 4


def test_an_update_pairs_nodes_by_their_edges(cuda: Any) -> None:
    """A graph with the same edges in the same order fits, even if its nodes were added in another order."""
    g = Graphs(cuda, start=1)
    g.launch(g.scale, 2, g.launch(g.add, 1))
    executable = g.instantiate()
    graph = ok(cuda.cuGraphCreate(0))
    last = g.launch(g.scale, 3, graph=graph)
    first = g.launch(g.add, 4, graph=graph)
    function = cuda.cuGraphAddDependencies_v2 if MAJOR == 12 else cuda.cuGraphAddDependencies
    ok(function(graph, [first], [last], None, 1))
    ok(cuda.cuGraphExecUpdate(executable, graph))
    g.run(executable)
    assert g.read() == 15


def test_a_child_graph_of_an_executable_is_updated_alone(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    child = ok(cuda.cuGraphCreate(0))
    g.launch(g.add, 1, graph=child)
    node = ok(cuda.cuGraphAddChildGraphNode(g.graph, None, 0, child))
    executable = g.instantiate()
    other = ok(cuda.cuGraphCreate(0))
    g.launch(g.add, 30, graph=other)
    ok(cuda.cuGraphExecChildGraphNodeSetParams(executable, node, other))
    g.run(executable)
    assert g.read() == 31
    ok(cuda.cuGraphAddEmptyNode(other, None, 0))
    assert code(cuda.cuGraphExecChildGraphNodeSetParams(executable, node, other)) == R.CUDA_ERROR_INVALID_VALUE
    inner = g.nodes(ok(cuda.cuGraphChildGraphNodeGetGraph(node)))[0]
    ok(cuda.cuGraphExecKernelNodeSetParams(executable, T.CUgraphNode(inner), g.kernel(g.scale, 2)))
    g.run(executable)
    assert g.read() == 62


def test_freed_host_memory_is_found_before_a_graph_launch(cuda: Any) -> None:
    g = Graphs(cuda)
    memory = mmap.mmap(-1, 1 << 16)
    words = np.frombuffer(memory, np.uint32)[:WORDS]
    ok(cuda.cuGraphAddMemcpyNode(g.graph, None, 0, copy(words.ctypes.data, HOST, g.words, DEVICE, BYTES), g.context))
    executable = g.instantiate()
    g.run(executable)
    del words
    memory.close()
    if type(cuda).__name__ == "EmulatedDriver":  # a `LoopbackDriver` asks for host memory only when the node runs
        assert code(cuda.cuGraphLaunch(executable, g.stream)) == R.CUDA_ERROR_INVALID_VALUE
        assert "not mapped any more" in _why(cuda)


def test_a_graph_of_a_lost_context_is_not_launched(cuda: Any) -> None:
    g, far = Graphs(cuda), Graphs(cuda, device=1)
    primary(cuda, 0)
    ok(cuda.cuGraphAddKernelNode(g.graph, None, 0, far.kernel(far.add, 1)))
    executable = g.instantiate()
    ok(cuda.cuDevicePrimaryCtxReset(1))
    assert code(cuda.cuGraphLaunch(executable, g.stream)) == R.CUDA_ERROR_CONTEXT_IS_DESTROYED
    ok(cuda.cuStreamSynchronize(g.stream))


def test_priorities_are_those_of_the_nodes_only_where_the_flag_asks_for_them(cuda: Any) -> None:
    g = Graphs(cuda)
    urgent = ok(cuda.cuStreamCreateWithPriority(1, -5))
    ok(cuda.cuStreamBeginCapture(urgent, T.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    g.queue(g.add, 1, urgent)
    graph = ok(cuda.cuStreamEndCapture(urgent))
    node = T.CUgraphNode(g.nodes(graph)[0])
    attribute = T.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    assert ok(cuda.cuGraphKernelNodeGetAttribute(node, attribute)).priority == -5
    executable = ok(cuda.cuGraphInstantiate(graph, 8))
    other = ok(cuda.cuGraphClone(graph))
    value = T.CUkernelNodeAttrValue()
    value.priority = -1
    ok(cuda.cuGraphKernelNodeSetAttribute(T.CUgraphNode(g.nodes(other)[0]), attribute, value))
    assert code(cuda.cuGraphExecUpdate(executable, other)) == FAILED and "priority" in _why(cuda)
    ok(cuda.cuGraphExecUpdate(ok(cuda.cuGraphInstantiate(graph, 0)), other))
    for e in (executable, ok(cuda.cuGraphInstantiate(graph, 0))):
        g.run(e)
    assert g.read() == 2


def test_instantiation_flags_are_stored_and_wrong_ones_refused(cuda: Any) -> None:
    g = Graphs(cuda)
    g.launch(g.add, 1)
    assert int(ok(cuda.cuGraphExecGetFlags(ok(cuda.cuGraphInstantiate(g.graph, 8 | 1))))) == 9
    params = T.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags, params.hUploadStream = T.cuuint64_t(2 | 8), g.stream
    uploaded = ok(cuda.cuGraphInstantiateWithParams(g.graph, params))
    assert int(ok(cuda.cuGraphExecGetFlags(uploaded))) == 8
    ok(cuda.cuGraphUpload(uploaded, g.stream))
    for flags, expected in ((2, R.CUDA_ERROR_INVALID_VALUE), (4, R.CUDA_ERROR_NOT_SUPPORTED)):
        assert code(cuda.cuGraphInstantiate(g.graph, flags)) == expected
    assert code(cuda.cuGraphInstantiate(g.graph, 5)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuGraphInstantiate(g.graph, 16)) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_programmatic_edge_overlaps_and_its_wait_still_orders(seed: int) -> None:
    waiting = b"""
    .version 8.0
    .target sm_90
    .address_size 64
    .visible .entry triple(.param .u64 p) {
      .reg .u64 %a, %o; .reg .u32 %x, %t;
      ld.param.u64 %a, [p]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.u64 %a, %a, %o;
      griddepcontrol.wait;
      ld.global.u32 %x, [%a]; mul.lo.u32 %x, %x, 3; st.global.u32 [%a], %x; ret;
    }
    """
    with Machine(devices=1, seed=seed, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        g = Graphs(cuda, start=1)
        first = g.launch(g.add, 1)
        p = g.kernel(ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(waiting)), b"triple")), 0)
        p.kernelParams = ((int(g.words),), (ctypes.c_void_p,))
        second = ok(cuda.cuGraphAddKernelNode(g.graph, None, 0, p))
        edge = T.CUgraphEdgeData()
        edge.from_port, edge.type = 1, 1
        ok(g.connect(first, second, edge))
        g.launch(g.add, 10, second)
        g.run(times=2)
        assert g.read() == ((1 + 1) * 3 + 10 + 1) * 3 + 10 and not machine.reports


def test_a_graph_whose_kernels_were_unloaded_is_not_launched(machine: Machine, cuda: Any) -> None:
    g = Graphs(cuda)
    module = ok(cuda.cuModuleLoadData(PTX))
    library = ok(cuda.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    functions = [ok(cuda.cuModuleGetFunction(module, b"add"))]
    functions.append(ok(cuda.cuKernelGetFunction(ok(cuda.cuLibraryGetKernel(library, b"add")))))
    executables = []
    for function in functions:
        graph = ok(cuda.cuGraphCreate(0))
        ok(cuda.cuGraphAddKernelNode(graph, None, 0, g.kernel(function, 1)))
        executables.append(ok(cuda.cuGraphInstantiate(graph, 0)))
        ok(cuda.cuGraphLaunch(executables[-1], g.stream))
    ok(cuda.cuModuleUnload(module))
    ok(cuda.cuLibraryUnload(library))
    for executable in executables:
        assert code(cuda.cuGraphLaunch(executable, g.stream)) == R.CUDA_ERROR_INVALID_HANDLE
    assert [report.kind for report in machine.reports] == ["module"] * 2
    assert "kernel add, whose module or library was unloaded" in machine.reports[0].message
    assert g.read() == 2
