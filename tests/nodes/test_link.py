# SPDX-License-Identifier: Apache-2.0
"""An exchange that does not end: the watchdog, the error on every call until a reset, and what graphs then do."""

from __future__ import annotations

import time

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config, errors, reference
from drvfuse.nodes.in_process import InProcess

pytestmark = pytest.mark.emulated


class Watched(InProcess):
    """An exchange engine for which the group must enforce its time limit. It counts the calls of its methods."""

    name = "a watched engine"
    watched = True

    def __init__(self):
        super().__init__()
        self.opened = self.aborted = self.closed = 0

    def open(self, *arguments):
        super().open(*arguments)
        self.opened += 1

    def abort(self):
        self.aborted += 1

    def close(self):
        super().close()
        self.closed += 1


@pytest.fixture
def group():
    with (
        config.override(spin_timeout=0.5),
        df.emu.Machine(devices=4) as machine,
        df.Group.local(4, driver=machine, nodes=2, exchange=Watched(), max_blocks=2) as group,
    ):
        yield group


def call(group):
    hosts = [np.full(64, rank + 0.5, np.float32) for rank in range(4)]
    ys = df.allreduce(group, [rank.array(host) for rank, host in zip(group, hosts, strict=True)])
    for y in ys:
        assert (y.numpy() == reference.allreduce(hosts, nodes=2)).all()


def hang(group, position=3):
    """Make the exchange of a rank appear unfinished. Returns the error that the watchdog raises."""
    group.link.words["begun"][position] += 1
    deadline = time.monotonic() + 10
    while group.link.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return group.link.failure


def test_an_exchange_that_does_not_end_is_aborted_and_named(group):
    call(group)
    began = time.monotonic()
    error = hang(group)
    assert time.monotonic() - began >= 0.5
    assert isinstance(error, errors.ExchangeTimeout)
    assert (error.rank, error.node, error.peers, error.engine) == (3, 1, (1,), "a watched engine")
    assert (
        "rank 3: the exchange between nodes by a watched engine of node 1 with rank 1 did not end within 0.5 s"
        in str(error)
    )
    assert group.link.engine.aborted == 1


def test_every_host_call_raises_the_abort_until_the_group_is_reset(group):
    call(group)
    error = hang(group)
    for raises in (group.check, group.synchronize, group[0].synchronize):
        with pytest.raises(errors.ExchangeTimeout) as caught:
            raises()
        assert caught.value is error
    group.reset()
    group.check()
    call(group)
    assert (group.link.engine.opened, group.link.engine.closed) == (2, 1)


def test_after_an_aborted_exchange_the_first_call_raises_and_the_second_resets(group):
    call(group)
    hang(group)
    with pytest.raises(errors.ExchangeTimeout):
        call(group)
    call(group)
    assert group.link.engine.opened == 2
    hang(group)  # the watchdog runs again


def test_exchanges_that_end_are_never_aborted(group):
    with config.override(spin_timeout=2.0):
        for _ in range(20):
            call(group)
            time.sleep(0.02)
    assert group.link.engine.aborted == 0 and group.link.failure is None


def test_a_graph_captured_before_the_reset_is_refused(group):
    xs = [rank.zeros(64, "float32") for rank in group]
    prepared = df.allreduce.prepare(group, xs)
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        prepared.launch()
        prepared.launch()
    graph.launch(group[0].stream)
    group.reset()
    with pytest.raises(errors.CaptureError, match=r"group\.reset\(\) has replaced; capture it again"):
        graph.launch(group[0].stream)
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        prepared.launch()
    graph.launch(group[0].stream)
    group.synchronize()


def test_a_time_out_inside_a_node_names_ranks_of_the_whole_group(group):
    """A kernel's report names ranks 0 and 1 of node 1, which are ranks 2 and 3 of the group."""
    call(group)
    reports = group.workspace.reports
    reports["rank"][2], reports["peer"][2], reports["phase"][2], reports["expected"][2] = 0, 1, 1, 1
    reports["magic"][2] = 0x44525646
    with pytest.raises(errors.BarrierTimeout) as caught:
        group.check()
    assert (caught.value.rank, caught.value.peer) == (2, 3)
    group.reset()
    call(group)


@pytest.mark.parametrize("kernel", [0, 1])
def test_a_time_out_in_either_kernel_names_the_call(group, kernel):
    """All ranks launch the first `kernel` kernels of the call, and rank 2 launches one more."""
    call(group)
    prepared = df.allreduce.prepare(group, [rank.zeros(64, "float32") for rank in group])
    group.state.begin(range(4), prepared)
    for rank, launches in zip(group, prepared.launches, strict=True):
        for launch in launches[: kernel + (rank.index == 2)]:
            launch(rank.stream)
    with pytest.raises(errors.BarrierTimeout, match="in call 2 of the group, allreduce two_stage of 4 x") as caught:
        group.synchronize()
    assert (caught.value.rank, caught.value.peer) == (2, 3)
    call(group)


