# SPDX-License-Identifier: Apache-2.0
"""A device of the driver under test; emulated, it has 16 multiprocessors, so that blocks take several rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from one_device import drop_plans, opened

import drvfuse as df


@pytest.fixture(scope="session")
def device(driver: str) -> Iterator[df.Device]:
    with opened(driver, sm_count=16) as made:
        yield made


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(device: df.Device) -> None:
    drop_plans(device)
