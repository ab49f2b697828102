# SPDX-License-Identifier: Apache-2.0
"""The life of machines: many of them, one after another, and how a machine gets its driver API."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import drvfuse as df

pytestmark = pytest.mark.emulated

SOURCE = 'extern "C" __global__ void k(int* p) { p[threadIdx.x] = threadIdx.x; }'


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_many_machines_are_made_and_dropped_without_being_closed(no_collector: None) -> None:
    """Each machine reserves a window of addresses, and the window of a dropped machine is reused."""
    for _ in range(60):
        machine = df.emu.Machine(2)
        device = df.device(0, driver=machine)
        array = device.zeros(32, "int32")
        df.compile(SOURCE, driver=machine)["k"].prepare(1, 32, array)(device.stream)
        np.testing.assert_array_equal(array.numpy(), np.arange(32))
        with df.Group.local(2, driver=machine):
            pass


def test_a_machine_that_no_one_refers_to_frees_its_memory_window() -> None:
    machine = df.emu.Machine(1)
    window = weakref.ref(machine.window)
    device = df.device(0, driver=machine)
    array = device.zeros(32, "int32")
    df.compile(SOURCE, driver=machine)["k"].prepare(1, 32, array)(device.stream)
    device.synchronize()
    del machine, device, array
    gc.collect()
    assert window() is None


@pytest.mark.parametrize(
    "line",
    [
        "from drvfuse.emu.machine.machine import Machine",
        "from drvfuse.emu import Machine",
        "from drvfuse.emu.space import window; from drvfuse.emu.machine.machine import Machine",
    ],
)
def test_a_machine_has_its_driver_however_it_is_imported(line: str) -> None:
    code = f"{line}\nprint(int(Machine(3).driver.cuInit(0)[0]))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "0\n"
