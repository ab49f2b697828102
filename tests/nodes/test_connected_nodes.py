# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes with a process per rank: results, agreement, failures, resets and splits."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from connected import Ranks, connected, outcomes, together
from thread_exchange import Table, ThreadExchange

import drvfuse as df
from drvfuse import config, dtypes, errors, reference

pytestmark = pytest.mark.emulated


def engines(n):
    table = Table()
    return [ThreadExchange(table) for _ in range(n)]


def inputs(rng, n, shape, dtype="bfloat16"):
    scales = np.exp2(rng.integers(-4, 5, shape))
    return [(rng.standard_normal(shape) * scales).astype(dtypes.get(dtype).numpy) for _ in range(n)]


def equal(got, expected):
    return (reference.bits(got) == reference.bits(expected)).all()


def check(ranks, hosts, groups=None, **options):
    groups = groups or ranks.groups
    nodes = groups[0].layout.of

    def call(group):
        own = group[0].array(hosts[group[0].index])
        return df.allreduce(group, own, **options).numpy()

    for got in together([lambda group=group: call(group) for group in groups]):
        assert equal(got, reference.allreduce(hosts, nodes=nodes))


def check_fused(ranks, hosts, gamma, residual=None):
    def call(group):
        rank = group[0]
        added = None if residual is None else rank.array(residual)
        own = rank.array(hosts[rank.index])
        result = df.allreduce_rmsnorm_fp8(group, own, rank.array(gamma), epsilon=1e-5, residuals=added)
        return [None if array is None else array.numpy() for array in result]

    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, residual=residual, nodes=ranks.groups[0].layout.of)
    for got in ranks.each(call):
        for array, wanted in zip(got, expected, strict=True):
            assert (array is None) == (wanted is None)
            assert wanted is None or equal(array, wanted)


@pytest.mark.parametrize("n,nodes", [(4, 2), (6, 3), (3, 3)])
def test_calls_of_processes_have_the_bits_of_the_reference(rng, n, nodes):
    with connected(n, nodes=nodes, exchange=engines(n), machine={"race": True}) as ranks:
        for count in (1, 100, 4099, 40_000):
            check(ranks, inputs(rng, n, count))
        for residual in (None, inputs(rng, 1, (7, 100))[0]):
            check_fused(ranks, inputs(rng, n, (7, 100)), inputs(rng, 1, 100)[0], residual)
        assert not ranks.machine.reports


def test_ranks_of_a_host_form_a_node_in_any_rank_order(rng):
    with connected(4, domain=[" a", " b", " a", " b"], exchange=engines(4)) as ranks:
        assert [group.inside for group in ranks.groups] == [(0, 2), (1, 3)] * 2
        assert [group.node for group in ranks.groups] == [0, 1, 0, 1]
        check(ranks, inputs(rng, 4, 3000))


