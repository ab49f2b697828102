# SPDX-License-Identifier: Apache-2.0
"""A device of the driver under test; emulated, it has 8 multiprocessors, so that 17 rows are many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import drvfuse as df


@pytest.fixture(scope="session")
def device(driver: str) -> Iterator[df.Device]:
    if driver == "cuda":
        yield df.device(0, driver="cuda")
        return
    with df.emu.Machine(devices=1, sm_count=8) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports
