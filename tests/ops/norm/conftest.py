# SPDX-License-Identifier: Apache-2.0
"""A device of the driver under test; emulated, it has 8 multiprocessors, so that 17 rows are many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from one_device import opened

import drvfuse as df


@pytest.fixture(scope="session")
def device(driver: str) -> Iterator[df.Device]:
    with opened(driver, sm_count=8) as made:
        yield made
