# SPDX-License-Identifier: Apache-2.0
"""The life of machines: many of them, one after another, and how a machine gets its driver API."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import drvfuse as df
from drvfuse.emu.machine import machine
from drvfuse.emu.machine.run import engine
from drvfuse.emu.space import index
from drvfuse.runtime import calls

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


def test_closed_groups_leave_nothing_but_bounded_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine keeps its last launches, freed allocations and names of operations. With small bounds, these records
    are full at once, and further groups with a call in each leave no object behind."""
    monkeypatch.setattr(machine, "LAUNCHES_KEPT", 4)
    monkeypatch.setattr(index, "_REMEMBERED", 8)
    monkeypatch.setattr(engine, "_IDENTITIES", 8)
    ones = np.ones(64, np.float32)
    with df.emu.Machine(2) as small:

        def left_by(groups: int) -> Counter[type]:
            for _ in range(groups):
                with df.Group.local(2, driver=small, max_blocks=4, workspace_bytes=1 << 20) as group:
                    df.allreduce(group, [rank.array(ones) for rank in group])
                    group.synchronize()
            calls.ring.clear()
            gc.collect()
            kinds = map(type, gc.get_objects())
            return Counter(kind for kind in kinds if str(kind.__module__).startswith("drvfuse."))

        first = left_by(12)
        assert left_by(8) - first == Counter()
