# SPDX-License-Identifier: Apache-2.0
"""Memory that graphs allocate on the emulated driver: its address, its lifetime, and what a device reserves for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as T
from driver_helpers import R, code, ok, primary
from graph_helpers import BYTES, DEVICE, WORDS, Graphs, N, allocation, copy, fill

from drvfuse.emu import Machine
from drvfuse.emu.bindings import MAJOR

AS_MESSAGES = True

ATTRIBUTE = T.CUgraphMem_attribute
USED, USED_HIGH, RESERVED, RESERVED_HIGH = (
    getattr(ATTRIBUTE, f"CU_GRAPH_MEM_ATTR_{name}")
    for name in ("USED_MEM_CURRENT", "USED_MEM_HIGH", "RESERVED_MEM_CURRENT", "RESERVED_MEM_HIGH")
)


def _sizes(cuda: Any, device: int = 0) -> list[int]:
    names = (USED, USED_HIGH, RESERVED, RESERVED_HIGH)
    return [int(ok(cuda.cuDeviceGetGraphMemAttribute(device, name))) for name in names]


def _alloc(g: Graphs, nbytes: int = BYTES, *after: Any) -> tuple[Any, int]:
    """An allocation node, and its address."""
    p = allocation(nbytes)
    node = ok(g.cuda.cuGraphAddMemAllocNode(g.graph, list(after), len(after), p))
    return node, int(p.dptr)


def _use(g: Graphs, address: int, *after: Any) -> Any:
    """Add three nodes: fill the memory, add to it, and copy it to `g.words`. Returns the last node."""
    cuda, graph = g.cuda, g.graph
    filled = ok(cuda.cuGraphAddMemsetNode(graph, list(after), len(after), fill(address, 7, WORDS), g.context))
    added = g.launch(g.add, 1, filled, words=address)
    across = copy(g.words, DEVICE, address, DEVICE, BYTES)
    return ok(cuda.cuGraphAddMemcpyNode(graph, [added], 1, across, g.context))


def test_a_graph_can_free_the_memory_that_it_allocated(cuda: Any) -> None:
    g = Graphs(cuda)
    node, address = _alloc(g)
    last = _use(g, address, node)
    freed = ok(cuda.cuGraphAddMemFreeNode(g.graph, [last], 1, address))
    assert int(ok(cuda.cuGraphMemFreeNodeGetParams(freed))) == address
    back = ok(cuda.cuGraphMemAllocNodeGetParams(node))
    assert (back.bytesize, int(back.dptr), back.poolProps.location.id) == (BYTES, address, 0)
    assert [ok(cuda.cuGraphNodeGetType(n)) for n in (node, freed)] == [
        N.CU_GRAPH_NODE_TYPE_MEM_ALLOC,
        N.CU_GRAPH_NODE_TYPE_MEM_FREE,
    ]
    assert _sizes(cuda) == [0, 0, 0, 0]
    executable = g.instantiate()
    g.run(executable, times=3)
    assert g.read() == 8 and _sizes(cuda) == [BYTES] * 4
    free_before = ok(cuda.cuMemGetInfo())[0]
    ok(cuda.cuDeviceGraphMemTrim(0))
    assert _sizes(cuda) == [0, BYTES, 0, BYTES] and ok(cuda.cuMemGetInfo())[0] == free_before + BYTES
    ok(cuda.cuDeviceSetGraphMemAttribute(0, USED_HIGH, T.cuuint64_t(0)))
    assert _sizes(cuda) == [0, 0, 0, BYTES]
    g.run(executable)
    assert g.read() == 8
    for refused in (
        cuda.cuMemFree(address),
        cuda.cuMemFreeAsync(address, g.stream),
        cuda.cuDeviceSetGraphMemAttribute(0, USED, T.cuuint64_t(0)),
        cuda.cuDeviceSetGraphMemAttribute(0, USED_HIGH, T.cuuint64_t(1)),
    ):
        assert code(refused) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuGraphExecDestroy(executable))
    assert _sizes(cuda)[::2] == [0, BYTES]  # the memory stays reserved for other graphs


@pytest.mark.parametrize("how", ["cuMemFreeAsync", "cuMemFree", "graph", "launch"])
def test_graph_memory_may_outlive_its_launch(cuda: Any, how: str) -> None:
    g = Graphs(cuda)
    node, address = _alloc(g)
    ok(cuda.cuGraphAddMemsetNode(g.graph, [node], 1, fill(address, 5, WORDS), g.context))
    executable = ok(cuda.cuGraphInstantiate(g.graph, int(how == "launch")))
    ok(cuda.cuGraphLaunch(executable, g.stream))
    g.queue(g.add, 1, words=address)
    ok(cuda.cuStreamSynchronize(g.stream))
    assert g.read(address) == 6
    if how == "launch":  # the second launch frees the memory first
        g.run(executable)
        assert g.read(address) == 5
        ok(cuda.cuMemFree(address))
    else:
        assert code(cuda.cuGraphLaunch(executable, g.stream)) == R.CUDA_ERROR_INVALID_VALUE  # still allocated
        if how == "graph":
            graph = ok(cuda.cuGraphCreate(0))
            ok(cuda.cuGraphAddMemFreeNode(graph, None, 0, address))
            assert code(cuda.cuGraphAddMemFreeNode(g.graph, None, 0, address)) == R.CUDA_ERROR_INVALID_VALUE
            freeing = ok(cuda.cuGraphInstantiate(graph, 0))
            g.run(freeing)
            assert code(cuda.cuGraphLaunch(freeing, g.stream)) == R.CUDA_ERROR_INVALID_VALUE  # a second free
        else:
            ok(getattr(cuda, how)(address, *[g.stream] * (how == "cuMemFreeAsync")))
            ok(cuda.cuStreamSynchronize(g.stream))
    assert code(cuda.cuMemFreeAsync(address, g.stream)) == R.CUDA_ERROR_INVALID_VALUE
    g.run(executable)
    assert g.read(address) == 5
    ok(cuda.cuMemFree(address))


def test_graph_memory_is_accessible_only_between_allocation_and_free(cuda: Any) -> None:
    g = Graphs(cuda)
    node, address = _alloc(g)
    ok(cuda.cuGraphAddMemFreeNode(g.graph, [_use(g, address, node)], 1, address))
    g.run()
    g.queue(g.add, 1, words=address)
    assert code(cuda.cuStreamSynchronize(g.stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert cuda.process.machine.reports[-1].kind == "use_after_free"


def test_reused_graph_memory_counts_as_uninitialised(cuda: Any) -> None:
    g = Graphs(cuda)
    node, address = _alloc(g)
    used = _use(g, address, node)
    ok(cuda.cuGraphAddMemFreeNode(g.graph, [used], 1, address))
    executable = g.instantiate()
    g.run(executable)
    ok(cuda.cuGraphNodeSetEnabled(executable, T.CUgraphNode(g.nodes()[1]), 0))  # the fill is disabled
    ok(cuda.cuGraphLaunch(executable, g.stream))
    assert code(cuda.cuStreamSynchronize(g.stream)) != R.CUDA_SUCCESS
    assert cuda.process.machine.reports[-1].kind == "uninitialised"


def test_a_graph_with_memory_nodes_cannot_be_cloned_changed_or_instantiated_twice(cuda: Any) -> None:
    g = Graphs(cuda)
    empty = g.empty()
    node, address = _alloc(g, BYTES, empty)
    freed = ok(cuda.cuGraphAddMemFreeNode(g.graph, [node], 1, address))
    executable = g.instantiate()
    other = ok(cuda.cuGraphCreate(0))
    for refused in (
        cuda.cuGraphInstantiate(g.graph, 0),
        cuda.cuGraphClone(g.graph),
        cuda.cuGraphDestroyNode(empty),
        g.connect(empty, node, remove=True),
        cuda.cuGraphAddChildGraphNode(other, None, 0, g.graph),
        cuda.cuGraphAddMemFreeNode(g.graph, [freed], 1, address),
        cuda.cuGraphAddMemFreeNode(other, None, 0, address),
        cuda.cuGraphAddMemFreeNode(other, None, 0, address + 4),
        cuda.cuGraphAddMemFreeNode(other, None, 0, g.words),
        cuda.cuGraphAddMemAllocNode(g.graph, None, 0, allocation(0)),
        cuda.cuGraphNodeSetEnabled(executable, node, 0),
    ):
        assert code(refused) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuGraphAddMemAllocNode(g.graph, None, 0, allocation(1 << 50))) == R.CUDA_ERROR_OUT_OF_MEMORY
    update = T.CUgraphNodeParams()
    update.type = N.CU_GRAPH_NODE_TYPE_MEM_FREE
    assert code(cuda.cuGraphNodeSetParams(freed, update)) == R.CUDA_ERROR_NOT_SUPPORTED
    ok(cuda.cuGraphExecDestroy(executable))
    ok(cuda.cuGraphExecDestroy(g.instantiate()))


def test_a_graph_with_memory_nodes_can_be_moved_into_a_child_node(cuda: Any) -> None:
    g = Graphs(cuda)
    node, address = _alloc(g)
    ok(cuda.cuGraphAddMemFreeNode(g.graph, [_use(g, address, node)], 1, address))
    parent = ok(cuda.cuGraphCreate(0))
    p = T.CUgraphNodeParams()
    p.type, p.graph.graph = N.CU_GRAPH_NODE_TYPE_GRAPH, g.graph
    p.graph.ownership = T.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    add = cuda.cuGraphAddNode_v2 if MAJOR == 12 else cuda.cuGraphAddNode
    child = ok(add(parent, None, None, 0, p))
    g.launch(g.scale, 2, child, graph=parent)
    assert int(ok(cuda.cuGraphChildGraphNodeGetGraph(child))) == int(g.graph)
    for refused in (cuda.cuGraphInstantiate(g.graph, 0), cuda.cuGraphDestroy(g.graph)):
        assert code(refused) == R.CUDA_ERROR_INVALID_VALUE
    executable = ok(cuda.cuGraphInstantiate(parent, 0))
    assert code(cuda.cuGraphInstantiate(parent, 0)) == R.CUDA_ERROR_INVALID_VALUE
    g.run(executable, times=2)
    assert g.read() == 16
    ok(cuda.cuGraphDestroy(parent))
    assert code(cuda.cuGraphNodeGetType(node)) == R.CUDA_ERROR_INVALID_VALUE


def test_another_device_needs_access_to_graph_memory(cuda: Any) -> None:
    g, far = Graphs(cuda), Graphs(cuda, device=1)
    for granted in (False, True):
        primary(cuda, 0)
        g.graph = ok(cuda.cuGraphCreate(0))
        p = allocation(BYTES)
        if granted:
            access = T.CUmemAccessDesc()
            access.location.type, access.location.id = T.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
            access.flags = T.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            p.accessDescs, p.accessDescCount = [access], 1
        node = ok(cuda.cuGraphAddMemAllocNode(g.graph, None, 0, p))
        back = ok(cuda.cuGraphMemAllocNodeGetParams(node))
        assert back.accessDescCount == granted == len(back.accessDescs)
        filled = ok(cuda.cuGraphAddMemsetNode(g.graph, [node], 1, fill(p.dptr, 2, WORDS), g.context))
        ok(cuda.cuGraphAddKernelNode(g.graph, [filled], 1, far.kernel(far.add, 3, p.dptr)))
        ok(cuda.cuGraphLaunch(g.instantiate(), g.stream))
        if granted:
            ok(cuda.cuStreamSynchronize(g.stream))
            assert g.read(p.dptr) == 5
        else:
            ok(cuda.cuStreamSynchronize(g.stream))
            assert cuda.process.machine.reports[-1].kind == "no_access"
            primary(cuda, 1)
            ok(cuda.cuDevicePrimaryCtxReset(1))
            far = Graphs(cuda, device=1)


def test_destroyed_graphs_release_their_memory() -> None:
    with Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        g = Graphs(cuda)
        before = machine.held()
        node, address = _alloc(g)
        ok(cuda.cuGraphAddMemFreeNode(g.graph, [_use(g, address, node)], 1, address))
        executable = g.instantiate()
        ok(cuda.cuGraphLaunch(executable, g.stream))
        ok(cuda.cuGraphDestroy(g.graph))
        ok(cuda.cuGraphExecDestroy(executable))
        ok(cuda.cuStreamSynchronize(g.stream))
        assert g.read() == 8
        ok(cuda.cuDeviceGraphMemTrim(0))
        assert machine.held() == before


def test_a_free_that_is_not_ordered_after_a_use_is_found() -> None:
    with Machine(devices=1, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        g = Graphs(cuda)
        node, address = _alloc(g)
        filled = ok(cuda.cuGraphAddMemsetNode(g.graph, [node], 1, fill(address, 5, WORDS), g.context))
        g.launch(g.add, 1, filled, words=address)
        ok(cuda.cuGraphAddMemFreeNode(g.graph, [filled], 1, address))
        ok(cuda.cuGraphLaunch(g.instantiate(), g.stream))
        cuda.cuStreamSynchronize(g.stream)
        assert {report.kind for report in machine.reports} & {"race", "use_after_free"}


def test_captured_allocations_become_memory_nodes(cuda: Any) -> None:
    g = Graphs(cuda)
    ok(cuda.cuStreamBeginCapture(g.stream, T.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    address = ok(cuda.cuMemAllocAsync(BYTES, g.stream))
    ok(cuda.cuMemsetD32Async(address, 3, WORDS, g.stream))
    ok(cuda.cuMemcpyDtoDAsync(g.words, address, BYTES, g.stream))
    ok(cuda.cuMemFreeAsync(address, g.stream))
    g.graph = ok(cuda.cuStreamEndCapture(g.stream))
    kinds = [ok(cuda.cuGraphNodeGetType(T.CUgraphNode(node))) for node in g.nodes()]
    assert kinds[0] == N.CU_GRAPH_NODE_TYPE_MEM_ALLOC and kinds[-1] == N.CU_GRAPH_NODE_TYPE_MEM_FREE
    g.run(times=2)
    assert g.read() == 3
    out = np.zeros(WORDS, np.uint32)
    assert code(cuda.cuMemcpyDtoH(out, address, BYTES)) != R.CUDA_SUCCESS  # the graph has freed the memory
