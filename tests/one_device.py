# SPDX-License-Identifier: Apache-2.0
"""What the tests of ops on one device share: opening the device under test, and dropping its plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import drvfuse as df
from drvfuse.ops.call.planned import PlanCache
from drvfuse.ops.call.repeat import Repeats


@contextmanager
def opened(driver: str, sm_count: int) -> Iterator[df.Device]:
    """A device of the driver under test. An emulated one has `sm_count` multiprocessors and must report nothing."""
    if driver == "cuda":
        yield df.device(0, driver="cuda")
        return
    with df.emu.Machine(devices=1, sm_count=sm_count) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports


def drop_plans(device: df.Device) -> None:
    """Drop the plans of earlier tests, as a test may change how plans are made."""
    device.part(PlanCache).clear()
    device.part(Repeats).clear()
