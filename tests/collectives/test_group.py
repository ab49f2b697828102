# SPDX-License-Identifier: Apache-2.0
"""Groups: their ranks, budgets and memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import drvfuse as df
from drvfuse.errors import ArgumentError, Unsupported


@pytest.mark.gpus(3)
def test_ranks_are_in_the_order_of_the_devices(new_group):
    group = new_group([2, 0, 1])
    assert group.size == len(group) == 3
    assert [rank.index for rank in group] == [0, 1, 2]
    assert [rank.device.index for rank in group.ranks] == [2, 0, 1]
    assert group[1].device.index == 0
    assert group.peers_readable
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    for rank in group:
        array = rank.array(host)
        assert array.device is rank.device
        assert np.array_equal(array.numpy(), host)
        assert not rank.zeros((2, 2), "int32").numpy().any()
        assert rank.empty(5, "bfloat16").shape == (5,)
    group.synchronize()


def test_number_of_devices(new_group):
    group = new_group(1)
    assert len(group) == 1


@pytest.mark.parametrize(
    "devices,text",
    [
        (0, "from 1 to 8"),
        ([], "from 1 to 8"),
        (9, "from 1 to 8"),
        (range(9), "from 1 to 8"),
        (-1, "at least 0"),
        ([0, 0], "distinct"),
        ([0, 99], "present"),
        ([0, -1], "at least 0"),
        ("2", "integer"),
        (1.0, "integer"),
        (True, "integer"),
    ],
)
def test_devices_that_cannot_be_a_group(driver, devices, text):
    with pytest.raises(ArgumentError, match=text) as caught:
        df.Group.local(devices, driver=driver)
    assert caught.value.argument == "devices"


@pytest.mark.parametrize(
    "options,argument",
    [
        ({"workspace_bytes": 100}, "workspace_bytes"),
        ({"workspace_bytes": 1e6}, "workspace_bytes"),
        ({"max_blocks": 0}, "max_blocks"),
        ({"max_blocks": 257}, "max_blocks"),
        ({"driver": "opencl"}, "driver"),
    ],
)
def test_options_that_are_wrong(driver, options, argument):
    with pytest.raises(ArgumentError) as caught:
        df.Group.local(1, **{"driver": driver, **options})
    assert caught.value.argument == argument


@pytest.mark.emu
def test_block_budgets_of_open_groups_sum_to_the_multiprocessors():
    with df.emu.Machine(devices=2, sm_count=20) as machine:
        first = df.Group.local(2, driver=machine, max_blocks=12)
        assert first.max_blocks == 12
        with pytest.raises(ArgumentError, match="hold 12 of them; close a group") as caught:
            df.Group.local([1], driver=machine, max_blocks=9)
        assert caught.value.argument == "max_blocks"
        second = df.Group.local([1], driver=machine, max_blocks=8)
        first.close()
        third = df.Group.local(2, driver=machine, max_blocks=12)
        second.close()
        third.close()
        with df.Group.local(2, driver=machine) as group:
            assert group.max_blocks == 20


@pytest.mark.emu
def test_a_collected_group_gives_its_blocks_back():
    with df.emu.Machine(devices=1, sm_count=8) as machine:
        group = df.Group.local(1, driver=machine, max_blocks=8)
        array = group.ranks[0].array(np.ones(4, np.float32))
        del group
        gc.collect()
        with df.Group.local(1, driver=machine, max_blocks=8) as group:
            assert group.max_blocks == 8
        assert array.numpy().sum() == 4


@pytest.mark.gpus(2)
def test_symmetric_memory(open_group):
    group = open_group(2)
    with group.symmetric(100) as buffer:
        assert len(set(buffer.ptrs)) == 2
        assert buffer.multicast_ptr is None
        views = [df.view(p, 25, "float32", rank.device) for p, rank in zip(buffer.ptrs, group, strict=True)]
        for number, view in enumerate(views):
            view.copy_from(np.full(25, number, np.float32))
        for number, view in enumerate(views):
            assert np.array_equal(view.numpy(), np.full(25, number, np.float32))
    with pytest.raises(Unsupported, match="multicast"):
        group.symmetric(100, multicast=True)
    with pytest.raises(ArgumentError):
        group.symmetric(0)
