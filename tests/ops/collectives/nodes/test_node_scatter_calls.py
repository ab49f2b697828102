# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatters over several nodes, all in one process: each rank has the bits of its rows of the all-reduce."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import assert_bits, garbage, place, private_array, random_inputs, replicate

import drvfuse as df
from drvfuse import errors, reference
from drvfuse.nodes.in_process import InProcess
from drvfuse.plans.quantisation import Quantisation as Q

pytestmark = pytest.mark.emulated
FORMS = [(4, 2), (3, 3)]  # ranks, nodes
UNEVEN = {3: [5, 0, 2], 4: [0, 4, 1, 2]}


class Watched(InProcess):
    """An exchange engine for which the group must enforce its time limit, as for one whose exchanges might never
    end."""

    watched = True


@pytest.fixture(scope="module")
def machine():
    with df.emu.Machine(devices=4, race=True) as machine:
        yield machine
        assert not machine.reports


@pytest.fixture
def open_nodes(machine):
    groups = []

    def make(n=4, nodes=2, **options):
        options = {"max_blocks": 4, "workspace_bytes": 1 << 16, **options}
        groups.append(df.Group.local(n, driver=machine, nodes=nodes, **options))
        return groups[-1]

    yield make
    for group in reversed(groups):
        group.synchronize()
        group.close()


def assert_parts(arrays, expected, what=""):
    for rank, (array, part) in enumerate(zip(arrays, expected, strict=True)):
        assert_bits([array], part, f"{what} part {rank}")


def check(group, rng, shape, dtype="bfloat16", splits=None, **options):
    hosts = random_inputs(rng, group.size, shape, dtype)
    found = df.reduce_scatter(group, place(group, hosts), splits=splits, **options)
    assert_parts(found, reference.reduce_scatter(hosts, splits, nodes=group.nodes), f"{shape} {splits} {options}")


def check_fused(group, rng, rows, columns, dtype="bfloat16", splits=None, residual=None, normed=False, **options):
    n = group.size
    hosts, gamma = random_inputs(rng, n, (rows, columns), dtype), random_inputs(rng, 1, columns, dtype)[0]
    head = options.get("head_columns")
    weights = gamma if head is None else gamma[:head]
    counts = [len(part) for part in np.array_split(np.arange(rows), n)] if splits is None else splits
    added = None if residual is None else [random_inputs(rng, 1, (count, columns), residual)[0] for count in counts]
    residuals = None if added is None else place(group, added)
    normed_outputs = [rank.empty((count, columns), dtype) for rank, count in zip(group, counts, strict=True)]
    found = df.reduce_scatter_rmsnorm_fp8(
        group,
        place(group, hosts),
        replicate(group, weights),
        epsilon=1e-5,
        splits=splits,
        residuals=residuals,
        residual_outputs=residuals,
        normed_outputs=normed_outputs if normed else None,
        **options,
    )
    kinds = {name: options[name] for name in ("norm", "head_columns", "quantisation") if name in options}
    kinds |= {"splits": splits, "residuals": added, "nodes": group.nodes}
    wanted = reference.reduce_scatter_rmsnorm_fp8(hosts, weights, 1e-5, **kinds)
    for number in range(3):
        expected = [of_rank[number] for of_rank in wanted]
        if expected[0] is not None:
            assert_parts(found[number], expected, f"{number} of {rows}x{columns} {splits} {options}")
    if normed:
        kinds["quantisation"] = Q.none()
        plain = reference.reduce_scatter_rmsnorm_fp8(hosts, weights, 1e-5, **kinds)
        assert_parts(normed_outputs, [of_rank.output for of_rank in plain])


@pytest.mark.parametrize("n,nodes", FORMS)
def test_results_have_the_bits_of_the_reference_for_several_numbers_of_ranks_and_nodes(open_nodes, rng, n, nodes):
    group = open_nodes(n, nodes)
    check(group, rng, (7, 7), splits=UNEVEN[n])
    for shape in ((37,), (3, 1045), (1, 5), (n, 16), (0, 4)):
        check(group, rng, shape)
    check_fused(group, rng, 7, 104, splits=UNEVEN[n])


