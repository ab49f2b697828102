# SPDX-License-Identifier: Apache-2.0
"""Capture of streams into graphs and their replay on the emulated driver."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, function, ok, primary

from drvfuse.emu import Machine

MODE = types.CUstreamCaptureMode
STATUS = types.CUstreamCaptureStatus
NODE = types.CUgraphNodeType
GLOBAL, LOCAL, RELAXED = (
    MODE.CU_STREAM_CAPTURE_MODE_GLOBAL,
    MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    MODE.CU_STREAM_CAPTURE_MODE_RELAXED,
)

SOURCE = """
extern "C" __global__ void add(unsigned* p, unsigned value) { p[threadIdx.x] += value; }
extern "C" __global__ void scale(unsigned* p, unsigned value) { p[threadIdx.x] *= value; }
extern "C" __global__ void copy(unsigned* to, const unsigned* from) { to[threadIdx.x] = from[threadIdx.x]; }
extern "C" __global__ void wait_scale(unsigned* p, unsigned value) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  p[threadIdx.x] *= value;
}
"""


class Device:
    """A stream, kernels and 32 words on one device."""

    def __init__(self, cuda: Any, index: int, start: int = 0) -> None:
        self.cuda, self.context = cuda, primary(cuda, index)
        self.stream = ok(cuda.cuStreamCreate(1))
        self.words = ok(cuda.cuMemAlloc(128))
        ok(cuda.cuMemcpyHtoD(self.words, np.full(32, start, np.uint32), 128))
        self.kernels = {name: function(cuda, SOURCE, name) for name in ("add", "scale", "copy", "wait_scale")}

    def launch(self, name: str, value: int, stream: Any = None) -> Any:
        params = ((self.words, value), (None, ctypes.c_uint32))
        target = self.stream if stream is None else stream
        return self.cuda.cuLaunchKernel(self.kernels[name], 1, 1, 1, 32, 1, 1, 0, target, params, 0)

    def read(self) -> int:
        out = np.zeros(32, np.uint32)
        ok(self.cuda.cuCtxPushCurrent(self.context))
        ok(self.cuda.cuMemcpyDtoH(out, self.words, 128))
        ok(self.cuda.cuCtxPopCurrent())
        assert (out == out[0]).all()
        return int(out[0])


def _nodes(cuda: Any, graph: Any) -> list[Any]:
    _, count = ok(cuda.cuGraphGetNodes(graph))
    return ok(cuda.cuGraphGetNodes(graph, count))[0] if count else []


def _run(cuda: Any, graph: Any, stream: Any, times: int = 1) -> None:
    executable = ok(cuda.cuGraphInstantiate(graph, 0))
    for _ in range(times):
        ok(cuda.cuGraphLaunch(executable, stream))
    ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuGraphExecDestroy(executable))


def test_a_captured_stream_does_nothing_until_its_graph_runs(cuda: Any) -> None:
    d = Device(cuda, 0, start=1)
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    assert ok(cuda.cuStreamIsCapturing(d.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    ok(d.launch("add", 2))
    ok(d.launch("scale", 3))
    graph = ok(cuda.cuStreamEndCapture(d.stream))
    assert ok(cuda.cuStreamIsCapturing(d.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    assert d.read() == 1
    _run(cuda, graph, d.stream, times=3)
    assert d.read() == (((1 + 2) * 3 + 2) * 3 + 2) * 3
    ok(cuda.cuGraphDestroy(graph))
    assert code(cuda.cuGraphInstantiate(graph, 0)) == R.CUDA_ERROR_INVALID_VALUE


def test_every_kind_of_command_becomes_a_node(cuda: Any) -> None:
    d = Device(cuda, 0)
    pinned = ok(cuda.cuMemHostAlloc(128, 0))
    host = np.frombuffer((ctypes.c_uint32 * 32).from_address(pinned), np.uint32)
    seen: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(int(host[0])))
    event = ok(cuda.cuEventCreate(0))
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    ok(cuda.cuMemsetD32Async(d.words, 5, 32, d.stream))
    ok(d.launch("add", 1))
    ok(cuda.cuMemcpyDtoHAsync(pinned, d.words, 128, d.stream))
    ok(cuda.cuLaunchHostFunc(d.stream, ctypes.cast(callback, ctypes.c_void_p).value, 0))
    ok(cuda.cuEventRecordWithFlags(event, d.stream, 1))
    graph = ok(cuda.cuStreamEndCapture(d.stream))
    kinds = [ok(cuda.cuGraphNodeGetType(node)) for node in _nodes(cuda, graph)]
    assert kinds == [
        NODE.CU_GRAPH_NODE_TYPE_MEMSET,
        NODE.CU_GRAPH_NODE_TYPE_KERNEL,
        NODE.CU_GRAPH_NODE_TYPE_MEMCPY,
        NODE.CU_GRAPH_NODE_TYPE_HOST,
        NODE.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    ]
    _run(cuda, graph, d.stream, times=2)
    ok(cuda.cuEventSynchronize(event))
    assert seen == [6, 6]


def test_streams_of_other_devices_join_by_events(cuda: Any) -> None:
    a, b = Device(cuda, 0, start=1), Device(cuda, 1, start=10)
    ok(cuda.cuCtxSetCurrent(a.context))
    fork = ok(cuda.cuEventCreate(2))
    ok(cuda.cuCtxSetCurrent(b.context))
    join = ok(cuda.cuEventCreate(2))
    ok(cuda.cuStreamBeginCapture(a.stream, GLOBAL))
    ok(a.launch("add", 1))
    ok(cuda.cuEventRecord(fork, a.stream))
    ok(cuda.cuStreamWaitEvent(b.stream, fork, 0))
    assert ok(cuda.cuStreamIsCapturing(b.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    ok(b.launch("add", 5))
    ok(cuda.cuMemcpyDtoDAsync(b.words, a.words, 128, b.stream))
    ok(cuda.cuEventRecord(join, b.stream))
    ok(a.launch("scale", 1))
    ok(cuda.cuStreamWaitEvent(a.stream, join, 0))
    ok(a.launch("scale", 7))
    graph = ok(cuda.cuStreamEndCapture(a.stream))
    assert ok(cuda.cuStreamIsCapturing(b.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    edges = ok(getattr(cuda, "cuGraphGetEdges_v2", cuda.cuGraphGetEdges)(graph))[-1]
    assert (len(_nodes(cuda, graph)), edges) == (5, 5)
    _run(cuda, graph, a.stream, times=2)
    assert a.read() == ((1 + 1) * 7 + 1) * 7
    assert b.read() == (1 + 1) * 7 + 1


def test_a_copy_between_contexts_invalidates_a_capture_and_one_without_access_does_not(cuda: Any) -> None:
    a, b = Device(cuda, 0), Device(cuda, 1)
    theirs = ok(cuda.cuMemAllocAsync(64, b.stream))  # from a pool that device 0 may not access
    ok(cuda.cuCtxSetCurrent(a.context))
    ok(cuda.cuStreamBeginCapture(a.stream, GLOBAL))
    assert code(cuda.cuMemcpyDtoDAsync(a.words, theirs, 64, a.stream)) == R.CUDA_ERROR_INVALID_VALUE
    assert ok(cuda.cuStreamIsCapturing(a.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    refused = cuda.cuMemcpyPeerAsync(a.words, a.context, theirs, b.context, 64, a.stream)
    assert code(refused) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert ok(cuda.cuStreamIsCapturing(a.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert code(cuda.cuStreamEndCapture(a.stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_an_empty_capture_is_an_empty_graph(cuda: Any) -> None:
    d = Device(cuda, 0)
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    graph = ok(cuda.cuStreamEndCapture(d.stream))
    assert _nodes(cuda, graph) == []
    _run(cuda, graph, d.stream)


def test_a_graph_takes_its_place_in_the_order_of_its_stream(cuda: Any) -> None:
    d = Device(cuda, 0, start=1)
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    ok(d.launch("scale", 10))
    executable = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(d.stream)), 0))
    ok(d.launch("add", 1))
    ok(cuda.cuGraphLaunch(executable, d.stream))
    ok(d.launch("add", 3))
    ok(cuda.cuStreamSynchronize(d.stream))
    assert d.read() == 23


def test_a_capture_with_unjoined_streams_is_refused(cuda: Any) -> None:
    a = Device(cuda, 0)
    other = ok(cuda.cuStreamCreate(1))
    event = ok(cuda.cuEventCreate(2))
    ok(cuda.cuStreamBeginCapture(a.stream, GLOBAL))
    ok(cuda.cuEventRecord(event, a.stream))
    ok(cuda.cuStreamWaitEvent(other, event, 0))
    ok(a.launch("add", 1, other))
    assert code(cuda.cuStreamEndCapture(a.stream)) == R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    ok(cuda.cuStreamSynchronize(a.stream))
    ok(cuda.cuStreamSynchronize(other))
    assert a.read() == 0


@pytest.mark.parametrize("mode", [GLOBAL, LOCAL, RELAXED])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("synchronize", R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ("query", R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ("context", R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ("event", R.CUDA_ERROR_CAPTURED_EVENT),
        ("isolation", R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
        ("free", R.CUDA_ERROR_INVALID_VALUE),
    ],
)
def test_unsupported_calls_invalidate_a_capture(cuda: Any, mode: Any, name: str, expected: Any) -> None:
    d = Device(cuda, 0)
    outside, inside = ok(cuda.cuEventCreate(2)), ok(cuda.cuEventCreate(2))
    pooled = ok(cuda.cuMemAllocAsync(16, d.stream))
    ok(cuda.cuEventRecord(outside, ok(cuda.cuStreamCreate(1))))
    ok(cuda.cuStreamBeginCapture(d.stream, mode))
    ok(d.launch("add", 1))
    ok(cuda.cuEventRecord(inside, d.stream))
    ok(cuda.cuThreadExchangeStreamCaptureMode(RELAXED))
    calls = {
        "synchronize": lambda: cuda.cuStreamSynchronize(d.stream),
        "query": lambda: cuda.cuStreamQuery(d.stream),
        "context": lambda: cuda.cuCtxSynchronize(),
        "event": lambda: cuda.cuEventSynchronize(inside),
        "isolation": lambda: cuda.cuStreamWaitEvent(d.stream, outside, 0),
        "free": lambda: cuda.cuMemFreeAsync(pooled, d.stream),  # this allocation does not belong to a graph
    }
    assert code(calls[name]()) == expected
    assert ok(cuda.cuStreamIsCapturing(d.stream)) == STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert code(d.launch("add", 1)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert code(cuda.cuStreamEndCapture(d.stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    ok(cuda.cuStreamSynchronize(d.stream))
    assert d.read() == 0


def test_an_allocation_invalidates_a_global_capture_and_not_a_relaxed_one(cuda: Any) -> None:
    d = Device(cuda, 0)
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    assert code(cuda.cuMemAlloc(16)) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert code(cuda.cuStreamEndCapture(d.stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    ok(cuda.cuStreamBeginCapture(d.stream, RELAXED))
    ok(cuda.cuMemAlloc(16))
    ok(cuda.cuStreamEndCapture(d.stream))
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    assert ok(cuda.cuThreadExchangeStreamCaptureMode(RELAXED)) == GLOBAL
    ok(cuda.cuMemAlloc(16))
    assert ok(cuda.cuThreadExchangeStreamCaptureMode(GLOBAL)) == RELAXED
    ok(cuda.cuStreamEndCapture(d.stream))


def test_only_a_global_capture_restricts_other_threads(cuda: Any) -> None:
    d = Device(cuda, 0)

    def elsewhere() -> Any:
        seen: list[Any] = []

        def work() -> None:
            ok(cuda.cuCtxSetCurrent(d.context))
            seen.append(code(cuda.cuMemAlloc(16)))
            seen.append(code(cuda.cuStreamEndCapture(d.stream)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return seen

    ok(cuda.cuStreamBeginCapture(d.stream, LOCAL))
    assert elsewhere() == [R.CUDA_SUCCESS, R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD]
    ok(cuda.cuStreamEndCapture(d.stream))
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    assert elsewhere() == [R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD]
    assert code(cuda.cuStreamEndCapture(d.stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_the_legacy_stream_cannot_be_captured(cuda: Any) -> None:
    d = Device(cuda, 0)
    assert code(cuda.cuStreamBeginCapture(0, GLOBAL)) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    blocking = ok(cuda.cuStreamCreate(0))
    ok(cuda.cuStreamBeginCapture(blocking, RELAXED))
    assert code(d.launch("add", 1, 0)) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert code(cuda.cuStreamEndCapture(blocking)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    ok(cuda.cuStreamBeginCapture(d.stream, RELAXED))
    ok(d.launch("add", 1, 0))
    ok(cuda.cuStreamEndCapture(d.stream))
    assert d.read() == 1


def test_joining_two_captures_is_refused(cuda: Any) -> None:
    a, b = Device(cuda, 0), Device(cuda, 1)
    event = ok(cuda.cuEventCreate(2))
    ok(cuda.cuStreamBeginCapture(a.stream, GLOBAL))
    ok(cuda.cuStreamBeginCapture(b.stream, GLOBAL))
    ok(cuda.cuEventRecord(event, b.stream))
    assert code(cuda.cuStreamWaitEvent(a.stream, event, 0)) == R.CUDA_ERROR_STREAM_CAPTURE_MERGE
    for stream in (a.stream, b.stream):
        assert code(cuda.cuStreamEndCapture(stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_a_capture_must_end_on_the_stream_where_it_began(cuda: Any) -> None:
    a = Device(cuda, 0)
    other, event = ok(cuda.cuStreamCreate(1)), ok(cuda.cuEventCreate(2))
    assert code(cuda.cuStreamEndCapture(a.stream)) == R.CUDA_ERROR_ILLEGAL_STATE
    ok(cuda.cuStreamBeginCapture(a.stream, GLOBAL))
    ok(cuda.cuEventRecord(event, a.stream))
    ok(cuda.cuStreamWaitEvent(other, event, 0))
    assert code(cuda.cuStreamEndCapture(other)) == R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    assert code(cuda.cuStreamEndCapture(a.stream)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_capture_information_has_the_graph_and_its_last_nodes(cuda: Any) -> None:
    d = Device(cuda, 0)
    info = getattr(cuda, "cuStreamGetCaptureInfo_v3", cuda.cuStreamGetCaptureInfo)
    assert ok(info(d.stream))[0] == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    ok(d.launch("add", 1))
    status, number, graph, tail, data, count = ok(info(d.stream))
    assert status == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert int(number) > 0 and count == len(tail) == len(data) == 1
    assert int(ok(cuda.cuStreamEndCapture(d.stream))) == int(graph)
    assert int(_nodes(cuda, graph)[0]) == int(tail[0])


@pytest.mark.parametrize("seed", range(4))
def test_captured_programmatic_launches_stay_programmatic(seed: int) -> None:
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        d = Device(cuda, 0, start=1)
        attribute = types.CUlaunchAttribute()
        attribute.id = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = types.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.hStream = 32, d.stream
        config.attrs, config.numAttrs = [attribute], 1
        ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
        ok(d.launch("add", 1))
        ok(cuda.cuLaunchKernelEx(config, d.kernels["wait_scale"], ((d.words, 5), (None, ctypes.c_uint32)), 0))
        ok(d.launch("add", 1))
        graph = ok(cuda.cuStreamEndCapture(d.stream))
        edges = getattr(cuda, "cuGraphGetEdges_v2", cuda.cuGraphGetEdges)
        _, _, data, count = ok(edges(graph, ok(edges(graph))[-1]))
        programmatic = types.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        assert count == 2
        assert [item.type == int(programmatic) for item in data] == [True, False]
        _run(cuda, graph, d.stream, times=2)
        assert d.read() == ((1 + 1) * 5 + 1 + 1) * 5 + 1


def test_runs_of_one_graph_do_not_overlap_on_two_streams(cuda: Any) -> None:
    d = Device(cuda, 0)
    other = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    ok(d.launch("scale", 2))
    ok(d.launch("add", 1))
    executable = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(d.stream)), 0))
    for stream in (d.stream, other, d.stream, other):
        ok(cuda.cuGraphLaunch(executable, stream))
    ok(cuda.cuCtxSynchronize())
    assert d.read() == 15


def test_a_fault_in_a_graph_leaves_its_context_in_error(machine: Machine, cuda: Any) -> None:
    d = Device(cuda, 1)
    ok(cuda.cuStreamBeginCapture(d.stream, GLOBAL))
    ok(
        cuda.cuLaunchKernel(
            d.kernels["add"], 1, 1, 1, 64, 1, 1, 0, d.stream, ((d.words, 1), (None, ctypes.c_uint32)), 0
        )
    )
    executable = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(d.stream)), 0))
    ok(cuda.cuGraphLaunch(executable, d.stream))
    assert code(cuda.cuStreamSynchronize(d.stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].device == 1
