# SPDX-License-Identifier: Apache-2.0
"""Nodes and edges of graphs on the emulated driver: changes, queries, cycles, clones, child graphs, dot."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as T
from driver_helpers import R, code, ok
from graph_helpers import Graphs

from drvfuse.emu import Machine
from drvfuse.emu.bindings import MAJOR

AS_MESSAGES = True


def _edge(from_port: int = 0, to_port: int = 0, kind: int = 0) -> Any:
    data = T.CUgraphEdgeData()
    data.from_port, data.to_port, data.type = from_port, to_port, kind
    return data


def _random_dag(g: Graphs, rng: np.random.Generator, count: int) -> tuple[list[Any], list[tuple[int, int]], list[int]]:
    """Add a random acyclic graph. Its nodes must run in an order other than the one in which they are added.

    Returns the nodes, the edges, and the order in which the nodes must run.
    """
    order = [int(i) for i in rng.permutation(count)]
    nodes = [g.launch(g.add if i % 3 else g.scale, 2 * i + 1) for i in range(count)]
    edges = [(a, b) for a, b in zip(order[:-1], order[1:], strict=True)]
    edges += [(order[i], order[j]) for i in range(count) for j in range(i + 2, count) if rng.random() < 0.3]
    for i in rng.permutation(len(edges)):
        ok(g.connect(nodes[edges[i][0]], nodes[edges[i][1]]))
    return nodes, edges, order


@pytest.mark.parametrize("seed", range(3))
def test_only_edges_decide_the_order_of_nodes(cuda: Any, rng: np.random.Generator, seed: int) -> None:
    g = Graphs(cuda, start=3)
    nodes, edges, order = _random_dag(g, np.random.default_rng([seed, *rng.integers(0, 99, 2)]), 7)
    expected = 3
    for i in order:
        expected = (expected + 2 * i + 1 if i % 3 else expected * (2 * i + 1)) % 2**32
    g.run()
    assert g.read() == expected
    handles = [int(node) for node in nodes]
    assert g.nodes() == handles
    assert g.edges() == {(handles[a], handles[b]) for a, b in edges}
    roots, count = ok(cuda.cuGraphGetRootNodes(g.graph, 8))
    assert count == 1 and int(roots[0]) == handles[order[0]] and [int(n) for n in roots[1:]] == [0] * 7
    dependents = cuda.cuGraphNodeGetDependentNodes_v2 if MAJOR == 12 else cuda.cuGraphNodeGetDependentNodes
    found, _, count = ok(dependents(nodes[order[0]], 9))
    assert {int(n) for n in found[:count]} == {handles[b] for a, b in edges if a == order[0]}


@pytest.mark.parametrize("seed", range(4))
def test_every_node_runs_once_and_after_the_nodes_that_it_depends_on(seed: int) -> None:
    """In a random graph every third node is a child graph with two host functions, and all others are host
    functions."""
    rng, seen, calls, keep = np.random.default_rng(seed), list[int](), 0, list[Any]()
    with Machine(devices=1, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        g = Graphs(cuda)

        def note(graph: Any, after: list[Any]) -> tuple[Any, int]:
            nonlocal calls
            number, calls = calls, calls + 1
            keep.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _, number=number: seen.append(number)))
            p = T.CUDA_HOST_NODE_PARAMS()
            p.fn = T.CUhostFn(ctypes.cast(keep[-1], ctypes.c_void_p).value)
            return ok(cuda.cuGraphAddHostNode(graph, after, len(after), p)), number

        nodes, inside, edges = [], [], []
        for i in range(12):
            chosen = [j for j in range(i) if rng.random() < 0.25]
            after = [nodes[j] for j in chosen]
            edges += [(j, i) for j in chosen]
            if i % 3 == 2:
                child = ok(cuda.cuGraphCreate(0))
                numbers = [note(child, [])[1] for _ in range(2)]
                nodes.append(ok(cuda.cuGraphAddChildGraphNode(g.graph, after, len(after), child)))
            else:
                node, number = note(g.graph, after)
                nodes.append(node)
                numbers = [number]
            inside.append(numbers)
        executable = g.instantiate()
        for _ in range(2):
            seen.clear()
            g.run(executable)
            assert sorted(seen) == list(range(calls))
            at = [[seen.index(number) for number in numbers] for numbers in inside]
            assert all(max(at[a]) < min(at[b]) for a, b in edges)


def test_a_cycle_is_found_by_instantiation_and_named(cuda: Any) -> None:
    g = Graphs(cuda)
    a = g.empty()
    b, c = g.empty(a), g.empty()
    ok(g.connect(b, c))
    ok(g.connect(c, a))
    assert code(cuda.cuGraphInstantiate(g.graph, 0)) == R.CUDA_ERROR_INVALID_VALUE
    report = cuda.process.machine.reports[-1]
    assert report.kind == "graph" and all(f"0x{int(node):x}" in report.message for node in (a, b, c))
    params = T.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(cuda.cuGraphInstantiateWithParams(g.graph, params)) == R.CUDA_ERROR_INVALID_VALUE
    assert params.result_out == T.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
    assert int(params.hErrNode_out) in [int(node) for node in (a, b, c)]
    ok(g.connect(c, a, remove=True))
    ok(cuda.cuGraphInstantiateWithParams(g.graph, params))
    assert params.result_out == T.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_SUCCESS


def test_wrong_edges_are_refused_and_change_nothing(cuda: Any) -> None:
    g = Graphs(cuda)
    a, b = g.launch(g.add, 1), g.launch(g.add, 1)
    empty, other = g.empty(), ok(cuda.cuGraphAddEmptyNode(ok(cuda.cuGraphCreate(0)), None, 0))
    ok(g.connect(a, b))
    before = g.edges()
    refused = [
        g.connect(a, b),  # the edge exists already
        g.connect(a, a),
        g.connect(a, other),
        g.connect(a, T.CUgraphNode(7)),
        g.connect(b, a, _edge(from_port=1)),  # only a programmatic edge may begin at port 1
        g.connect(b, a, _edge(kind=1)),  # a programmatic edge must begin at port 1 or 2
        g.connect(b, a, _edge(from_port=3, kind=1)),
        g.connect(b, a, _edge(to_port=1)),
        g.connect(a, empty, _edge(from_port=1, kind=1)),  # the end of the edge is not a kernel node
        g.connect(b, a, remove=True),  # the edge does not exist
        g.connect(a, b, _edge(from_port=1, kind=1), remove=True),  # the edge has other data
        cuda.cuGraphAddEmptyNode(g.graph, [a, a], 2),
        cuda.cuGraphAddEmptyNode(g.graph, [other], 1),
        cuda.cuGraphAddEmptyNode(T.CUgraph(0), None, 0),
    ]
    assert {code(result) for result in refused} == {R.CUDA_ERROR_INVALID_VALUE}
    assert g.edges() == before
    ok(g.connect(a, b, remove=True))
    ok(g.connect(a, b, _edge(from_port=1, kind=1)))
    if MAJOR == 12:
        for lossy in (cuda.cuGraphGetEdges(g.graph), cuda.cuGraphNodeGetDependencies(b)):
            assert code(lossy) == R.CUDA_ERROR_LOSSY_QUERY
        assert code(cuda.cuGraphNodeGetDependentNodes(a)) == R.CUDA_ERROR_LOSSY_QUERY
        assert ok(cuda.cuGraphNodeGetDependentNodes(b)) == ([], 0)


def test_destroying_a_node_removes_its_edges(cuda: Any) -> None:
    g = Graphs(cuda)
    a = g.launch(g.add, 1)
    b = g.launch(g.add, 10, a)
    c = g.launch(g.add, 100, b)
    executable = g.instantiate()
    ok(cuda.cuGraphDestroyNode(b))
    assert g.nodes() == [int(a), int(c)] and not g.edges()
    assert code(cuda.cuGraphNodeGetType(b)) == R.CUDA_ERROR_INVALID_VALUE
    g.run()
    assert g.read() == 101
    g.run(executable)  # the executable still has node b
    assert g.read() == 212


def test_a_clone_is_independent_of_its_graph(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    a = g.launch(g.add, 1)
    b = g.launch(g.scale, 5, a)
    clone = ok(cuda.cuGraphClone(g.graph))
    twin = ok(cuda.cuGraphNodeFindInClone(b, clone))
    assert int(twin) in g.nodes(clone) and len(g.edges(clone)) == 1
    ok(cuda.cuGraphKernelNodeSetParams(b, g.kernel(g.scale, 7)))
    ok(cuda.cuGraphKernelNodeSetParams(twin, g.kernel(g.scale, 3)))
    g.run(g.instantiate(clone))
    assert g.read() == 6
    ok(cuda.cuGraphDestroy(g.graph))
    assert code(cuda.cuGraphNodeFindInClone(b, clone)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuGraphDestroyNode(twin))
    g.run(g.instantiate(clone))
    assert g.read() == 7
    assert code(cuda.cuGraphClone(g.graph)) == R.CUDA_ERROR_INVALID_VALUE


def test_a_child_graph_is_a_copy_owned_by_its_node(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    child = ok(cuda.cuGraphCreate(0))
    inner = g.launch(g.add, 1, graph=child)
    g.launch(g.scale, 3, inner, graph=child)
    first = ok(cuda.cuGraphAddChildGraphNode(g.graph, None, 0, child))
    last = g.launch(g.add, 100, first)
    ok(cuda.cuGraphDestroy(child))
    embedded = ok(cuda.cuGraphChildGraphNodeGetGraph(first))
    assert len(g.nodes(embedded)) == 2 and code(cuda.cuGraphDestroy(embedded)) == R.CUDA_ERROR_INVALID_VALUE
    second = ok(cuda.cuGraphAddChildGraphNode(g.graph, [last], 1, embedded))
    g.run()
    assert g.read() == ((1 + 1) * 3 + 100 + 1) * 3
    ok(cuda.cuGraphAddEmptyNode(embedded, None, 0))  # changes the child graph of `first` alone
    assert len(g.nodes(ok(cuda.cuGraphChildGraphNodeGetGraph(first)))) == 3
    assert len(g.nodes(ok(cuda.cuGraphChildGraphNodeGetGraph(second)))) == 2
    assert code(cuda.cuGraphChildGraphNodeGetGraph(last)) == R.CUDA_ERROR_INVALID_VALUE


def test_empty_child_graphs_keep_the_order_of_their_neighbours(cuda: Any) -> None:
    g = Graphs(cuda, start=1)
    a = g.launch(g.add, 1)
    nothing = ok(cuda.cuGraphAddChildGraphNode(g.graph, [a], 1, ok(cuda.cuGraphCreate(0))))
    g.launch(g.scale, 5, nothing)
    g.run(times=2)
    assert g.read() == 55


def test_the_dot_file_has_nodes_edges_and_what_the_flags_ask_for(cuda: Any, tmp_path: Any) -> None:
    g = Graphs(cuda)
    a = g.launch(g.add, 1)
    g.launch(g.scale, 2, a)
    ok(cuda.cuGraphAddChildGraphNode(g.graph, [a], 1, ok(cuda.cuGraphClone(g.graph))))
    path = tmp_path / "graph.dot"
    ok(cuda.cuGraphDebugDotPrint(g.graph, str(path).encode(), 0))
    plain = path.read_text()
    assert plain.startswith("digraph dot {") and plain.rstrip().endswith("}") and plain.count("->") == 3
    assert "add" in plain and "scale" in plain and f"{int(a):x}" not in plain
    ok(cuda.cuGraphDebugDotPrint(g.graph, str(path).encode(), 1))
    verbose = path.read_text()
    assert f"0x{int(a):x}" in verbose and "grid (1, 1, 1)" in verbose
    nowhere = str(tmp_path / "no" / "file").encode()
    assert code(cuda.cuGraphDebugDotPrint(g.graph, nowhere, 0)) == R.CUDA_ERROR_OPERATING_SYSTEM
    assert code(cuda.cuGraphDebugDotPrint(g.graph, str(path).encode(), 1 << 20)) == R.CUDA_ERROR_INVALID_VALUE


def test_user_objects_live_as_long_as_graphs_and_executables_that_refer_to_them(cuda: Any) -> None:
    g = Graphs(cuda)
    gone: list[int] = []
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda pointer: gone.append(int(pointer or 0)))
    address = ctypes.cast(destroy, ctypes.c_void_p).value
    item = ok(cuda.cuUserObjectCreate(7, T.CUhostFn(address), 1, 1))
    ok(cuda.cuGraphRetainUserObject(g.graph, item, 1, 1))  # moves the caller's reference
    clone = ok(cuda.cuGraphClone(g.graph))
    parent = ok(cuda.cuGraphCreate(0))
    node = ok(cuda.cuGraphAddChildGraphNode(parent, None, 0, clone))
    g.launch(g.add, 1, graph=clone)
    executable = g.instantiate(clone)
    assert code(cuda.cuGraphReleaseUserObject(g.graph, item, 2)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuGraphReleaseUserObject(g.graph, item, 1))
    ok(cuda.cuGraphDestroyNode(node))
    ok(cuda.cuGraphDestroy(clone))
    ok(cuda.cuGraphLaunch(executable, g.stream))
    ok(cuda.cuGraphExecDestroy(executable))
    assert gone == []  # a launch is still queued
    ok(cuda.cuStreamSynchronize(g.stream))
    ok(cuda.cuCtxSynchronize())
    g.run(g.instantiate())
    assert gone == [7]
    assert code(cuda.cuUserObjectRetain(item, 1)) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.skipif(not hasattr(T, "cuGraphNodeGetLocalId"), reason="only newer bindings have ids of graphs")
def test_graphs_and_nodes_have_unique_ids(cuda: Any) -> None:
    g = Graphs(cuda)
    nodes = [g.empty(), g.empty()]
    assert [ok(cuda.cuGraphNodeGetLocalId(node)) for node in nodes] == [0, 1]
    assert ok(cuda.cuGraphGetId(g.graph)) != ok(cuda.cuGraphGetId(ok(cuda.cuGraphCreate(0)))) > 0
    assert int(ok(cuda.cuGraphNodeGetContainingGraph(nodes[0]))) == int(g.graph)
    assert len({ok(cuda.cuGraphNodeGetToolsId(node)) for node in nodes}) == 2
    assert ok(cuda.cuGraphExecGetId(g.instantiate())) != ok(cuda.cuGraphExecGetId(g.instantiate())) > 0
