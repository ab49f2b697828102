# SPDX-License-Identifier: Apache-2.0
"""A device of the driver under test; emulated, it has 6 multiprocessors, so that a block has several rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from one_device import drop_plans, opened

import drvfuse as df
from drvfuse.plans import gemv as gemv_plan


@pytest.fixture(scope="session")
def device(driver: str) -> Iterator[df.Device]:
    with opened(driver, sm_count=6) as made:
        yield made


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans copy rows to shared memory wherever this is possible. By default the tests' short rows would be loaded
    to registers.
    """
    monkeypatch.setattr(gemv_plan, "COPIED_ROW_BYTES", 0)
    monkeypatch.setattr(gemv_plan, "MANY_COPIED_ROW_BYTES", 0)
    monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 0)


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(device: df.Device) -> None:
    drop_plans(device)
