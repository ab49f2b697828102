# SPDX-License-Identifier: Apache-2.0
"""Collectives over several nodes give the reference's bits, in every form, with the nodes of a group in one process."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import (
    assert_bits,
    codes_per_row,
    garbage,
    place,
    private_array,
    random_inputs,
    replicate,
)

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.errors import Unsupported
from drvfuse.plans.quantisation import PER_ROW

pytestmark = pytest.mark.emulated
FORMS = [(2, 2), (4, 2), (6, 3), (3, 3), (8, 2)]  # ranks, nodes


@pytest.fixture
def machine():
    with df.emu.Machine(devices=8, race=True) as machine:
        yield machine
        assert not machine.reports


@pytest.fixture
def open_nodes(machine):
    """`open_nodes(n, nodes)`: a group of n ranks in `nodes` nodes, under the race detector."""
    groups = []

    def make(n, nodes, **options):
        options = {"max_blocks": 4, "workspace_bytes": 1 << 20, **options}
        groups.append(df.Group.local(n, driver=machine, nodes=nodes, **options))
        return groups[-1]

    yield make
    for group in reversed(groups):
        group.close()


def check(group, hosts, **options):
    xs = place(group, hosts)
    ys = garbage(group, hosts[0].shape, dtypes.get(hosts[0].dtype).name)
    df.allreduce(group, xs, ys, **options)
    assert_bits(ys, reference.allreduce(hosts, nodes=group.nodes), f"{hosts[0].shape}")
    for x, host in zip(xs, hosts, strict=True):
        assert_bits([x], host, "input of")


def check_fused(group, hosts, gamma, residual=None, quantisation=PER_ROW):
    xs = place(group, hosts)
    added = None if residual is None else replicate(group, residual)
    options = {"epsilon": 1e-5, "quantisation": quantisation}
    result = df.allreduce_rmsnorm_fp8(group, xs, replicate(group, gamma), residuals=added, **options)
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, residual=residual, nodes=group.nodes, **options)
    for arrays, wanted in zip(result, expected, strict=True):
        assert (arrays is None) == (wanted is None)
        if arrays is not None:
            assert_bits(arrays, wanted, f"{hosts[0].shape}")


def inputs(rng, n, shape, dtype="bfloat16"):
    return random_inputs(rng, n, shape, dtype)


def gamma_of(rng, columns, dtype="bfloat16"):
    return rng.standard_normal(columns).astype(dtypes.get(dtype).numpy)


@pytest.mark.parametrize("n,nodes", FORMS)
def test_sums_have_the_bits_of_the_reference_for_every_form_and_size(open_nodes, rng, n, nodes):
    group = open_nodes(n, nodes)
    inside = n // nodes
    for count in (1, 7, 8, 8 * inside, 8 * inside + 3, 8 * 300 * inside + 5):
        check(group, inputs(rng, n, count))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_are_exact(open_nodes, rng, dtype):
    group = open_nodes(4, 2)
    for count in (1, 3, 127, 1029):
        check(group, inputs(rng, 4, count, dtype))


@pytest.mark.parametrize("model", [{"race": "strict"}, {"delay_stores": True}])
def test_several_nodes_have_no_race_by_the_model_of_ptx(rng, model):
    """Consecutive calls run under the strict profile of the race detector, or with delayed stores."""
    with (
        df.emu.Machine(devices=4, **model) as machine,
        df.Group.local(4, driver=machine, nodes=2, max_blocks=3, workspace_bytes=1 << 14) as group,
    ):
        hosts, gamma, residual = inputs(rng, 4, (8, 264)), gamma_of(rng, 264), inputs(rng, 1, (8, 264))[0]
        for _ in range(2):
            check(group, hosts)
            check_fused(group, hosts, gamma)
            check_fused(group, hosts, gamma, residual)
        group.synchronize()
        assert not machine.reports


def test_sums_in_node_order_differ_from_sums_in_rank_order(open_nodes):
    group = open_nodes(4, 2)
    hosts = [np.full(100, v, np.float32) for v in (2.0**24, 1, 1, -(2.0**24))]
    assert reference.allreduce(hosts)[0] != reference.allreduce(hosts, nodes=2)[0]
    check(group, hosts)


def test_special_values_have_the_bits_of_the_reference(open_nodes):
    group = open_nodes(4, 2)
    nan, inf = np.nan, np.inf
    rows = [
        [-0.0, nan, inf, inf, 1e-40, -nan],
        [-0.0, 1, 1, -inf, -1e-40, 0],
        [-0.0, 1, 1, 0, 0, 1],
        [-0.0, 1, inf, 0, 0, nan],
    ]
    check(group, [np.array(row, np.float32) for row in rows])


@pytest.mark.parametrize("n,nodes", FORMS)
@pytest.mark.parametrize("residual", [False, True])
def test_the_fused_op_is_exact_for_every_form(open_nodes, rng, n, nodes, residual):
    group = open_nodes(n, nodes)
    for shape in ((1, 8), (5, 104), (9, 96)):
        added = inputs(rng, 1, shape)[0] if residual else None
        check_fused(group, inputs(rng, n, shape), gamma_of(rng, shape[1]), added)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2", "same"])
def test_the_fused_op_is_exact_for_every_dtype(open_nodes, rng, dtype, out):
    group, shape = open_nodes(4, 2), (6, 100)  # rows of 16-bit types end within a pack
    scales = "bfloat16" if out == "float8_e5m2" else "float32"
    made = codes_per_row(dtype, dtype if out == "same" else out, scales)
    for residual in (None, inputs(rng, 1, shape, dtype)[0]):
        check_fused(group, inputs(rng, 4, shape, dtype), gamma_of(rng, 100, dtype), residual, quantisation=made)


@pytest.mark.parametrize("columns", [1, 7, 33, 4100])
def test_ragged_rows_are_exact(open_nodes, rng, columns):
    group = open_nodes(6, 3)
    check_fused(group, inputs(rng, 6, (3, 2, columns)), gamma_of(rng, columns))


def test_tensors_larger_than_the_workspace_go_in_chunks(open_nodes, rng):
    group = open_nodes(4, 2, workspace_bytes=4096)
    for count in (2000, 2048, 5003):
        prepared = df.allreduce.prepare(group, place(group, inputs(rng, 4, count)))
        assert len(prepared.launches[0]) > 2
        check(group, inputs(rng, 4, count))
    shape = (7, 72)
    for residual in (None, inputs(rng, 1, shape)[0]):
        check_fused(group, inputs(rng, 4, shape), gamma_of(rng, 72), residual)


def test_inputs_that_peers_cannot_read_are_staged(open_nodes, rng):
    for bytes_of_workspace in (1 << 20, 4096):
        group = open_nodes(4, 2, workspace_bytes=bytes_of_workspace, max_blocks=2)
        for shape in ((3, 40), (11, 75)):
            hosts = inputs(rng, 4, shape)
            pairs = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
            xs = [array for array, _ in pairs]
            assert_bits(df.allreduce(group, xs), reference.allreduce(hosts, nodes=2))
            gamma = gamma_of(rng, shape[1])
            result = df.allreduce_rmsnorm_fp8(group, xs, replicate(group, gamma), epsilon=1e-5)
            expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, nodes=2)
            assert_bits(result.output, expected.output)
            assert_bits(result.scales, expected.scales)
            group.synchronize()


def test_an_output_may_be_the_input(open_nodes, rng):
    group = open_nodes(4, 2, workspace_bytes=4096)
    hosts = inputs(rng, 4, 3001)
    xs = place(group, hosts)
    df.allreduce(group, xs, xs)
    assert_bits(xs, reference.allreduce(hosts, nodes=2))
    hosts, residual, gamma = inputs(rng, 4, (9, 64)), inputs(rng, 1, (9, 64))[0], gamma_of(rng, 64)
    added = replicate(group, residual)
    df.allreduce_rmsnorm_fp8(
        group, place(group, hosts), replicate(group, gamma), epsilon=1e-5, residuals=added, residual_outputs=added
    )
    assert_bits(added, reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, residual=residual, nodes=2).residual)


def test_empty_tensors_give_empty_results(open_nodes):
    group = open_nodes(4, 2)
    ys = df.allreduce(group, [rank.empty((0, 5), "bfloat16") for rank in group])
    assert [y.shape for y in ys] == [(0, 5)] * 4


def test_an_epilogue_is_applied_to_the_sum_of_the_nodes(open_nodes, rng):
    group = open_nodes(4, 2, workspace_bytes=4096)
    hosts, bias = inputs(rng, 4, (90, 24)), rng.standard_normal(24).astype(np.float32)
    epilogue = df.Epilogue(
        "x * scale + bias[col] + float(row)", scale=df.float32(0.5), bias=df.Replicated(replicate(group, bias))
    )
    rows = np.arange(90, dtype=np.float32)[:, None]
    expected = reference.allreduce(hosts, epilogue=lambda x: x * np.float32(0.5) + bias + rows, nodes=2)
    assert_bits(df.allreduce(group, place(group, hosts), epilogue=epilogue), expected)


def test_a_prepared_call_is_launched_many_times_on_new_contents(open_nodes, rng):
    group = open_nodes(4, 2)
    hosts = inputs(rng, 4, 700)
    xs = place(group, hosts)
    call = df.allreduce.prepare(group, xs)
    assert call.algo == "two_stage"
    for _ in range(3):
        hosts = inputs(rng, 4, 700)
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        assert_bits(call.launch(), reference.allreduce(hosts, nodes=2))


def test_plain_calls_of_one_layout_are_planned_once(open_nodes, rng, monkeypatch):
    group = open_nodes(4, 2)
    gamma = replicate(group, gamma_of(rng, 64))
    for number in range(4):
        if number == 2:  # from here on a call that plans again would fail
            monkeypatch.setattr("drvfuse.ops.collectives.nodes.sums", None)
        hosts = inputs(rng, 4, (6, 64))
        xs = place(group, hosts)
        assert_bits(df.allreduce(group, xs), reference.allreduce(hosts, nodes=2))
        result = df.allreduce_rmsnorm_fp8(group, xs, gamma, epsilon=1e-5)
        expected = reference.allreduce_rmsnorm_fp8(hosts, gamma[0].numpy(), 1e-5, nodes=2)
        assert_bits(result.output, expected.output)
        assert_bits(result.scales, expected.scales)


def test_a_trace_has_records_of_both_kernels_of_a_call(open_nodes, rng):
    group = open_nodes(4, 2)
    trace = df.Trace(group)
    hosts = inputs(rng, 4, (16, 256))
    assert_bits(df.allreduce(group, place(group, hosts), trace=trace), reference.allreduce(hosts, nodes=2))
    records = trace.records()
    assert {str(name) for name in records["kernel"]} == {"node_sums", "allreduce_two_stage"}
    assert set(records["rank"].tolist()) == {0, 1, 2, 3}


def test_inputs_are_free_when_the_call_of_their_rank_is_complete(open_nodes, rng):
    group = open_nodes(4, 2)
    hosts = inputs(rng, 4, (4, 2048))
    for _ in range(3):
        xs = place(group, hosts)
        call = df.allreduce.prepare(group, xs)
        result = call.launch()
        for x, rank in zip(xs, group, strict=True):
            rank.stream.fill(x.ptr, 0, x.nbytes)
        assert_bits(result, reference.allreduce(hosts, nodes=2))


@pytest.mark.parametrize("level", list(df.PDLLevel)[:3])
def test_every_pdl_level_gives_the_bits(open_nodes, rng, level):
    group = open_nodes(4, 2)
    hosts = inputs(rng, 4, (6, 64))
    gamma = gamma_of(rng, 64)
    xs = place(group, hosts)
    for _ in range(3):
        ys = df.allreduce(group, xs, pdl_level=level)
        result = df.allreduce_rmsnorm_fp8(group, ys, replicate(group, gamma), epsilon=1e-5, pdl_level=level)
    total = reference.allreduce(hosts, nodes=2)
    assert_bits(ys, total)
    assert_bits(result.output, reference.allreduce_rmsnorm_fp8([total] * 4, gamma, 1e-5, nodes=2).output)


def test_one_graph_over_all_streams_replays_the_exchange(open_nodes, rng):
    group = open_nodes(4, 2, workspace_bytes=4096)
    xs = [rank.zeros(900, "bfloat16") for rank in group]
    ys = garbage(group, 900, "bfloat16")
    call = df.allreduce.prepare(group, xs, ys)
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        call.launch()
    for _ in range(2):
        hosts = inputs(rng, 4, 900)
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        group.synchronize()
        graph.launch(group[0].stream)
        group.synchronize()
        assert_bits(ys, reference.allreduce(hosts, nodes=2))


def test_progress_counters_are_equal_after_a_call_and_a_replay(open_nodes, rng):
    group = open_nodes(4, 2)
    call = df.allreduce.prepare(group, place(group, inputs(rng, 4, 100)))
    seen = []
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        call.launch()
    for _ in range(2):
        graph.launch(group[0].stream)
        group.synchronize()
        assert (group.link.words["begun"] == group.link.words["ended"]).all()
        seen.append(int(group.link.words["begun"][0]))
    assert 0 < seen[0] < seen[1]


def test_the_order_of_the_engine_is_within_the_bounds_and_equal_on_all_ranks(open_nodes, rng):
    group = open_nodes(6, 3, node_order="engine")
    hosts = inputs(rng, 6, 5000, "float32")
    low, high = reference.sum_bounds(hosts)
    ys = df.allreduce(group, place(group, hosts))
    assert_bits(ys, ys[0].numpy())
    assert ((low <= ys[0].numpy()) & (ys[0].numpy() <= high)).all()
    assert (ys[0].numpy() != reference.allreduce(hosts, nodes=3)).any()
    shape = (5, 72)
    hosts, gamma = [np.round(h.astype(np.float32)).astype(h.dtype) for h in inputs(rng, 6, shape)], gamma_of(rng, 72)
    result = df.allreduce_rmsnorm_fp8(group, place(group, hosts), replicate(group, gamma), epsilon=1e-5)
    assert_bits(result.output, reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, nodes=3).output)


def test_a_group_reports_its_nodes(open_nodes):
    group = open_nodes(6, 3)
    assert (group.nodes, group.node, group.inside, group.size) == (3, 0, (0, 1), 6)
    assert group.link.order == "fixed" and open_nodes(2, 1).nodes == 1


def test_calls_supported_within_one_node_only_are_refused(open_nodes, rng, refused):
    group = open_nodes(4, 2)
    xs = place(group, inputs(rng, 4, 64))
    for algo in ("one_stage", "push_one_shot", "push_two_shot", "naive"):
        refused(
            lambda algo=algo: df.allreduce(group, xs, algo=algo), "algo", '"two_stage" for a group over several nodes'
        )
    df.allreduce(group, xs, algo="two_stage")
    for wrong in (
        lambda: df.allreduce(group, xs, use_multimem=True),
        lambda: group.symmetric(4096),
        lambda: group.symmetric(4096, multicast=True),
        lambda: df.allreduce.prepare(group, xs).launch(rank=0),
    ):
        with pytest.raises(Unsupported, match="several"):
            wrong()
    refused(lambda: df.allreduce(group, xs, epilogue=df.Epilogue("x + rank")), "epilogue", "the same on all ranks")


def test_a_workspace_too_small_for_a_row_of_every_node_is_refused(open_nodes, rng, refused):
    group = open_nodes(6, 3, workspace_bytes=4096)
    xs = place(group, inputs(rng, 6, (2, 512)))
    refused(
        lambda: df.allreduce_rmsnorm_fp8(group, xs, replicate(group, gamma_of(rng, 512)), epsilon=1e-5),
        "workspace_bytes",
    )


def test_wrong_nodes_are_refused_by_the_constructor(machine, refused):
    refused(lambda: df.Group.local(4, driver=machine, nodes=3), "nodes", "divides the 4 ranks")
    refused(lambda: df.Group.local(4, driver=machine, nodes=2, node_order="best"), "node_order")
    refused(lambda: df.Group.local(4, driver=machine, nodes=2, exchange="gloo"), "exchange", '"nccl"')
    refused(lambda: df.Group.local(4, driver=machine, nodes=2, exchange=object()), "exchange", "without open")
    with pytest.raises(Unsupported, match="real GPUs"):
        df.Group.local(4, driver=machine, nodes=2, exchange="nccl")


@pytest.mark.parametrize("order", ["fixed", "engine"])
@pytest.mark.parametrize("staged", [False, True])
def test_kernels_move_the_bytes_that_prepared_reports(machine, open_nodes, staged, order):
    """The bytes of the exchange are not counted, as no kernel copies them."""
    group = open_nodes(4, 2, node_order=order)
    elements = 24_000
    xs, memory = [rank.zeros(elements, "bfloat16") for rank in group], []
    if staged:
        pairs = [private_array(rank.device, np.zeros(elements, xs[0].dtype.numpy)) for rank in group]
        xs, memory = [array for array, _ in pairs], [kept for _, kept in pairs]
    prepared = df.allreduce.prepare(group, xs)
    group.synchronize()
    ended = len(machine.launches)
    prepared.launch()
    group.synchronize()
    totals = [record.counters.total for record in list(machine.launches)[ended:]]
    local = sum(total.local_read + total.local_written for total in totals)
    remote = sum(total.remote_read + total.remote_written for total in totals)
    of_exchange = 2 * 4 * elements, 2 * 4 * elements  # the bytes that the exchange writes, and those that it sends
    expected = prepared.traffic[0] - (of_exchange[0] if order == "fixed" else 0), prepared.traffic[1] - of_exchange[1]
    assert expected[0] <= local <= expected[0] + 30_000
    assert expected[1] <= remote <= expected[1] + 2_000
    del memory
