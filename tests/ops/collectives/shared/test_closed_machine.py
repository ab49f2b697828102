# SPDX-License-Identifier: Apache-2.0
"""Objects of a closed emulated machine, whose memory is gone: every use is a ClosedError, and closing is harmless."""

from __future__ import annotations

import pytest

import drvfuse as df
from drvfuse.errors import ClosedError


def test_every_use_is_a_closed_error_and_closing_is_harmless():
    machine = df.emu.Machine(devices=2)
    device = df.device(0, driver=machine)
    array, stream, event = device.zeros((4,), "float32"), df.Stream(device), device.stream.record()
    group = df.Group.local(2, driver=machine)
    xs = [rank.zeros(64, "float32") for rank in group]
    call, buffer = df.allreduce.prepare(group, xs), group.symmetric(64)
    machine.close()
    uses = {
        "array": array.numpy,
        "device": device.synchronize,
        "allocation": lambda: device.empty(4, "float32"),
        "stream": stream.synchronize,
        "query": stream.query,
        "event": event.synchronize,
        "launch": call.launch,
        "call": lambda: df.allreduce(group, xs),
        "check": group.check,
        "synchronize": group.synchronize,
        "reset": group.reset,
        "open a device": lambda: df.device(1, driver=machine),
        "open a group": lambda: df.Group.local(1, driver=machine),
    }
    for what, use in uses.items():
        with pytest.raises(ClosedError, match="closed"):
            use()
            pytest.fail(what)
    for owner in (buffer, event, stream, group, device):
        owner.close()
        owner.close()


def test_a_machine_closed_before_its_first_use_raises_closed_errors():
    machine = df.emu.Machine(devices=1)
    machine.close()
    with pytest.raises(ClosedError, match="closed"):
        df.device(0, driver=machine)


@pytest.mark.parametrize("race", [False, True])
def test_the_reports_of_a_closed_machine_stay_readable_and_its_memory_is_refused(race):
    with df.emu.Machine(devices=1, race=race) as machine:
        array = df.device(0, driver=machine).zeros((4,), "float32")
        array.numpy()
        pointer = array.ptr
    for use in (lambda: machine.declare_polled(pointer, 16), lambda: machine.declare_polled(array)):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert machine.reports == [] and machine.counters().json() == {"kernels": []} and machine.clock() == 0
    other = df.emu.Machine(devices=1)
    other.close()
    assert other.clock() == 0
    with pytest.raises(ClosedError, match="closed"):
        _ = other.engine