@pytest.mark.parametrize(("algo", "dtype"), [("push", "float32"), ("pull", "bfloat16")])
def test_results_have_the_bits_of_the_reference_by_every_algorithm_within_the_nodes(open_nodes, rng, algo, dtype):
    group = open_nodes()
    check(group, rng, (5, 33), dtype, algo=algo)
    check(group, rng, (8, 64), dtype, algo=algo)


def test_sums_of_nodes_are_added_in_node_order_for_both_settings_of_node_order(open_nodes):
    hosts = [np.full(100, v, np.float32) for v in (2.0**24, 1, 1, -(2.0**24))]
    for order in ("fixed", "engine"):
        group = open_nodes(node_order=order)
        expected = reference.reduce_scatter(hosts, nodes=2)
        assert expected[0][0] != reference.reduce_scatter(hosts)[0][0]
        assert_parts(df.reduce_scatter(group, place(group, hosts)), expected)


def test_a_small_workspace_takes_chunks_even_if_some_ranks_have_no_rows_left(open_nodes, rng):
    group = open_nodes(workspace_bytes=4096)
    for count, splits in ((2999, None), (901, [901, 0, 0, 0]), (2701, [0, 700, 2000, 1])):
        check(group, rng, (count,), splits=splits)
    check_fused(group, rng, 11, 64, splits=[5, 0, 1, 5])
    check_fused(group, rng, 11, 61)


@pytest.mark.parametrize("workspace_bytes", [8192, 1 << 16])
def test_inputs_that_peers_cannot_access_are_staged(open_nodes, rng, workspace_bytes):
    group = open_nodes(workspace_bytes=workspace_bytes)
    hosts = random_inputs(rng, 4, (11, 75), "bfloat16")
    pairs = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
    for algo in ("auto", "pull"):
        xs = [array for array, _ in pairs]
        assert_parts(df.reduce_scatter(group, xs, algo=algo), reference.reduce_scatter(hosts, nodes=2))
        gamma = random_inputs(rng, 1, 75, "bfloat16")[0]
        found = df.reduce_scatter_rmsnorm_fp8(group, xs, replicate(group, gamma), epsilon=1e-5, algo=algo)
        expected = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-5, nodes=2)
        assert_parts(found.output, [of_rank.output for of_rank in expected])
    group.synchronize()


def test_outputs_may_be_the_ranks_own_rows_of_the_inputs(open_nodes, rng):
    group = open_nodes(workspace_bytes=4096)
    hosts = random_inputs(rng, 4, (4001,), "bfloat16")
    xs, splits = place(group, hosts), [1001, 999, 1, 2000]
    expected = reference.reduce_scatter(hosts, splits, nodes=2)
    starts = np.cumsum([0, *splits])
    ys = [x[starts[i] : starts[i + 1]] for i, x in enumerate(xs)]
    df.reduce_scatter(group, xs, ys, splits=splits)
    assert_parts(ys, expected)


def test_an_epilogue_sees_indices_and_ranks_of_the_group(open_nodes, rng):
    group = open_nodes(workspace_bytes=4096)
    hosts = random_inputs(rng, 4, (90, 24), "bfloat16")
    epilogue = df.Epilogue("x + float(row) * 2 + float(col) + float(rank) * 64")
    found = df.reduce_scatter(group, place(group, hosts), epilogue=epilogue)
    ranks = np.repeat(np.arange(4, dtype=np.float32), [23, 23, 22, 22])[:, None]
    more = np.arange(90, dtype=np.float32)[:, None] * 2
    columns = np.arange(24, dtype=np.float32)
    expected = reference.reduce_scatter(hosts, epilogue=lambda x: ((x + more) + columns) + ranks * 64, nodes=2)
    assert_parts(found, expected)


