# SPDX-License-Identifier: Apache-2.0
"""A device of the driver under test; emulated, it has 16 multiprocessors, so that blocks take several rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import drvfuse as df
from drvfuse.ops.call.planned import PlanCache
from drvfuse.ops.call.repeat import Repeats


@pytest.fixture(scope="session")
def device(driver: str) -> Iterator[df.Device]:
    if driver == "cuda":
        yield df.device(0, driver="cuda")
        return
    with df.emu.Machine(devices=1, sm_count=16) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(device: df.Device) -> None:
    """Drop the plans of earlier tests, as a test may change how plans are made."""
    device.part(PlanCache).clear()
    device.part(Repeats).clear()
