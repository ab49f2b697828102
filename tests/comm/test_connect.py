# SPDX-License-Identifier: Apache-2.0
"""Opening groups across processes: what the ranks must agree on, and that a failure leaves nothing behind on any
rank."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from connected import Ranks, connected, outcomes, together

import drvfuse as df
from drvfuse import config
from drvfuse.comm import agreement
from drvfuse.comm.agreement import Record, agree
from drvfuse.errors import (
    ArgumentError,
    ClosedError,
    DriverError,
    GroupError,
    GroupMismatch,
    GroupTimeout,
    RankEnded,
    Unsupported,
)

pytestmark = pytest.mark.emulated

SET_UP = {
    "cuMemCreate": 1,
    "cuMemExportToShareableHandle": 1,
    "cuMemAddressReserve": 3,
    "cuMemMap": 3,
    "cuMemSetAccess": 3,
    "cuMemImportFromShareableHandle": 2,
    "cuMemHostRegister": 1,
    "cuMemHostGetDevicePointer": 1,
}
"""The driver calls, other than copies and fills, of a rank that opens a group of three."""


@pytest.fixture
def machine() -> Iterator[df.emu.Machine]:
    with df.emu.Machine(devices=4) as machine:
        yield machine


@pytest.fixture
def three(machine: df.emu.Machine) -> Iterator[Ranks]:
    """Three ranks that have not connected."""
    ranks = Ranks(machine, 3)
    yield ranks
    ranks.close()


def descriptors() -> list[str]:
    """The open descriptors of memory in this process, except the pipes of the emulated driver."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            where, writes = os.readlink(f"/proc/self/fd/{name}"), fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_WRONLY
            if "memfd:drvfuse " in where or (where.startswith("pipe:") and writes):
                found.append(where)
    return found


def works(ranks: Ranks, groups: list[df.Group] | None = None) -> None:
    def call(group: df.Group) -> np.ndarray:
        return df.allreduce(group, group[0].array(np.full(64, 1 << group[0].index, np.float32))).numpy()

    used = groups or ranks.groups
    for result in together([lambda group=group: call(group) for group in used]):
        assert (result == (1 << len(used)) - 1).all()


def record(**values: Any) -> Record:
    usual: dict[str, Any] = {
        "host": "h",
        "gpu": "g",
        "device": "d",
        "capability": (9, 0),
        "sm_count": 132,
        "multicast": True,
        "unit": 1 << 21,
        "driver": "cuda 12090",
        "version": "1",
        "workspace_bytes": 4096,
        "max_blocks": None,
        "spin_timeout": 10.0,
        "check_calls": False,
        "tuning": "built in",
        "number": 1,
        "alone": True,
        "filling": (),
        "domain": "h",
        "nodes": "auto",
        "node_order": None,
        "exchange": "None",
    }
    return Record(**{**usual, **values})


def test_a_group_knows_its_world_and_its_own_rank() -> None:
    with connected(3, devices=[2, 0, 1]) as ranks:
        for rank, group in enumerate(ranks.groups):
            assert (group.size, len(group), group[0].index) == (3, 1, rank)
            assert group[0].device.index == [2, 0, 1][rank]
            assert not group.together and group.peers_readable
            assert group.max_blocks == 4
        works(ranks)
        for process in ranks.processes:  # no process has a context on the device of another rank
            assert len(process.contexts()) == 1


def test_no_descriptor_stays_open(machine: df.emu.Machine, three: Ranks) -> None:
    gc.collect()  # frees memory of earlier tests
    before = descriptors()
    three.connect()
    three.each(lambda group: group.symmetric(4096).close())
    # Each of the three ranks maps the memory for hang reports. `mmap` and the emulated driver each keep a descriptor.
    assert len(descriptors()) == len(before) + 6
    for group in three.groups:
        group.close()
    del group
    three.groups.clear()
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize(
    "name, other",
    [
        ("version", "2"),
        ("driver", "cuda 13000"),
        ("workspace_bytes", 8192),
        ("max_blocks", 7),
        ("spin_timeout", 1.0),
        ("check_calls", True),
        ("tuning", "abcd"),
        ("nodes", 3),
        ("node_order", "engine"),
        ("exchange", "'mpi'"),
    ],
)
def test_options_that_must_agree_are_named_with_the_ranks_that_differ(name: str, other: Any) -> None:
    with pytest.raises(GroupMismatch) as caught:
        agree([record(gpu="a"), record(gpu="b", **{name: other}), record(gpu="c")])
    usual = getattr(record(), name)
    assert caught.value.values == {0: str(usual), 1: str(other), 2: str(usual)}
    assert f"ranks 0 and 2: {usual}; rank 1: {other}" in str(caught.value)


def test_a_record_survives_json_and_one_of_another_version_is_refused() -> None:
    assert Record.decode(record(filling=((3, 2),)).encode()) == record(filling=((3, 2),))
    with pytest.raises(GroupMismatch, match="drvfuse's version"):
        agree([record(), Record.decode(b'{"version": "0.0.1", "gpu": "b", "color": "red"}')])