def test_an_engine_that_fails_to_connect_leaves_nothing_open():
    class Failing(Watched):
        def open(self, *arguments):
            raise errors.ExchangeError(1, self.name, "did not connect within 1 s; a rank of another node is missing")

    failing = Failing()
    with df.emu.Machine(devices=2) as machine:
        for device in range(2):
            df.device(device, driver=machine).stream.synchronize()
        before = machine.held()
        for _ in range(3):
            with pytest.raises(
                errors.ExchangeError, match="rank 1: the exchange between nodes by a watched engine did not"
            ):
                df.Group.local(2, driver=machine, nodes=2, exchange=failing)
            assert machine.held() == before
        assert failing.closed == 3
        with df.Group.local(2, driver=machine, nodes=2, exchange=Watched(), max_blocks=132):
            pass


def test_a_group_closes_its_engine():
    engine = Watched()
    with df.emu.Machine(devices=2) as machine, df.Group.local(2, driver=machine, nodes=2, exchange=engine) as group:
        df.allreduce(group, [rank.zeros(8, "float32") for rank in group])
    assert engine.closed == 1


@pytest.mark.parametrize("op", [df.all_gather, df.reduce_scatter])
def test_an_exchange_of_bytes_that_does_not_end_is_aborted_and_named(group, op):
    xs = [rank.zeros((4, 64), "float32") for rank in group]
    op(group, xs)
    group.synchronize()
    assert (group.link.words["sending"] == group.link.words["received"]).all()
    assert (group.link.words["sending"] > 0).all()
    group.link.words["sending"][2] += 1
    deadline = time.monotonic() + 10
    while group.link.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(errors.ExchangeTimeout) as caught:
        op(group, xs)
    assert (caught.value.rank, caught.value.node, caught.value.peers) == (2, 1, (0,))
    op(group, xs)
    group.synchronize()


class Failing(Watched):
    """An exchange engine that raises in its second exchange of bytes."""

    def __init__(self):
        super().__init__()
        self.left = 2

    def all_to_all(self, parts):
        self.left -= 1
        if self.left == 0:
            raise errors.ExchangeError(2, self.name, "failed")
        super().all_to_all(parts)


@pytest.mark.parametrize("op", [df.all_to_all, df.reduce_scatter])
def test_after_an_exchange_of_bytes_has_failed_the_next_call_connects_the_engine_anew(rng, op):
    """The call is in two chunks, of which the first is queued when the engine fails."""
    hosts = [rng.integers(-99, 99, (8, 375)).astype(np.float32) for _ in range(4)]
    expected = reference.all_to_all(hosts) if op is df.all_to_all else reference.reduce_scatter(hosts)
    with (
        df.emu.Machine(devices=4, race=True) as machine,
        df.Group.local(4, driver=machine, nodes=2, exchange=Failing(), max_blocks=2, workspace_bytes=4096) as group,
    ):
        xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        prepared = op.prepare(group, xs)
        with pytest.raises(errors.ExchangeError, match="by a watched engine failed"):
            prepared.launch()
        for call in (lambda: op(group, xs), prepared.launch):
            for found, wanted in zip(call(), expected, strict=True):
                assert (found.numpy() == wanted).all()
        assert (group.link.engine.opened, group.link.failure) == (2, None)
        assert (group.link.words["sending"] == group.link.words["received"]).all()
        assert not machine.reports


def test_a_time_out_in_a_later_kernel_names_the_call(group):
    """All ranks launch the first of the two kernels of a broadcast, and rank 2 launches the second too."""
    xs = [rank.zeros(4096, "uint8") for rank in group]
    df.broadcast(group, xs)
    prepared = df.broadcast.prepare(group, xs, [rank.zeros(4096, "uint8") for rank in group])
    group.state.begin(range(4), prepared)
    for rank, launches in zip(group, prepared.launches, strict=True):
        for launch in launches[: 1 + (rank.index == 2)]:
            launch(rank.stream)
    with pytest.raises(errors.BarrierTimeout, match="in call 2 of the group, broadcast auto of 4 x") as caught:
        group.synchronize()
    assert (caught.value.rank, caught.value.peer) == (2, 3)


def test_the_watchdog_ends_with_a_group_whose_device_is_lost():
    with df.emu.Machine(devices=2) as machine:
        group = df.Group.local(2, driver=machine, nodes=2, exchange=Watched())
        df.allreduce(group, [rank.zeros(8, "float32") for rank in group])
        watchdog = group.link._watchdog._thread
        broken = df.compile('extern "C" __global__ void broken(int* p) { *p = 1; }', driver=machine)
        broken["broken"].prepare(1, 1, 16, device=group[0].device)(group[0].stream)
        with pytest.raises(errors.DriverError, match="ILLEGAL_ADDRESS"):
            group.close()
        assert not watchdog.is_alive()