def test_a_rank_has_no_address_of_another_node():
    with connected(4, nodes=2, exchange=engines(4)) as ranks:
        for rank, group in enumerate(ranks.groups):
            known = [bool(pointer) for pointer in group.workspace.pointers]
            assert known == [peer // 2 == rank // 2 for peer in range(4)]
            assert group.link.engine.greetings == [b"rank 0", b"rank 1", b"rank 2", b"rank 3"]


def test_nodes_of_one_rank_each_have_the_bits_of_the_reference(rng):
    with connected(8, nodes=8, exchange=engines(8), node_order="fixed") as ranks:
        check(ranks, inputs(rng, 8, 500))


def test_sums_in_the_order_of_the_engine_are_within_the_bounds(rng):
    with connected(6, nodes=3, exchange=engines(6), node_order="engine") as ranks:
        hosts = inputs(rng, 6, 2000, "float32")
        low, high = reference.sum_bounds(hosts)
        found = ranks.each(lambda group: df.allreduce(group, group[0].array(hosts[group[0].index])).numpy())
        assert all(equal(got, found[0]) and (low <= got).all() and (got <= high).all() for got in found)


def test_calls_that_differ_inside_a_node_are_named(rng):
    with connected(4, nodes=2, exchange=engines(4)) as ranks:
        check(ranks, inputs(rng, 4, 100))

        def call(group):
            count = 100 if group[0].index != 3 else 104
            df.allreduce(group, group[0].zeros(count, "float32"))
            group.synchronize()

        found = outcomes([lambda group=group: call(group) for group in ranks.groups])
        assert any(isinstance(error, errors.CallMismatch) for error in found[2:])
        ranks.each(lambda group: group.reset())
        check(ranks, inputs(rng, 4, 100))


def test_a_reset_reconnects_the_engine(rng):
    with connected(4, nodes=2, exchange=engines(4)) as ranks:
        check(ranks, inputs(rng, 4, 100))
        ranks.each(lambda group: group.reset())
        assert [group.link.engine._opened for group in ranks.groups] == [2] * 4
        check(ranks, inputs(rng, 4, 100))


def test_a_split_keeps_the_nodes_of_its_ranks(rng):
    with connected(4, nodes=2, exchange=engines(4)) as ranks:
        inside = ranks.each(lambda group: group.split(group.node))
        assert [group.nodes for group in inside] == [1] * 4
        for color in range(2):
            groups = [group for group, of in zip(inside, ranks.groups, strict=True) if of.node == color]
            check(ranks, inputs(rng, 2, 300), groups)
        for group in inside:
            group.close()
        found = outcomes([lambda group=group: group.split(group[0].index % 2) for group in ranks.groups])
        assert all(isinstance(error, errors.DrvfuseError) for error in found)
        assert any("serves the group that it was given to" in str(error) for error in found)
        check(ranks, inputs(rng, 4, 100))


@pytest.mark.parametrize("wrong", [{"nodes": 3}, {"nodes": 2.5}, {"node_order": "best"}, {"domain": ["a", "", "", ""]}])
def test_wrong_nodes_are_an_argument_error_on_every_rank(wrong):
    with df.emu.Machine(devices=4) as machine:
        ranks = Ranks(machine, 4)
        found = outcomes([lambda rank=rank: ranks.open(rank, **wrong) for rank in range(4)])
        assert all(isinstance(error, (errors.ArgumentError, errors.GroupError)) for error in found)
        assert any(isinstance(error, errors.ArgumentError) for error in found)
        ranks.close()


def test_an_engine_that_one_rank_lacks_is_an_error_on_every_rank(monkeypatch):
    with df.emu.Machine(devices=2) as machine:
        ranks = Ranks(machine, 2)
        monkeypatch.setattr("drvfuse.nodes.engines._installed", lambda name: False)
        found = outcomes([lambda rank=rank: ranks.open(rank, nodes=2) for rank in range(2)])
        assert all(isinstance(error, errors.Unsupported) and "drvfuse[mpi]" in str(error) for error in found)
        ranks.close()


def test_ranks_with_different_engines_are_refused(monkeypatch):
    with df.emu.Machine(devices=2) as machine:
        ranks = Ranks(machine, 2)
        found = engines(2)
        found[1].name = "another engine"
        errors_ = outcomes([lambda rank=rank: ranks.open(rank, nodes=2, exchange=found[rank]) for rank in range(2)])
        for error in errors_:
            assert type(error) is errors.GroupMismatch
            assert error.values == {0: "threads", 1: "another engine"}
        ranks.close()


def test_a_rank_that_exits_is_named_on_other_nodes():
    with connected(4, nodes=2, exchange=engines(4)) as ranks:
        ranks.groups[3].close()
        deadline = time.monotonic() + 10
        # The board's thread notices the exit later than the other ranks do.
        while not all(group.transport.ended for group in ranks.groups[:3]):
            assert time.monotonic() < deadline
            time.sleep(0.01)

        def call(group):
            df.allreduce(group, group[0].zeros(8, "float32"))

        for error in outcomes([lambda group=group: call(group) for group in ranks.groups[:3]]):
            assert isinstance(error, errors.RankEnded) and error.rank == 3


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemImportFromShareableHandle", "cuMemHostRegister"])
def test_a_failing_driver_call_of_one_node_leaves_nothing_on_any_rank(function):
    with df.emu.Machine(devices=4) as machine:
        ranks = Ranks(machine, 4)
        for rank in range(4):
            df.device(rank, driver=ranks.processes[rank]).stream.synchronize()
        before = machine.held()
        rule = ranks.processes[3].inject(function, 2)
        found = outcomes([lambda rank=rank: ranks.open(rank, nodes=2, exchange=engines(4)[0]) for rank in range(4)])
        assert not rule.left
        assert isinstance(found[3], errors.DriverError) and found[3].call == function
        assert all(isinstance(error, errors.GroupError) for error in found[:3])
        del found
        gc.collect()
        assert machine.held() == before
        ranks.close()


def test_calls_are_compared_first_inside_each_node(rng):
    with config.override(check_calls=True), connected(4, nodes=2, exchange=engines(4)) as ranks:
        check(ranks, inputs(rng, 4, 300))

        def call(group):
            df.allreduce(group, group[0].zeros(8 + 8 * (group[0].index == 0), "float32"))
            group.synchronize()

        found = outcomes([lambda group=group: call(group) for group in ranks.groups])
        assert any(isinstance(error, errors.CallMismatch) for error in found[:2])


@pytest.mark.parametrize("domain", [None, [" a", " b", " a", " b"]])
def test_bytes_move_between_processes_of_several_nodes(rng, domain):
    """The ranks of a node need not be consecutive."""
    options = {"nodes": 2} if domain is None else {"domain": domain}
    with connected(4, exchange=engines(4), machine={"race": True}, workspace_bytes=8192, **options) as ranks:
        splits = [[3, 0, 7, 1], [2, 2, 0, 5], [0, 1, 4, 4], [6, 3, 1, 0]]
        for row in ((16,), (333,)):
            hosts = [rng.integers(0, 256, (sum(of_rank), *row), np.uint8) for of_rank in splits]
            rows = [len(host) for host in hosts]

            def call(group, hosts=hosts, rows=rows):
                x = group[0].array(hosts[group[0].index])
                gathered = df.all_gather(group, x, splits=rows).output
                return gathered.numpy(), df.all_to_all(group, x, splits=splits).numpy()

            expected = reference.all_to_all(hosts, splits)
            for rank, (gathered, exchanged) in enumerate(ranks.each(call)):
                assert (gathered == reference.all_gather(hosts)).all()
                assert (exchanged == expected[rank]).all()
            same = [rng.integers(0, 256, (40, *row), np.uint8) for _ in range(4)]

            def send(group, same=same):
                return df.broadcast(group, group[0].array(same[group[0].index]), root=3).numpy()

            assert all((found == same[3]).all() for found in ranks.each(send))
        assert not ranks.machine.reports


@pytest.mark.parametrize("domain", [None, [" a", " b", " a", " b"]])
def test_reduce_scatters_and_allreduce_many_of_processes_have_the_bits_of_the_reference(rng, domain):
    options = {"nodes": 2} if domain is None else {"domain": domain}
    with connected(4, exchange=engines(4), machine={"race": True}, workspace_bytes=8192, **options) as ranks:
        of, splits = ranks.groups[0].layout.of, [3, 0, 7, 1]
        hosts, gamma = inputs(rng, 4, (11, 100)), inputs(rng, 1, 100)[0]

        def call(group):
            x = group[0].array(hosts[group[0].index])
            found = [df.reduce_scatter(group, x, splits=splits, algo=algo).numpy() for algo in ("push", "pull")]
            fused = df.reduce_scatter_rmsnorm_fp8(group, x, group[0].array(gamma), epsilon=1e-5, splits=splits)
            return [*found, fused.output.numpy(), *(y.numpy() for y in df.allreduce_many(group, [x, x[:3]]))]

        rows = reference.reduce_scatter(hosts, splits, nodes=of)
        quantised = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-5, splits=splits, nodes=of)
        total = reference.allreduce(hosts, nodes=of)
        for rank, found in enumerate(ranks.each(call)):
            expected = [rows[rank], rows[rank], quantised[rank].output, total, total[:3]]
            assert all(equal(got, wanted) for got, wanted in zip(found, expected, strict=True))
        assert not ranks.machine.reports


