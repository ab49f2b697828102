# SPDX-License-Identifier: Apache-2.0
"""Kinds of graph nodes on the emulated driver: what they do, their parameters and attributes, what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as T
from driver_helpers import R, code, ok, primary
from graph_helpers import BYTES, DEVICE, HOST, WORDS, Graphs, N, copy, fill

from drvfuse.emu import Machine
from drvfuse.emu.bindings import MAJOR

AS_MESSAGES = True


def _any(cuda: Any, graph: Any, p: Any, *after: Any) -> Any:
    """Add a node with parameters `p` after the nodes `after` by cuGraphAddNode, with default edges."""
    if MAJOR == 12:
        return cuda.cuGraphAddNode(graph, list(after), len(after), p)
    return cuda.cuGraphAddNode(graph, list(after), [T.CUgraphEdgeData() for _ in after], len(after), p)


def test_parameters_of_a_kernel_node_can_be_read_back(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    node = g.launch(g.add, 41)
    p = ok(cuda.cuGraphKernelNodeGetParams(node))
    assert int(p.func) == int(g.add) and (p.gridDimX, p.blockDimX, p.sharedMemBytes) == (1, WORDS, 0)
    pointers = (ctypes.c_void_p * 2).from_address(int(p.kernelParams))
    assert ctypes.c_uint64.from_address(pointers[0] or 0).value == int(g.words)
    assert ctypes.c_uint32.from_address(pointers[1] or 0).value == 41
    ok(cuda.cuGraphAddKernelNode(g.graph, [node], 1, p))  # the returned parameters can be used again
    changed = g.kernel(g.scale, 2)
    changed.blockDimX = WORDS
    ok(cuda.cuGraphKernelNodeSetParams(node, changed))
    g.run()
    assert g.read() == 1 * 2 + 41


def test_a_kernel_node_accepts_a_parameter_buffer_and_a_library_kernel(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    block = (ctypes.c_uint64 * 2)(int(g.words), 9)
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(size), 0)
    p = g.kernel(g.add, 0)
    p.extra = ctypes.addressof(extra)
    # kernelParams and extra exclude each other
    assert code(cuda.cuGraphAddKernelNode(g.graph, None, 0, p)) == R.CUDA_ERROR_INVALID_VALUE
    p.kernelParams = 0
    first = ok(cuda.cuGraphAddKernelNode(g.graph, None, 0, p))
    from graph_helpers import PTX

    library = ok(cuda.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    p = g.kernel(T.CUfunction(0), 4)
    p.kern, p.ctx = ok(cuda.cuLibraryGetKernel(library, b"scale")), g.context
    ok(cuda.cuGraphAddKernelNode(g.graph, [first], 1, p))
    g.run()
    assert g.read() == 40


def test_wrong_kernel_nodes_are_refused(cuda: Any) -> None:
    g = Graphs(cuda)
    node, empty = g.launch(g.add, 1), g.empty()
    for change in ({"func": T.CUfunction(0)}, {"blockDimX": 2000}, {"gridDimY": 0}, {"kernelParams": 0}):
        p = g.kernel(g.add, 1)
        for name, value in change.items():
            setattr(p, name, value)
        assert code(cuda.cuGraphAddKernelNode(g.graph, None, 0, p)) == R.CUDA_ERROR_INVALID_VALUE
        assert code(cuda.cuGraphKernelNodeSetParams(node, p)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuGraphAddKernelNode(g.graph, None, 0, None)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuGraphKernelNodeGetParams(empty)) == R.CUDA_ERROR_INVALID_VALUE
    assert len(g.nodes()) == 2


def test_attributes_of_a_kernel_node_can_be_set_read_and_copied(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    ids = T.CUkernelNodeAttrID
    node, other = g.launch(g.add, 1), g.launch(g.add, 1)
    for name, field, value in (("COOPERATIVE", "cooperative", 1), ("PRIORITY", "priority", -3)):
        given = T.CUkernelNodeAttrValue()
        setattr(given, field, value)
        attribute = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}")
        assert getattr(ok(cuda.cuGraphKernelNodeGetAttribute(node, attribute)), field) == 0
        ok(cuda.cuGraphKernelNodeSetAttribute(node, attribute, given))
        assert getattr(ok(cuda.cuGraphKernelNodeGetAttribute(node, attribute)), field) == value
    hint = T.CUkernelNodeAttrValue()
    hint.syncPolicy = T.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
    ok(cuda.cuGraphKernelNodeSetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, hint))
    ok(cuda.cuGraphKernelNodeCopyAttributes(other, node))
    policy = ok(cuda.cuGraphKernelNodeGetAttribute(other, ids.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY))
    assert policy.syncPolicy == T.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
    p = g.kernel(g.add, 5)
    p.gridDimX = 2**20
    refused = cuda.cuGraphKernelNodeSetParams(other, p)  # the node is still cooperative
    assert code(refused) == R.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    cluster = T.CUkernelNodeAttrValue()
    cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z = 3, 1, 1
    refused = cuda.cuGraphKernelNodeSetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE  # the grid is not a multiple of the cluster
    assert code(cuda.cuGraphKernelNodeCopyAttributes(g.empty(), node)) == R.CUDA_ERROR_INVALID_VALUE
    g.run()
    assert g.read() == 3


def test_pageable_memory_is_copied_when_the_graph_runs(cuda: Any, rng: np.random.Generator) -> None:
    g = Graphs(cuda)
    source, result = np.zeros(WORDS, np.uint32), np.zeros(WORDS, np.uint32)
    up = copy(g.words, DEVICE, source, HOST, BYTES)
    down = copy(result, HOST, g.words, DEVICE, BYTES)
    first = ok(cuda.cuGraphAddMemcpyNode(g.graph, None, 0, up, g.context))
    middle = g.launch(g.add, 3, first)
    last = ok(cuda.cuGraphAddMemcpyNode(g.graph, [middle], 1, down, g.context))
    executable = g.instantiate()
    for _ in range(2):
        source[:] = rng.integers(0, 2**32, WORDS, np.uint32)
        g.run(executable)
        assert (result == source + np.uint32(3)).all()
    back = ok(cuda.cuGraphMemcpyNodeGetParams(last))
    assert int(back.srcDevice) == int(g.words) and int(back.dstHost) == result.ctypes.data
    assert (back.WidthInBytes, back.Height, back.Depth) == (BYTES, 1, 1)
    other = np.zeros(WORDS, np.uint32)
    ok(cuda.cuGraphMemcpyNodeSetParams(last, copy(other, HOST, g.words, DEVICE, BYTES)))
    g.run()
    assert (other == source + np.uint32(3)).all()


def test_a_node_can_copy_layers_of_rows(cuda: Any, rng: np.random.Generator) -> None:
    g = Graphs(cuda)
    volume = rng.integers(0, 256, (4, 5, 64), np.uint8)
    at = ok(cuda.cuMemAlloc(volume.nbytes))
    ok(cuda.cuMemcpyHtoD(at, volume, volume.nbytes))
    out = np.zeros((3, 4, 32), np.uint8)
    p = T.CUDA_MEMCPY3D()
    p.srcMemoryType, p.srcDevice, p.srcPitch, p.srcHeight = DEVICE, at, 64, 5
    p.srcXInBytes, p.srcY, p.srcZ = 16, 2, 1
    p.dstMemoryType, p.dstHost, p.dstPitch, p.dstHeight, p.dstZ = HOST, out, 32, 4, 1
    p.WidthInBytes, p.Height, p.Depth = 24, 3, 2
    node = ok(cuda.cuGraphAddMemcpyNode(g.graph, None, 0, p, g.context))
    g.run()
    expected = np.zeros_like(out)
    expected[1:, :3, :24] = volume[1:3, 2:5, 16:40]
    assert (out == expected).all()
    back = ok(cuda.cuGraphMemcpyNodeGetParams(node))
    for name in ("srcXInBytes", "srcY", "srcZ", "srcPitch", "srcHeight", "dstZ", "dstPitch", "Depth"):
        assert getattr(back, name) == getattr(p, name)
    p.srcHeight = 4  # less than srcY + Height
    assert code(cuda.cuGraphMemcpyNodeSetParams(node, p)) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize(("size", "value"), [(1, 0xAB), (2, 0xABCD), (4, 0x89ABCDEF)])
def test_a_node_can_fill_rows(cuda: Any, size: int, value: int) -> None:
    g = Graphs(cuda)
    p = fill(g.words, value, 6, size, height=3, pitch=32)
    node = ok(cuda.cuGraphAddMemsetNode(g.graph, None, 0, p, g.context))
    back = ok(cuda.cuGraphMemsetNodeGetParams(node))
    fields = ("value", "width", "elementSize", "height", "pitch")
    assert [getattr(back, f) for f in fields] == [getattr(p, f) for f in fields] and int(back.dst) == int(g.words)
    g.run()
    out, expected = np.zeros(BYTES, np.uint8), np.zeros((4, 32), np.uint8)
    ok(cuda.cuMemcpyDtoH(out, g.words, BYTES))
    expected[:3, : 6 * size] = np.full(6, value, f"<u{size}").view(np.uint8)
    assert (out == expected.ravel()).all()
    for wrong in ({"elementSize": 3}, {"width": 0}, {"pitch": 5}, {"dst": 7}, {"height": 99}):
        q = fill(g.words, value, 6, size, height=3, pitch=32)
        for name, other in wrong.items():
            setattr(q, name, other)
        assert code(cuda.cuGraphMemsetNodeSetParams(node, q)) == R.CUDA_ERROR_INVALID_VALUE


def test_host_functions_run_in_the_order_of_the_graph(cuda: Any) -> None:
    g = Graphs(cuda, start=2)
    seen: list[tuple[int, int]] = []
    pinned = ok(cuda.cuMemHostAlloc(BYTES, 0))
    view = (ctypes.c_uint32 * WORDS).from_address(pinned)
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append((int(data or 0), view[0])))
    p = T.CUDA_HOST_NODE_PARAMS()
    p.fn, p.userData = T.CUhostFn(ctypes.cast(note, ctypes.c_void_p).value), 77
    down = ok(cuda.cuGraphAddMemcpyNode(g.graph, None, 0, copy(pinned, HOST, g.words, DEVICE, BYTES), g.context))
    node = ok(cuda.cuGraphAddHostNode(g.graph, [down], 1, p))
    g.launch(g.scale, 10, node)
    g.run(times=2)
    assert seen == [(77, 2), (77, 20)]
    back = ok(cuda.cuGraphHostNodeGetParams(node))
    assert int(back.fn) == int(p.fn) and int(back.userData) == 77
    p.userData = 78
    ok(cuda.cuGraphHostNodeSetParams(node, p))
    g.run()
    assert seen[-1] == (78, 200)
    assert code(cuda.cuGraphAddHostNode(g.graph, None, 0, T.CUDA_HOST_NODE_PARAMS())) == R.CUDA_ERROR_INVALID_VALUE


def test_event_nodes_order_a_graph_and_streams(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    before, after, unused = (ok(cuda.cuEventCreate(0)) for _ in range(3))
    wait = ok(cuda.cuGraphAddEventWaitNode(g.graph, None, 0, before))
    kernel = g.launch(g.scale, 10, wait)
    record = ok(cuda.cuGraphAddEventRecordNode(g.graph, [kernel], 1, after))
    assert int(ok(cuda.cuGraphEventWaitNodeGetEvent(wait))) == int(before)
    assert int(ok(cuda.cuGraphEventRecordNodeGetEvent(record))) == int(after)
    other = ok(cuda.cuStreamCreate(1))
    g.queue(g.add, 1, other)
    ok(cuda.cuEventRecord(before, other))
    ok(cuda.cuGraphLaunch(g.instantiate(), g.stream))
    ok(cuda.cuStreamWaitEvent(other, after, 0))  # `after` is recorded by the call that launched the graph
    g.queue(g.add, 1, other)
    ok(cuda.cuStreamSynchronize(other))
    assert g.read() == (1 + 1) * 10 + 1
    ok(cuda.cuGraphEventWaitNodeSetEvent(wait, unused))
    ok(cuda.cuGraphEventRecordNodeSetEvent(record, unused))
    assert int(ok(cuda.cuGraphEventRecordNodeGetEvent(record))) == int(unused)
    assert code(cuda.cuGraphEventRecordNodeGetEvent(wait)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuGraphAddEventWaitNode(g.graph, None, 0, T.CUevent(0))) == R.CUDA_ERROR_INVALID_VALUE


def _operation(kind: str, address: Any, value: int) -> Any:
    p = T.CUstreamBatchMemOpParams()
    p.operation = getattr(T.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
    member = p.waitValue if kind == "WAIT" else p.writeValue
    member.address, member.value = address, T.cuuint32_t(value)
    if kind == "WAIT":
        member.flags = 1  # wait until the values are equal (EQ)
    return p


def test_memory_operation_nodes_wait_and_write(cuda: Any) -> None:
    g = Graphs(cuda, start=0)
    flag = ok(cuda.cuMemAlloc(8))
    ok(cuda.cuMemsetD32(flag, 0, 2))
    p = T.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    p.ctx, p.count = g.context, 2
    p.paramArray = [_operation("WAIT", flag, 5), _operation("WRITE", int(flag) + 4, 6)]
    node = ok(cuda.cuGraphAddBatchMemOpNode(g.graph, None, 0, p))
    g.launch(g.add, 1, node)
    ok(cuda.cuGraphLaunch(g.instantiate(), g.stream))
    assert code(cuda.cuStreamQuery(g.stream)) == R.CUDA_ERROR_NOT_READY
    other = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamWriteValue32(other, flag, 5, 0))
    ok(cuda.cuStreamSynchronize(g.stream))
    out = np.zeros(2, np.uint32)
    ok(cuda.cuMemcpyDtoH(out, flag, 8))
    assert (g.read(), list(out)) == (1, [5, 6])
    back = ok(cuda.cuGraphBatchMemOpNodeGetParams(node))
    assert back.count == 2 and int(back.paramArray[1].writeValue.value) == 6 and int(back.ctx) == int(g.context)
    p.paramArray = [_operation("WAIT", flag, 5), _operation("WRITE", int(flag) + 4, 60)]
    ok(cuda.cuGraphBatchMemOpNodeSetParams(node, p))
    g.run()
    ok(cuda.cuMemcpyDtoH(out, flag, 8))
    assert list(out) == [5, 60]
    p.count = 0
    assert code(cuda.cuGraphBatchMemOpNodeSetParams(node, p)) == R.CUDA_ERROR_INVALID_VALUE


def test_every_kind_of_node_can_be_added_by_one_structure(cuda: Any) -> None:
    """The calls of test_graph_poly, a test of cuda-python, and the kinds of nodes that are missing there."""
    g = Graphs(cuda, start=2)
    result = np.zeros(WORDS, np.uint32)
    set_ = T.CUgraphNodeParams()
    set_.type = N.CU_GRAPH_NODE_TYPE_MEMSET
    set_.memset.elementSize, set_.memset.width, set_.memset.height = 4, WORDS, 1
    set_.memset.dst, set_.memset.value = g.words, 7
    launch = T.CUgraphNodeParams()
    launch.type = N.CU_GRAPH_NODE_TYPE_KERNEL
    source = g.kernel(g.add, 5)
    for name in ("func", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "kernelParams"):
        setattr(launch.kernel, name, getattr(source, name))
    down = T.CUgraphNodeParams()
    down.type = N.CU_GRAPH_NODE_TYPE_MEMCPY
    down.memcpy.copyParams = copy(result, HOST, g.words, DEVICE, BYTES)
    nothing = T.CUgraphNodeParams()
    nothing.type = N.CU_GRAPH_NODE_TYPE_EMPTY
    nodes: list[Any] = []
    for p in (set_, launch, nothing, down):
        nodes.append(ok(_any(cuda, g.graph, p, *nodes[-1:])))
    executable = g.instantiate()
    g.run(executable)
    assert (result == 12).all()
    assert [ok(cuda.cuGraphNodeGetType(node)) for node in nodes] == [p.type for p in (set_, launch, nothing, down)]
    set_.memset.value = 11
    ok(cuda.cuGraphExecNodeSetParams(executable, nodes[0], set_))
    g.run(executable)
    assert (result == 16).all() and ok(cuda.cuGraphMemsetNodeGetParams(nodes[0])).value == 7
    ok(cuda.cuGraphNodeSetParams(nodes[0], set_))
    assert ok(cuda.cuGraphMemsetNodeGetParams(nodes[0])).value == 11
    assert code(cuda.cuGraphNodeSetParams(nodes[1], set_)) == R.CUDA_ERROR_INVALID_VALUE  # the node is of another kind
    child = T.CUgraphNodeParams()
    child.type, child.graph.graph = N.CU_GRAPH_NODE_TYPE_GRAPH, ok(cuda.cuGraphClone(g.graph))
    ok(_any(cuda, g.graph, child, nodes[-1]))
    for kind in (N.CU_GRAPH_NODE_TYPE_CONDITIONAL, N.CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT):
        refused = T.CUgraphNodeParams()
        refused.type = kind
        for _ in range(2):
            assert code(_any(cuda, g.graph, refused)) == R.CUDA_ERROR_NOT_SUPPORTED
        assert [kind.name in r.message for r in cuda.process.machine.reports].count(True) == 1
    assert code(_any(cuda, g.graph, None)) == R.CUDA_ERROR_INVALID_VALUE
    if hasattr(T, "cuGraphNodeGetParams"):
        assert int(ok(cuda.cuGraphNodeGetParams(nodes[0])).memset.dst) == int(g.words)
        assert ok(cuda.cuGraphNodeGetParams(nodes[1])).kernel.blockDimX == WORDS


@pytest.mark.parametrize("edge", [False, True])
def test_edges_order_accesses_for_the_race_detector(edge: bool) -> None:
    with Machine(devices=1, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        g = Graphs(cuda, start=1)
        a, b = g.launch(g.add, 1), g.launch(g.add, 1)
        p = fill(g.words, 0, WORDS)
        c = ok(cuda.cuGraphAddMemsetNode(g.graph, None, 0, p, g.context))
        if edge:
            ok(g.connect(c, a))
            ok(g.connect(a, b))
        g.run()
        assert {r.kind for r in machine.reports} == (set() if edge else {"race"})
        assert len(machine.launches) == 2


def test_nodes_may_be_on_two_devices(cuda: Any) -> None:
    g = Graphs(cuda, start=5)
    other = Graphs(cuda, start=1, device=1)
    primary(cuda, 0)
    first = g.launch(g.add, 2)
    across = copy(other.words, DEVICE, g.words, DEVICE, BYTES)
    moved = ok(cuda.cuGraphAddMemcpyNode(g.graph, [first], 1, across, g.context))
    ok(cuda.cuGraphAddKernelNode(g.graph, [moved], 1, other.kernel(other.scale, 3)))
    g.run()
    primary(cuda, 1)
    assert other.read() == 21
