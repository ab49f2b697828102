# SPDX-License-Identifier: Apache-2.0
"""A fresh emulated machine for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from drvfuse.emu import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=4) as made:
        made.driver.cuInit(0)
        yield made


@pytest.fixture
def cuda(machine: Machine) -> Any:
    """The driver API of a fresh machine of 4 devices, initialised."""
    return machine.driver