def test_an_engine_that_moves_no_bytes_serves_sums_alone(rng):
    class SumsAlone(ThreadExchange):
        all_to_all = property()

    table = Table()
    with connected(2, nodes=2, exchange=[SumsAlone(table) for _ in range(2)]) as ranks:
        check(ranks, inputs(rng, 2, 30))

        def call(group):
            df.all_gather(group, group[0].zeros((2, 4), "uint8"))

        for error in outcomes([lambda group=group: call(group) for group in ranks.groups]):
            assert isinstance(error, errors.Unsupported) and "all_gather over several nodes needs" in str(error)


def test_calls_that_move_bytes_are_compared_inside_a_node():
    with config.override(spin_timeout=1.0), connected(4, nodes=2, exchange=engines(4)) as ranks:

        def call(group):
            df.all_to_all(group, group[0].zeros((4 if group[0].index < 3 else 8, 64), "uint8"))
            group.synchronize()

        found = outcomes([lambda group=group: call(group) for group in ranks.groups])
        assert any(isinstance(error, errors.CallMismatch) for error in found[2:])


@pytest.mark.parametrize("op", [df.all_to_all, df.reduce_scatter])
def test_after_a_reset_on_all_ranks_calls_work_though_one_rank_has_failed_in_an_exchange_of_bytes(rng, op):
    """Rank 3 fails in the first of two chunks. Rank 1, its peer in node 0, then waits in the engine; ranks 0 and 2 wait
    for the other rank of their own node.
    """

    def failing(parts):
        raise errors.ExchangeError(3, "threads", "failed")

    exchange = engines(4)
    exchange[3].all_to_all = failing
    hosts = [rng.integers(-99, 99, (8, 375)).astype(np.float32) for _ in range(4)]
    expected = reference.all_to_all(hosts) if op is df.all_to_all else reference.reduce_scatter(hosts)

    def call(group):
        found = op(group, group[0].array(hosts[group[0].index]))
        group.synchronize()
        return found.numpy()

    with connected(4, nodes=2, exchange=exchange, machine={"race": True}, workspace_bytes=4096) as ranks:
        for engine in exchange:
            engine._timeout = 0.3
        with config.override(spin_timeout=0.3):
            found = outcomes([lambda group=group: call(group) for group in ranks.groups])
        assert isinstance(found[3], errors.ExchangeError) and isinstance(found[1], errors.ExchangeError)
        assert all(isinstance(error, (errors.BarrierTimeout, errors.ExchangeError)) for error in found)
        with pytest.raises((errors.LaunchError, errors.BarrierTimeout), match=r"group\.reset\(\)"):
            call(ranks.groups[3])
        del exchange[3].all_to_all
        ranks.each(lambda group: group.reset())
        ranks.machine.reports.clear()  # the reports of the failed call: kernels stopped waiting
        for _ in range(2):
            for got, wanted in zip(ranks.each(call), expected, strict=True):
                assert equal(got, wanted)
        assert not ranks.machine.reports