FUSED = {
    "float32 residual, layer, normed": {"residual": "float32", "norm": "layer", "normed": True},
    "heads": {"head_columns": 32, "residual": "bfloat16"},
    "mxfp8 in tiles": {"quantisation": Q.mxfp8(layout="tiles")},
    "nvfp4": {"quantisation": Q.nvfp4(1.0), "normed": True},
    "groups by column": {"quantisation": Q.per_group(64, layout="column")},
}


@pytest.mark.parametrize("form", FUSED)
def test_every_form_of_the_fused_op_has_the_bits_of_the_reference(open_nodes, rng, form):
    for workspace_bytes in (1 << 16, 8192):
        check_fused(open_nodes(workspace_bytes=workspace_bytes), rng, 11, 128, splits=[4, 0, 6, 1], **FUSED[form])


@pytest.mark.parametrize("level", list(df.PDLLevel)[1:3])
def test_a_graph_replays_calls_of_a_watched_engine(open_nodes, rng, level):
    group = open_nodes(exchange=Watched(), workspace_bytes=4096)
    xs, gamma = garbage(group, (8, 64), "bfloat16"), random_inputs(rng, 1, 64, "bfloat16")[0]
    ys = garbage(group, (2, 64), "bfloat16")
    outputs = {"outputs": garbage(group, (2, 64), "float8_e4m3fn"), "scales": garbage(group, 2, "float32")}
    weights = replicate(group, gamma)
    calls = [
        df.reduce_scatter.prepare(group, xs, ys, pdl_level=level),
        df.reduce_scatter_rmsnorm_fp8.prepare(group, xs, weights, epsilon=1e-5, pdl_level=level, **outputs),
    ]
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        for call in calls:
            call.launch()
    for _ in range(2):
        hosts = random_inputs(rng, 4, (8, 64), "bfloat16")
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        group.synchronize()
        graph.launch(group[0].stream)
        group.synchronize()
        assert_parts(ys, reference.reduce_scatter(hosts, nodes=2))
        expected = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-5, nodes=2)
        assert_parts(outputs["outputs"], [of_rank.output for of_rank in expected])
        assert_parts(outputs["scales"], [of_rank.scales for of_rank in expected])
    assert (group.link.words["sending"] == group.link.words["received"]).all()


def test_plain_calls_of_one_layout_are_planned_once(open_nodes, rng, monkeypatch):
    group = open_nodes()
    for number in range(4):
        if number == 2:
            monkeypatch.setattr("drvfuse.ops.collectives.sums.over_nodes.PartialSums", None)
        check(group, rng, (8, 16))


def test_the_error_for_an_unsupported_call_names_what_to_use(open_nodes, rng, refused):
    group = open_nodes()
    xs = place(group, random_inputs(rng, 4, (4, 8), "bfloat16"))
    weights = [rank.zeros(8, "bfloat16") for rank in group]
    for call in (
        lambda group, **options: df.reduce_scatter(group, xs, **options),
        lambda group, **options: df.reduce_scatter_rmsnorm_fp8(group, xs, weights, epsilon=1e-5, **options),
    ):
        refused(
            lambda call=call: call(group, algo="naive"),
            "algo",
            'another algorithm, such as "auto"',
        )

        class SumsAlone(InProcess):
            all_to_all = property()

        with pytest.raises(errors.Unsupported, match="needs an engine with the method all_to_all"):
            call(open_nodes(exchange=SumsAlone()))


