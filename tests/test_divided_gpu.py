# SPDX-License-Identifier: Apache-2.0
"""`divided_gpu`, which presents one device as several. The tests run on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda.bindings import driver as bindings
from divided_gpu import DividedGpu

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError
from drvfuse.runtime.driver import Driver

pytestmark = pytest.mark.emulated


@pytest.fixture
def divided() -> Iterator[Driver]:
    """The driver of an emulated GPU of 16 multiprocessors that is divided into four devices."""
    with df.emu.Machine(devices=1, sm_count=16, race=True) as machine:
        api = Driver("emu", DividedGpu(machine.driver, "4"), bindings, machine)
        api.cuInit(0)
        machine.runtime_driver = api
        yield api
        assert not machine.reports


def test_each_device_has_its_part_of_the_multiprocessors_and_its_own_context(divided: Driver) -> None:
    devices = [df.device(index, driver=divided) for index in range(4)]
    assert [device.sm_count for device in devices] == [4] * 4
    assert len({int(device.context) for device in devices}) == 4
    assert len({bytes(divided.cuDeviceGetUuid(device.handle).bytes) for device in devices}) == 4


@pytest.mark.parametrize("algo", ["one_stage", "push_two_shot", "naive"])
def test_ranks_on_one_gpu_run_at_once_and_their_sums_are_exact(
    divided: Driver, rng: np.random.Generator, algo: str
) -> None:
    hosts = [rng.standard_normal((3, 264)).astype(np.float32) for _ in range(4)]
    with df.Group.local(4, driver=divided, max_blocks=4) as group:
        results = df.allreduce(group, [rank.array(host) for rank, host in zip(group, hosts, strict=True)], algo=algo)
        group.synchronize()
        for rank, result in zip(group, results, strict=True):
            assert result.device.index == rank.index
            assert result.numpy().tobytes() == reference.allreduce(hosts).tobytes()


def test_memory_belongs_to_the_device_for_which_it_was_made(divided: Driver) -> None:
    array = df.device(2, driver=divided).zeros(8, "float32")
    assert divided.pointer_device(array.ptr) == 2
    with df.Group.local([0], driver=divided, max_blocks=4) as group, pytest.raises(ArgumentError, match="device 2"):
        df.allreduce(group, [array])
