# SPDX-License-Identifier: Apache-2.0
"""The text of errors after a kernel has failed, and the recovery that it describes."""

from __future__ import annotations

import numpy as np
import pytest

import drvfuse as df
from drvfuse.errors import DriverError
from drvfuse.runtime.driver import get_driver
from drvfuse.runtime.lifetime import flush

SOURCE = r"""
extern "C" __global__ void first(float* p) { p[1 << 20] = 1; }
extern "C" __global__ void second(float* p) { p[1 << 21] = 1; }
extern "C" __global__ void right(float* p) { p[threadIdx.x] = 3; }
"""


@pytest.fixture
def machine():
    with df.emu.Machine(devices=2) as made:
        yield made


def fault(machine: df.emu.Machine, index: int, kernel: str) -> DriverError:
    device = df.device(index, driver=machine)
    array = device.zeros((32,), "float32")
    df.compile(SOURCE, driver=machine)[kernel].prepare(1, 32, array)(device.stream)
    with pytest.raises(DriverError) as caught:
        device.stream.synchronize()
    return caught.value


def test_the_error_holds_the_report_of_the_device_that_failed(machine):
    assert "kernel first, device 0" in fault(machine, 0, "first").explanation
    assert "kernel second, device 1" in fault(machine, 1, "second").explanation
    with pytest.raises(DriverError) as caught:
        df.device(0, driver=machine).synchronize()
    assert "kernel first, device 0" in caught.value.explanation
    assert "second" not in caught.value.explanation


def test_an_error_of_a_healthy_device_or_call_holds_no_report(machine):
    fault(machine, 0, "first")
    api = get_driver(machine)
    with df.device(1, driver=machine).use(), pytest.raises(DriverError) as caught:
        api.cuMemFree(0x1234)
    assert "kernel first" not in caught.value.explanation


def test_the_text_of_the_emulated_driver_says_how_to_go_on(machine):
    text = fault(machine, 0, "first").explanation
    assert "Device.close()" in text and "fresh drvfuse.emu.Machine" in text and "driver='emu'" not in text


def test_the_recovery_that_the_text_describes_works(machine):
    fault(machine, 0, "first")
    df.device(0, driver=machine).close()
    device = df.device(0, driver=machine)
    array = device.zeros((32,), "float32")
    df.compile(SOURCE, driver=machine)["right"].prepare(1, 32, array)(device.stream)
    assert (array.numpy() == np.float32(3)).all()
    with df.emu.Machine(devices=1) as fresh:
        assert df.device(0, driver=fresh).zeros((4,), "float32").numpy().sum() == 0


SPIN = 'extern "C" __global__ void spin(volatile unsigned* flag) { while (!*flag) {} }'


def launch_spin(group: df.Group) -> None:
    flag = group.ranks[0].zeros((1,), "uint32")
    df.compile(SPIN, driver=group.driver)["spin"].prepare(1, 32, flag)(group.ranks[0].stream)


def test_leaving_a_group_after_a_deadlock_that_was_caught_raises_nothing(machine):
    with df.Group.local(2, driver=machine) as group:
        launch_spin(group)
        with pytest.raises(DriverError, match="cuStreamSynchronize"):
            group.synchronize()


def test_leaving_a_group_raises_an_unseen_deadlock(machine):
    with pytest.raises(DriverError, match="cuStreamSynchronize"), df.Group.local(2, driver=machine) as group:
        launch_spin(group)


def test_leaving_a_group_raises_a_fault_that_only_a_cleanup_has_seen(machine):
    with pytest.raises(DriverError), df.Group.local(2, driver=machine) as group:
        device = group.ranks[0].device
        array = device.zeros((32,), "float32")
        launch_spin(group)
        with device.use():
            get_driver(machine).result("cuCtxSynchronize")
        del array
        flush(get_driver(machine))
