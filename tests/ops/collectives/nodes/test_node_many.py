# SPDX-License-Identifier: Apache-2.0
"""`allreduce_many` over several nodes, all in one process: the bits of `allreduce` of each tensor."""

from __future__ import annotations

import pytest
from collective_support import TENSORS, assert_bits, hosts_of, place, placed, private_array

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import Unsupported

pytestmark = pytest.mark.emulated


@pytest.fixture
def machine():
    with df.emu.Machine(devices=4, race=True) as machine:
        yield machine
        assert not machine.reports


def open_nodes(machine, n=4, nodes=2, **options):
    options = {"max_blocks": 4, "workspace_bytes": 1 << 16, **options}
    return df.Group.local(n, driver=machine, nodes=nodes, **options)


def assert_sums(found, hosts, nodes):
    for t, of_tensor in enumerate(hosts):
        assert_bits([of_rank[t] for of_rank in found], reference.allreduce(of_tensor, nodes=nodes), f"tensor {t}")


@pytest.mark.parametrize("n,nodes", [(4, 2), (3, 3)])
def test_a_call_over_nodes_has_two_launches_and_one_exchange(machine, rng, n, nodes):
    with open_nodes(machine, n, nodes) as group:
        hosts = hosts_of(rng, n, TENSORS)
        call = df.allreduce_many.prepare(group, placed(group, hosts))
        assert_sums(call.launch(), hosts, nodes)
        assert [len(launches) for launches in call.launches] == [2] * n
        assert call.algo == "two_stage"


def test_a_small_workspace_takes_chunks_that_begin_within_a_tensor(machine, rng):
    with open_nodes(machine, workspace_bytes=4096) as group:
        hosts = hosts_of(rng, 4, [(1001,), (3,), (2500,), (7, 5)], "float16")
        xs = placed(group, hosts)
        call = df.allreduce_many.prepare(group, xs, xs)
        assert len(call.launches[0]) > 4
        assert_sums(call.launch(), hosts, 2)


def test_plain_calls_of_one_layout_are_planned_once(machine, rng, monkeypatch):
    with open_nodes(machine) as group:
        for number in range(4):
            if number == 2:
                monkeypatch.setattr("drvfuse.ops.collectives.nodes.sums.sequence", None)
            hosts = hosts_of(rng, 4, [(16, 8), (5,)])
            assert_sums(df.allreduce_many(group, placed(group, hosts)), hosts, 2)


def test_a_graph_replays_a_call_with_inputs_that_peers_cannot_access(machine, rng):
    with open_nodes(machine) as group:
        (hosts,) = hosts_of(rng, 4, [(40, 5)])
        pairs = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
        xs, ys = [[array] for array, _ in pairs], [[rank.zeros((40, 5), "bfloat16")] for rank in group]
        call = df.allreduce_many.prepare(group, xs, ys, pdl_level=df.PDLLevel.ON)
        with df.Graph.capture([rank.stream for rank in group]) as graph:
            call.launch()
        for _ in range(2):
            graph.launch(group[0].stream)
            group.synchronize()
            assert_sums(ys, [hosts], 2)


def test_options_supported_within_one_node_only_are_refused(machine, rng, refused):
    with open_nodes(machine) as group:
        xs = [[x] for x in place(group, hosts_of(rng, 4, [(5,)])[0])]
        for algo in ("push_one_shot", "naive"):
            refused(
                lambda algo=algo: df.allreduce_many(group, xs, algo=algo), "algo", '"auto" for a group over several'
            )
        with pytest.raises(Unsupported, match="launches all local ranks together"):
            df.allreduce_many.prepare(group, xs).launch(rank=0)


def test_kernels_move_the_bytes_that_prepared_reports(machine):
    with open_nodes(machine, workspace_bytes=1 << 20) as group:
        xs = [[rank.zeros(8000, "bfloat16"), rank.zeros(16_000, "bfloat16")] for rank in group]
        prepared = df.allreduce_many.prepare(group, xs)
        group.synchronize()
        ended = len(machine.launches)
        prepared.launch()
        group.synchronize()
        totals = [record.counters.total for record in list(machine.launches)[ended:]]
        local = sum(total.local_read + total.local_written for total in totals)
        remote = sum(total.remote_read + total.remote_written for total in totals)
        crossing = 2 * 4 * 24_000  # the bytes of sums that the exchange writes locally; it sends as many
        assert prepared.traffic[0] - crossing <= local <= prepared.traffic[0] - crossing + 30_000
        assert prepared.traffic[1] - crossing <= remote <= prepared.traffic[1] - crossing + 2_000