@pytest.mark.parametrize("staged", [False, True])
def test_kernels_move_the_bytes_that_prepared_reports(machine, open_nodes, staged):
    """The bytes of the exchange are not counted, as no kernel copies them."""
    group, elements = open_nodes(workspace_bytes=1 << 20), 24_000
    xs, memory = [rank.zeros(elements, "bfloat16") for rank in group], []
    if staged:
        pairs = [private_array(rank.device, np.zeros(elements, xs[0].dtype.numpy)) for rank in group]
        xs, memory = [array for array, _ in pairs], [kept for _, kept in pairs]
    prepared = df.reduce_scatter.prepare(group, xs, algo="pull")
    group.synchronize()
    ended = len(machine.launches)
    prepared.launch()
    group.synchronize()
    totals = [record.counters.total for record in list(machine.launches)[ended:]]
    local = sum(total.local_read + total.local_written for total in totals)
    remote = sum(total.remote_read + total.remote_written for total in totals)
    crossing = 4 * elements  # bytes of sums: the exchange reads them, and sends them to the other node
    assert prepared.traffic[0] - crossing <= local <= prepared.traffic[0] - crossing + 30_000
    assert prepared.traffic[1] - crossing <= remote <= prepared.traffic[1] - crossing + 2_000
    del memory


@pytest.mark.parametrize("model", [{"race": "strict"}, {"delay_stores": True}])
def test_calls_over_nodes_have_no_race_by_the_model_of_ptx(rng, model):
    """All ops are called repeatedly, under the strict profile of the race detector or with stores that arrive late."""
    with (
        df.emu.Machine(devices=4, **model) as machine,
        df.Group.local(4, driver=machine, nodes=2, max_blocks=2, workspace_bytes=4096) as group,
    ):
        hosts = random_inputs(rng, 4, (8, 72), "bfloat16")
        xs, total = place(group, hosts), reference.allreduce(hosts, nodes=2)
        for _ in range(2):
            assert_parts(df.reduce_scatter(group, xs, algo="push"), reference.reduce_scatter(hosts, nodes=2))
            assert_bits(df.all_gather(group, xs, algo="pull").output, reference.all_gather(hosts))
            assert_bits([of_rank[0] for of_rank in df.allreduce_many(group, [[x] for x in xs])], total)
            assert_bits(df.broadcast(group, xs, root=1, algo="push"), hosts[1])
            assert_parts(df.all_to_all(group, xs, algo="put"), reference.all_to_all(hosts))
        group.synchronize()
        assert not machine.reports


@pytest.mark.parametrize("op", [df.reduce_scatter, df.reduce_scatter_rmsnorm_fp8])
def test_sums_are_stored_when_no_peer_reads_the_payload_for_the_preceding_call(rng, op):
    """Peers gather the results of an all-reduce from a rank's payload. In a graph, the host does not wait between the
    all-reduce and the reduce-scatter, which must not store its sums to the payload before the peers have read it."""
    with (
        df.emu.Machine(devices=4, race="strict") as machine,
        df.Group.local(4, driver=machine, nodes=2, max_blocks=2, workspace_bytes=4096) as group,
    ):
        hosts = random_inputs(rng, 4, (8, 64), "bfloat16")
        xs, gammas = place(group, hosts), [rank.array(np.ones(64, hosts[0].dtype)) for rank in group]
        arguments = (xs,) if op is df.reduce_scatter else (xs, gammas)
        options = {} if op is df.reduce_scatter else {"epsilon": 1e-5}
        calls = [df.allreduce.prepare(group, xs), op.prepare(group, *arguments, algo="push", **options)]
        with df.Graph.capture([rank.stream for rank in group]) as graph:
            for call in calls:
                call.launch()
        for _ in range(3):
            graph.launch(group[0].stream)
        group.synchronize()
        assert not machine.reports


def test_a_trace_has_records_of_all_kernels_of_a_call(open_nodes, rng):
    group = open_nodes()
    trace = df.Trace(group)
    df.reduce_scatter(group, place(group, random_inputs(rng, 4, (8, 64), "bfloat16")), algo="push", trace=trace)
    records = trace.records()
    assert {str(name) for name in records["kernel"]} == {
        "move_put",
        "reduce_scatter_push_one_shot",
        "reduce_scatter_one_stage",
    }
    assert set(records["rank"].tolist()) == {0, 1, 2, 3}
