# SPDX-License-Identifier: Apache-2.0
"""Capture into an existing graph, and capture of copies of pageable memory, graph launches and external events."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver as T
from driver_helpers import R, code, ok
from graph_helpers import BYTES, WORDS, Graphs, N

AS_MESSAGES = True

MODE = T.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
EXTERNAL = 1


def test_a_capture_can_add_nodes_to_an_existing_graph(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    first, aside = g.launch(g.add, 1), g.empty()
    ok(cuda.cuStreamBeginCaptureToGraph(g.stream, g.graph, [first], None, 1, MODE))
    again = ok(cuda.cuStreamCreate(1))
    refused = cuda.cuStreamBeginCaptureToGraph(again, g.graph, None, None, 0, MODE)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE  # `g.stream` already captures into this graph
    g.queue(g.scale, 10)
    g.queue(g.add, 3)
    assert int(ok(cuda.cuStreamEndCapture(g.stream))) == int(g.graph)
    nodes = g.nodes()
    assert g.edges() == {(int(first), nodes[2]), (nodes[2], nodes[3])} and nodes[1] == int(aside)
    g.launch(g.scale, 2, T.CUgraphNode(nodes[3]))
    g.run()
    assert g.read() == ((1 + 1) * 10 + 3) * 2
    other = ok(cuda.cuGraphAddEmptyNode(ok(cuda.cuGraphCreate(0)), None, 0))
    refused = cuda.cuStreamBeginCaptureToGraph(g.stream, g.graph, [other], None, 1, MODE)
    assert code(refused) == R.CUDA_ERROR_INVALID_VALUE


def test_captured_copies_of_pageable_memory_happen_when_the_graph_runs(cuda: Any, rng: np.random.Generator) -> None:
    g = Graphs(cuda)
    source, result = np.zeros(WORDS, np.uint32), np.zeros(WORDS, np.uint32)
    ok(cuda.cuStreamBeginCapture(g.stream, MODE))
    ok(cuda.cuMemcpyHtoDAsync(g.words, source, BYTES, g.stream))
    g.queue(g.add, 5)
    ok(cuda.cuMemcpyDtoHAsync(result, g.words, BYTES, g.stream))
    executable = g.instantiate(ok(cuda.cuStreamEndCapture(g.stream)))
    for _ in range(2):
        source[:] = rng.integers(0, 2**32, WORDS, np.uint32)
        g.run(executable)
        assert (result == source + np.uint32(5)).all()


def test_a_graph_that_is_launched_in_a_capture_becomes_a_child_graph(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    node = g.launch(g.add, 1)
    g.launch(g.scale, 3, node)
    executable = g.instantiate()
    ok(cuda.cuStreamBeginCapture(g.stream, MODE))
    g.queue(g.add, 10)
    ok(cuda.cuGraphLaunch(executable, g.stream))
    g.queue(g.add, 100)
    captured = ok(cuda.cuStreamEndCapture(g.stream))
    kinds = [ok(cuda.cuGraphNodeGetType(T.CUgraphNode(n))) for n in g.nodes(captured)]
    assert kinds == [N.CU_GRAPH_NODE_TYPE_KERNEL, N.CU_GRAPH_NODE_TYPE_GRAPH, N.CU_GRAPH_NODE_TYPE_KERNEL]
    ok(cuda.cuGraphExecKernelNodeSetParams(executable, node, g.kernel(g.add, 50)))  # must not change `captured`
    g.run(g.instantiate(captured))
    assert g.read() == (1 + 10 + 1) * 3 + 100


def test_stream_memory_operations_become_nodes(cuda: Any) -> None:
    g = Graphs(cuda)
    ok(cuda.cuStreamBeginCapture(g.stream, MODE))
    ok(cuda.cuStreamWriteValue32(g.stream, g.words, 9, 0))
    ok(cuda.cuStreamWaitValue32(g.stream, g.words, 9, 1))
    graph = ok(cuda.cuStreamEndCapture(g.stream))
    write, wait = (ok(cuda.cuGraphBatchMemOpNodeGetParams(T.CUgraphNode(n))) for n in g.nodes(graph))
    assert int(write.paramArray[0].writeValue.value) == int(wait.paramArray[0].waitValue.value) == 9
    assert wait.paramArray[0].waitValue.flags == 1 and int(write.paramArray[0].writeValue.address) == int(g.words)
    g.run(g.instantiate(graph))
    out = np.zeros(1, np.uint32)
    ok(cuda.cuMemcpyDtoH(out, g.words, 4))
    assert out[0] == 9


def test_external_events_become_nodes(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    before, after = ok(cuda.cuEventCreate(0)), ok(cuda.cuEventCreate(0))
    other = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamBeginCapture(g.stream, MODE))
    ok(cuda.cuStreamWaitEvent(g.stream, before, EXTERNAL))
    g.queue(g.scale, 10)
    ok(cuda.cuEventRecordWithFlags(after, g.stream, EXTERNAL))
    graph = ok(cuda.cuStreamEndCapture(g.stream))
    kinds = [ok(cuda.cuGraphNodeGetType(T.CUgraphNode(n))) for n in g.nodes(graph)]
    assert kinds[0] == N.CU_GRAPH_NODE_TYPE_WAIT_EVENT and kinds[2] == N.CU_GRAPH_NODE_TYPE_EVENT_RECORD
    g.queue(g.add, 1, other)
    ok(cuda.cuEventRecord(before, other))
    ok(cuda.cuGraphLaunch(g.instantiate(graph), g.stream))
    ok(cuda.cuStreamWaitEvent(other, after, 0))
    g.queue(g.add, 5, other)
    ok(cuda.cuStreamSynchronize(other))
    assert g.read() == 25
