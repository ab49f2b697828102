# SPDX-License-Identifier: Apache-2.0
"""If a kernel of one node gives up before an exchange, the ranks of all other nodes raise NodeFailed."""

from __future__ import annotations

import numpy as np
import pytest
from connected import connected, outcomes
from thread_exchange import Table, ThreadExchange

import drvfuse as df
from drvfuse import errors, reference
from drvfuse.comm.workspace import ABORT_OFFSET
from drvfuse.nodes.in_process import InProcess
from drvfuse.runtime.array import view

pytestmark = pytest.mark.emulated


def gathered(*given):
    return df.all_gather(*given).output


OPS = {
    "allreduce": df.allreduce,
    "all_gather": gathered,
    "all_to_all": df.all_to_all,
    "broadcast": df.broadcast,
    "reduce_scatter": df.reduce_scatter,
}


def expected(name, hosts):
    """The results on 4 ranks. The sums are exact, as the numbers are small integers."""
    if name == "allreduce":
        return [reference.allreduce(hosts)] * 4
    if name == "all_gather":
        return [reference.all_gather(hosts)] * 4
    if name == "broadcast":
        return [hosts[0]] * 4
    return getattr(reference, name)(hosts)


@pytest.mark.parametrize("order", ["fixed", "engine"])
def test_all_ranks_of_all_nodes_raise_if_the_calls_of_one_node_differ(rng, order):
    """The shapes differ in node 0, whose kernels detect this. The nodes exchange equal numbers of bytes."""
    table = Table()
    with connected(4, nodes=2, exchange=[ThreadExchange(table) for _ in range(4)], node_order=order) as ranks:
        for name, op in OPS.items():
            if order == "engine" and name != "allreduce":
                continue  # the other ops do not depend on the order
            hosts = [rng.integers(-99, 99, (8, 4)).astype(np.float32) for _ in range(4)]

            def call(group, wrong, op=op, hosts=hosts):
                host = hosts[group[0].index]
                found = op(group, group[0].array(host.reshape(4, 8) if wrong and group[0].index == 1 else host))
                group.synchronize()
                return found.numpy()

            found = outcomes([lambda group=group: call(group, True) for group in ranks.groups])
            assert [type(error) for error in found] == [errors.CallMismatch] * 2 + [errors.NodeFailed] * 2, name
            for error in found[2:]:
                assert error.node == 1 and error.failed == (0 if order == "fixed" else None)
                assert f"of the group, {name} " in str(error)
            for group in ranks.groups:
                with pytest.raises((errors.CallMismatch, errors.NodeFailed)):
                    group.check()
            ranks.each(lambda group: group.reset())
            for got, wanted in zip(ranks.each(lambda group: call(group, False)), expected(name, hosts), strict=True):
                assert (got == wanted).all(), name


class Watched(InProcess):
    """An exchange engine for which the group must enforce its time limit, as for one whose exchanges might never
    end."""

    watched = True


def give_up(group, node):
    """Set the abort words of a node's ranks, as a kernel that gives up does."""
    for rank in group:
        if group.layout.of[rank.index] == node:
            view(group.workspace.pointers[rank.index] + ABORT_OFFSET, 1, "uint64", rank.device).copy_from(
                np.ones(1, np.uint64)
            )


@pytest.mark.parametrize("nodes,engine", [(2, InProcess), (4, Watched)])
def test_the_other_nodes_report_even_if_an_exchange_ends_the_call(rng, nodes, engine):
    """With one rank in each node an exchange is the last step of an all-gather."""
    with (
        df.emu.Machine(devices=4) as machine,
        df.Group.local(
            4, driver=machine, nodes=nodes, exchange=engine(), max_blocks=2, workspace_bytes=1 << 15
        ) as group,
    ):
        for name, op in OPS.items():
            hosts = [rng.integers(-99, 99, (8, 4)).astype(np.float32) for _ in range(4)]
            xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
            give_up(group, 0)  # before the first call nobody has written to the workspaces
            op(group, xs)
            with pytest.raises(errors.NodeFailed) as caught:
                group.synchronize()
            assert caught.value.failed == 0 and caught.value.node > 0, name
            reports = zip(group.workspace.reports["magic"], group.layout.of, strict=True)
            assert {node for magic, node in reports if magic} == set(range(1, nodes)), name
            found = op(group, xs)  # resets the group
            for got, wanted in zip(found, expected(name, hosts), strict=True):
                assert (got.numpy() == wanted).all(), name


class Observed(Watched):
    """An engine that records at each all-reduce which ranks have begun an exchange that has not ended."""

    def all_reduce(self, parts):
        for part in parts:
            part.stream.synchronize()
        self.inside.append((self.link.words["begun"] > self.link.words["ended"]).tolist())
        super().all_reduce(parts)


def test_the_watchdog_sees_the_exchange_of_a_rank_that_has_given_up(rng):
    """A watchdog that did not see this exchange would never abort it if the other node does not come."""
    engine = Observed()
    engine.inside = []
    with (
        df.emu.Machine(devices=4) as machine,
        df.Group.local(
            4, driver=machine, nodes=2, node_order="engine", exchange=engine, max_blocks=2, workspace_bytes=1 << 15
        ) as group,
    ):
        engine.link = group.link
        xs = [rank.array(rng.standard_normal(64).astype(np.float32)) for rank in group]
        for _ in range(2):
            df.allreduce(group, xs)
            group.synchronize()
            give_up(group, 0)
            df.allreduce(group, xs)
            with pytest.raises(errors.NodeFailed):
                group.synchronize()
            assert engine.inside == [[True] * 4] * 2
            assert (group.link.words["begun"] <= group.link.words["ended"]).all()
            engine.inside.clear()


def test_a_replay_reports_too(rng):
    with (
        df.emu.Machine(devices=4) as machine,
        df.Group.local(4, driver=machine, nodes=2, max_blocks=2, workspace_bytes=1 << 15) as group,
    ):
        xs = [rank.array(rng.standard_normal(64).astype(np.float32)) for rank in group]
        sums, rows = df.allreduce.prepare(group, xs), df.all_gather.prepare(group, xs)
        streams = [rank.stream for rank in group]
        with df.Graph.capture(streams) as graph:
            sums.launch()
            rows.launch()
        graph.launch(streams[0])
        group.synchronize()
        give_up(group, 1)
        graph.launch(streams[0])
        with pytest.raises(errors.NodeFailed) as caught:
            group.synchronize()
        assert caught.value.failed == 1 and "in the replay of a graph" in str(caught.value)
        group.reset()
        graph.close()


def test_an_exchange_that_was_aborted_is_the_error_whatever_its_memory_holds(rng):
    """An aborted exchange leaves sums of an earlier call where kernels read the statuses of other nodes."""

    class Aborted(InProcess):
        def all_gather(self, parts):
            if self.broken:
                link = group.link
                link.failure = errors.ExchangeTimeout(0, 0, [2], self.name, 0.5)
            else:
                super().all_gather(parts)

    engine = Aborted()
    with (
        df.emu.Machine(devices=4) as machine,
        df.Group.local(4, driver=machine, nodes=2, exchange=engine, max_blocks=2, workspace_bytes=1 << 15) as group,
    ):
        for count, engine.broken in ((4000, False), (800, True)):
            xs = [rank.array(rng.standard_normal(count).astype(np.float32)) for rank in group]
            df.allreduce(group, xs)
        with pytest.raises(errors.ExchangeTimeout):
            group.synchronize()
        assert group.workspace.reported()  # kernels mistook the old sums for statuses of failed nodes
