# SPDX-License-Identifier: Apache-2.0
"""The exchange engine on NCCL, with a stand-in for nccl4py: what it calls, and that every wait is bounded."""

from __future__ import annotations

import sys
import threading
import types

import numpy as np
import pytest

import drvfuse as df
from drvfuse import errors, reference
from drvfuse.nodes.layout import Nodes
from drvfuse.nodes.nccl import Nccl, _refuse_multicast

pytestmark = pytest.mark.emulated
UINT8, FLOAT32, BYTES = 1, 7, 4


class NCCLError(Exception):
    pass


class Stand:
    """A stand-in for `nccl.bindings.nccl`, with communicators of one process; `group_end` exchanges on the host."""

    NCCLError = NCCLError

    class Config:
        blocking = -1

    class UniqueId:
        def __init__(self, text=b""):
            self.text = text

        def __bytes__(self):
            return self.text

        @classmethod
        def from_buffer(cls, text):
            return cls(bytes(text))

    def __init__(self, device):
        self.device, self.driver, self.ids, self.depth, self.calls, self.queued = device, device.driver, 0, 0, [], []
        self.messages: list = []  # (communicator, True if sent or False if received, address, bytes, peer, stream)
        self.states: dict[object, list[int]] = {}
        self.answers: list[int] = []  # results of the next calls of comm_get_async_error; later ones return 0

    def get_version(self):
        return 22703

    def get_unique_id(self):
        self.ids += 1
        return Stand.UniqueId(b"%d" % self.ids)

    def group_start(self):
        self.depth += 1

    def group_end(self):
        self.depth -= 1
        with self.device.use():
            self.exchange()
            self.deliver()

    def send(self, address, count, kind, peer, communicator, stream):
        assert kind == UINT8 and self.depth == 1
        self.messages.append((communicator, True, address, count, peer, stream))

    def recv(self, address, count, kind, peer, communicator, stream):
        assert kind == UINT8 and self.depth == 1
        self.messages.append((communicator, False, address, count, peer, stream))

    def deliver(self):
        """Copy the messages of each pair of ranks in their order, through host memory."""
        messages, self.messages = self.messages, []
        for *_, stream in messages:
            self.driver.cuStreamSynchronize(stream)
        values = []
        for (rail, node, _), sends, address, count, peer, _ in messages:
            if sends:
                host = np.empty(count, np.uint8)
                self.driver.cuMemcpyDtoH(host.ctypes.data, address, count)
                values.append((rail, node, peer, host))
        for (rail, node, _), sends, address, count, peer, _ in messages:
            if not sends:
                found = next(value for value in values if value[:3] == (rail, peer, node))
                values = [value for value in values if value is not found]
                assert found[3].nbytes == count
                self.driver.cuMemcpyHtoD(address, found[3].ctypes.data, count)
        assert not values

    def exchange(self):
        rails: dict[bytes, list] = {}
        for work in self.queued:
            rails.setdefault(work[0][0], []).append(work)
        self.queued = []
        for rail in rails.values():
            size = rail[0][0][2]
            assert len(rail) == size, "a rank of the rail is missing"
            values = []
            for (_, node, _), send, _, count, stream in rail:
                self.driver.cuStreamSynchronize(stream)
                host = np.empty(count, np.float32)
                self.driver.cuMemcpyDtoH(host.ctypes.data, send, host.nbytes)
                values.append((node, host))
            gathered = np.concatenate([host for _, host in sorted(values, key=lambda pair: pair[0])])
            for _, _, receive, _, _ in rail:
                self.driver.cuMemcpyHtoD(receive, gathered.ctypes.data, gathered.nbytes)

    def comm_init_rank_config(self, size, identity, rank, config):
        assert config.blocking == 0 and self.depth == 1
        self.calls.append("init")
        return (bytes(identity), rank, size)

    def all_gather(self, send, receive, count, kind, communicator, stream):
        assert kind == FLOAT32 and self.depth == 1 and send == receive + BYTES * count * communicator[1]
        self.queued.append((communicator, send, receive, count, stream))

    def comm_get_async_error(self, communicator):
        return self.answers.pop(0) if self.answers else 0

    def get_last_error(self, communicator):
        return "the last error"

    def get_error_string(self, code):
        return f"result {code}"

    def comm_abort(self, communicator):
        self.calls.append("abort")


