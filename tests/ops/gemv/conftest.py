# SPDX-License-Identifier: Apache-2.0
"""A device of the driver under test; emulated, it has 6 multiprocessors, so that a block has several rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import drvfuse as df
from drvfuse.ops.call.planned import PlanCache
from drvfuse.ops.call.repeat import Repeats
from drvfuse.plans import gemv as gemv_plan


@pytest.fixture(scope="session")
def device(driver: str) -> Iterator[df.Device]:
    if driver == "cuda":
        yield df.device(0, driver="cuda")
        return
    with df.emu.Machine(devices=1, sm_count=6) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are copied to shared memory wherever they can be; else the small ones of the tests would be loaded."""
    monkeypatch.setattr(gemv_plan, "COPIED_ROW_BYTES", 0)
    monkeypatch.setattr(gemv_plan, "MANY_COPIED_ROW_BYTES", 0)
    monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 0)


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(device: df.Device) -> None:
    """Drop the plans of earlier tests, as a test may change how plans are made."""
    device.part(PlanCache).clear()
    device.part(Repeats).clear()