def test_a_gpu_used_by_two_ranks_is_refused_and_both_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"one GPU \(a\) on ranks 0 and 2"):
        agree([record(gpu="a"), record(gpu="b"), record(gpu="a")])


def test_more_than_eight_ranks_of_a_host_and_hosts_of_unequal_size_are_refused() -> None:
    with pytest.raises(ArgumentError, match="9 ranks form a node; it must be such that at most 8 ranks form a node"):
        agree([record(gpu=str(i)) for i in range(9)])
    with pytest.raises(ArgumentError, match="1 on 'h', 2 on 'elsewhere'"):
        agree([record(gpu="a"), *(record(gpu=gpu, domain="elsewhere") for gpu in "bc")])


def test_the_ranks_of_a_host_form_a_node() -> None:
    hosts = ["h", "i", "h", "i"]
    found = agree([record(gpu=str(i), host=host, domain=host) for i, host in enumerate(hosts)])
    assert found.layout.of == (0, 1, 0, 1)
    assert (found.of((1, 3)).gpus, len(found.of((1, 3)).members)) == (("1", "3"), 2)


def test_a_new_group_takes_devices_from_all_ranks_of_a_filling_group_or_is_refused() -> None:
    assert agree([record(gpu="a", filling=((7, 2),)), record(gpu="b", filling=((7, 2),))]).disturbed == (7,)
    with pytest.raises(Unsupported, match="the devices of ranks 0 and 1 belong to an open group of 3 ranks"):
        agree([record(gpu="a", filling=((7, 3),)), record(gpu="b", filling=((7, 3),))])


def test_a_group_takes_its_number_from_rank_0_and_the_largest_granularity() -> None:
    agreed = agree([record(gpu="a", number=5), record(gpu="b", number=6, unit=1 << 22)])
    assert agreed.identity == (5, 2, True) and agreed.unit == 1 << 22
    assert not agree([record(gpu="a", max_blocks=4), record(gpu="b", max_blocks=4)]).identity.alone
    assert not agree([record(gpu="a"), record(gpu="b", alone=False)]).identity.alone


def test_tuned_constants_are_compared_by_their_file(tmp_path: Any) -> None:
    file = tmp_path / "tuning.json"
    with config.override(tuning=str(file)):
        assert agreement._tuning() == "built in"
        file.write_text("{}")
        assert re.fullmatch("[0-9a-f]{16}", agreement._tuning())


def test_ranks_that_differ_all_raise_the_same_error(machine: df.emu.Machine, three: Ranks) -> None:
    before = machine.held()
    found = outcomes([lambda rank=rank: three.open(rank, workspace_bytes=[4096, 4096, 8192]) for rank in range(3)])
    assert all(isinstance(error, GroupMismatch) for error in found)
    (text,) = {str(error) for error in found}
    assert "workspace_bytes" in text and "(ranks 0 and 1: 4096; rank 2: 8192)" in text
    gc.collect()
    assert machine.held() == before


def test_a_wrong_argument_is_raised_on_its_rank_and_named_on_the_others(machine: df.emu.Machine, three: Ranks) -> None:
    found = outcomes([lambda rank=rank: three.open(rank, [0, 9, 2]) for rank in range(3)])
    assert isinstance(found[1], ArgumentError)
    for error in found[0], found[2]:
        assert isinstance(error, GroupError) and error.rank == 1
        assert "open the device failed on rank 1: ArgumentError: index is 9" in str(error)


def test_a_gpu_of_another_rank_is_refused(three: Ranks) -> None:
    found = outcomes([lambda rank=rank: three.open(rank, [0, 1, 0]) for rank in range(3)])
    assert all(isinstance(error, ArgumentError) and "on ranks 0 and 2" in str(error) for error in found)


def test_a_device_without_access_to_another_rank_is_refused() -> None:
    with df.emu.Machine(devices=2, peers=False) as machine:
        ranks = Ranks(machine, 2)
        found = outcomes([lambda rank=rank: ranks.open(rank) for rank in range(2)])
        assert all(isinstance(error, Unsupported) for error in found)
        assert "cannot access the memory of rank 1" in str(found[0])
        ranks.close()


@pytest.mark.parametrize("function", SET_UP)
@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_driver_call_of_one_rank_leaves_nothing_on_any_rank(
    machine: df.emu.Machine, function: str, failing: int
) -> None:
    for place in range(SET_UP[function]):
        ranks = Ranks(machine, 3)
        for rank in range(3):
            df.device(rank, driver=ranks.processes[rank]).stream.synchronize()
        before, open_before = machine.held(), descriptors()
        rule = ranks.processes[failing].inject(function, 2, after=place)
        found = outcomes([lambda rank=rank: ranks.open(rank) for rank in range(3)])  # noqa: B023
        assert not rule.left
        for rank, error in enumerate(found):
            if rank == failing:
                assert isinstance(error, DriverError) and error.call == function
            else:
                assert isinstance(error, GroupError) and error.rank == failing and function in str(error)
        del found, error
        gc.collect()
        assert descriptors() == open_before
        assert machine.held() == before
        ranks.close()