@pytest.fixture
def stand(monkeypatch):
    """The stand-in for NCCL, with a machine of 4 devices."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    with df.emu.Machine(devices=4) as machine:
        stand = Stand(df.device(0, driver=machine))
        bindings = types.ModuleType("nccl.bindings")
        bindings.nccl = stand
        monkeypatch.setitem(sys.modules, "nccl", types.ModuleType("nccl"))
        monkeypatch.setitem(sys.modules, "nccl.bindings", bindings)
        stand.machine = machine
        yield stand


@pytest.mark.parametrize("setting", [None, "1", ""])
def test_nodes_of_one_host_are_refused_where_nccl_might_make_multicast_objects(stand, monkeypatch, setting):
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    if setting is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", setting)
    monkeypatch.setattr(stand, "comm_init_rank_config", None)  # must not be called
    with pytest.raises(errors.Unsupported, match="set NCCL_NVLS_ENABLE=0 in the environment of all processes"):
        open_group(stand)


def test_nvls_on_one_rank_is_refused_on_one_host_and_allowed_between_hosts():
    nodes = Nodes((0, 0, 1, 1))
    _refuse_multicast(nodes, ["a with NVLS", "a with NVLS", "b with NVLS", "b"])
    _refuse_multicast(nodes, ["a", "a", "a", "a"])
    with pytest.raises(errors.Unsupported, match="NCCL_NVLS_ENABLE"):
        _refuse_multicast(nodes, ["a", "a", "a", "a with NVLS"])


def open_group(stand, **options):
    return df.Group.local(4, driver=stand.machine, nodes=2, exchange=Nccl(), max_blocks=2, **options)


def test_communicators_join_the_ranks_with_equal_positions_in_their_nodes(stand):
    with open_group(stand) as group:
        engine = group.link.engine
        made = engine._communicators
        assert made == {0: (b"1", 0, 2), 1: (b"2", 0, 2), 2: (b"1", 1, 2), 3: (b"2", 1, 2)}
    assert stand.calls == ["init"] * 4 + ["abort"] * 4


def test_nccl_is_called_with_the_right_buffers_counts_and_peers(stand, rng):
    with open_group(stand) as group:
        hosts = [rng.standard_normal(3000).astype(np.float32) for _ in range(4)]
        ys = df.allreduce(group, [rank.array(host) for rank, host in zip(group, hosts, strict=True)])
        for y in ys:
            assert (y.numpy() == reference.allreduce(hosts, nodes=2)).all()


def test_bytes_are_sent_and_received_in_one_group(stand, rng):
    with open_group(stand) as group:
        splits = [[1, 0, 2, 3], [4, 1, 1, 0], [0, 0, 5, 1], [2, 2, 2, 2]]
        hosts = [rng.integers(0, 256, (sum(of_rank), 37), np.uint8) for of_rank in splits]
        xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        found = df.all_to_all(group, xs, splits=splits)
        for y, expected in zip(found, reference.all_to_all(hosts, splits), strict=True):
            assert (y.numpy() == expected).all()
        for y in df.all_gather(group, xs, splits=[len(host) for host in hosts]).output:
            assert (y.numpy() == reference.all_gather(hosts)).all()


def test_asynchronous_steps_of_nccl_are_waited_for(stand):
    with open_group(stand) as group:
        stand.answers = [7, 7, 0, 7]
        df.allreduce(group, [rank.zeros(8, "float32") for rank in group])
        assert not stand.answers


def test_a_rank_that_never_connects_is_an_error_within_the_time_out(stand, monkeypatch):
    monkeypatch.setattr("drvfuse.comm.group._LOCAL_SECONDS", 0.1)
    stand.answers = [7] * 100_000
    with pytest.raises(
        errors.ExchangeError, match=r"rank 0: .* by NCCL did not connect within 0.1 s; a rank of another"
    ):
        open_group(stand)
    assert stand.calls[-4:] == ["abort"] * 4


def test_an_error_of_nccl_is_named(stand, monkeypatch):
    with open_group(stand) as group:
        xs = [rank.zeros(8, "float32") for rank in group]
        stand.answers = [3]
        with pytest.raises(errors.ExchangeError, match=r"by NCCL failed: result 3 \(the last error\)"):
            df.allreduce(group, xs)
        df.allreduce(group, xs)  # this call resets the group first
        assert stand.calls.count("init") == 8

        def broken(*arguments):
            raise NCCLError("SystemError (2)")

        monkeypatch.setattr(stand, "all_gather", broken)
        with pytest.raises(errors.ExchangeError, match=r"failed: SystemError \(2\) \(the last error\)"):
            df.allreduce(group, xs)


def test_an_error_in_making_an_id_is_named_and_a_failed_connection_leaves_nothing(stand, monkeypatch):
    def broken(*arguments):
        raise NCCLError("SystemError (2)")

    with monkeypatch.context() as patch:
        patch.setattr(stand, "get_unique_id", broken)
        with pytest.raises(errors.ExchangeError, match=r"by NCCL failed: SystemError \(2\)"):
            open_group(stand)
    monkeypatch.setattr(stand, "group_end", broken)
    with pytest.raises(errors.ExchangeError, match=r"by NCCL failed: SystemError \(2\)"):
        open_group(stand)
    assert stand.calls == ["init"] * 4 + ["abort"] * 4


def test_an_abort_while_a_thread_waits_for_nccl_is_the_error_of_that_thread(stand, monkeypatch):
    monkeypatch.setattr("drvfuse.nodes.nccl._ABORT_PATIENCE", 0.05)
    with open_group(stand) as group:
        xs = [rank.zeros(8, "float32") for rank in group]

        def aborting(communicator):
            thread = threading.Thread(target=group.link.engine.abort)
            thread.start()
            thread.join()
            return 7

        monkeypatch.setattr(stand, "comm_get_async_error", aborting)
        with pytest.raises(errors.ExchangeError, match=r"was aborted; group.reset\(\) connects the ranks again"):
            df.allreduce(group, xs)


def test_after_an_abort_calls_are_refused_until_the_group_is_reset(stand):
    with open_group(stand) as group:
        xs = [rank.zeros(8, "float32") for rank in group]
        group.link.engine.abort()
        with pytest.raises(errors.ExchangeError, match=r"was aborted; group.reset\(\) connects the ranks again"):
            df.allreduce(group, xs)
        group.reset()
        df.allreduce(group, xs)


def test_an_abort_does_not_wait_for_a_thread_that_is_stuck_in_nccl(stand, monkeypatch):
    monkeypatch.setattr("drvfuse.nodes.nccl._ABORT_PATIENCE", 0.05)
    with open_group(stand) as group:
        engine = group.link.engine
        with engine._lock:
            engine.abort()
        assert stand.calls.count("abort") == 4