def test_the_failing_calls_cover_every_driver_call_of_a_set_up(
    machine: df.emu.Machine, three: Ranks, counted_calls: Any
) -> None:
    drivers = [df.device(rank, driver=three.processes[rank]).driver for rank in range(3)]
    made = counted_calls(drivers[1], three.connect)
    assert {name: made.count(name) for name in SET_UP} == SET_UP


def test_a_missing_rank_is_named_with_what_the_others_wait_for(machine: df.emu.Machine) -> None:
    ranks = Ranks(machine, 3, timeout=0.2)
    found = outcomes([lambda rank=rank: ranks.open(rank) for rank in (0, 2)])
    for error in found:
        assert isinstance(error, GroupTimeout) and error.missing == (1,)
        assert error.waiting[0] == error.waiting[2] == "open the device"
    ranks.close()


def test_a_rank_that_exits_during_the_set_up_is_named(machine: df.emu.Machine, three: Ranks) -> None:
    original = three.processes[1].driver.cuMemExportToShareableHandle

    def end(*args: Any) -> Any:
        three.boards.end(1)
        return original(*args)

    three.processes[1].driver.cuMemExportToShareableHandle = end
    found = outcomes([lambda rank=rank: three.open(rank) for rank in range(3)])
    for rank in (0, 2):
        error = found[rank]
        assert isinstance(error, RankEnded) and error.rank == 1


def test_a_workspace_of_another_group_is_refused(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 writes the number of another group into its workspace, as if descriptors had been mixed up."""
    numbers = iter(range(100, 200))
    real = agreement.agree

    def other(records: Any) -> Any:
        agreed = real(records)
        import dataclasses

        return dataclasses.replace(agreed, identity=agreed.identity._replace(number=next(numbers)))

    monkeypatch.setattr("drvfuse.comm.connect.agree", other)
    found = outcomes([lambda rank=rank: three.open(rank) for rank in range(3)])
    assert all(isinstance(error, GroupMismatch) and "the owner of a workspace" in str(error) for error in found)


def test_symmetric_memory_of_other_sizes_is_refused_on_all_ranks_and_leaves_nothing(
    machine: df.emu.Machine, three: Ranks
) -> None:
    three.connect()
    before = machine.held()
    wrong = outcomes([lambda group=group: group.symmetric(0 if group[0].index else 4096) for group in three.groups])
    assert isinstance(wrong[1], ArgumentError) and isinstance(wrong[0], GroupError) and wrong[0].rank == 1
    large = 3 << 21
    for error in outcomes([lambda g=g: g.symmetric(large if g[0].index == 2 else 4096) for g in three.groups]):
        assert isinstance(error, GroupMismatch) and f"rank 2: allocate {large} bytes" in str(error)
    gc.collect()
    assert machine.held() == before
    works(three)


def test_closing_a_group_on_one_rank_ends_it_on_the_others(three: Ranks) -> None:
    three.connect()
    works(three)
    three.groups[1].close()
    three.groups[1].close()
    with pytest.raises(ClosedError):
        three.groups[1].check()
    for rank in (0, 2):
        group = three.groups[rank]
        _until_ended(group, 1)
        group.check()
        with pytest.raises(RankEnded, match="rank 1: it has closed the group"):
            df.allreduce(group, group[0].zeros(4, "float32"))


def _until_ended(group: df.Group, rank: int) -> None:
    for _ in range(1000):
        if rank in group.transport.ended:
            return
        time.sleep(0.005)
    raise AssertionError(f"rank {rank} has not ended")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_groups_can_be_closed_in_any_order_and_leave_nothing(machine: df.emu.Machine, order: tuple[int, ...]) -> None:
    ranks, held = Ranks(machine, 3), []
    for _ in range(2):
        ranks.connect()
        works(ranks)
        for rank in order:
            ranks.groups[rank].close()
        gc.collect()
        held.append(machine.held())
    assert held[0] == held[1]
    ranks.close()


def test_a_rank_may_close_while_kernels_of_its_peers_still_use_its_memory(machine: df.emu.Machine) -> None:
    """The driver keeps the memory of a rank that has closed until its peers have unmapped it."""
    ranks = Ranks(machine, 2)
    ranks.connect()

    def call(group: df.Group) -> df.Array | None:
        rank = group[0]
        x = rank.array(np.full(4096, 1 + rank.index, np.float32))
        y = df.allreduce(group, x)
        if rank.index:
            group.close()
            ranks.processes[1].close()
        return None if rank.index else y

    result = together([lambda group=group: call(group) for group in ranks.groups])[0]
    assert (result.numpy() == 3).all()
    ranks.close()
