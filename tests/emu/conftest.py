# SPDX-License-Identifier: Apache-2.0
"""A fresh emulated machine for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from loopback import LoopbackDriver

from drvfuse.emu import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=4) as made:
        made.driver.cuInit(0)
        yield made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of modules with `AS_MESSAGES` run a second time, with all calls and results written as bytes."""
    if "cuda" in metafunc.fixturenames and getattr(metafunc.module, "AS_MESSAGES", False):
        metafunc.parametrize("cuda", ["calls", "messages"], indirect=True)


@pytest.fixture
def cuda(machine: Machine, request: pytest.FixtureRequest) -> Any:
    """The driver API of a fresh machine of 4 devices, initialised."""
    return LoopbackDriver(machine) if getattr(request, "param", "calls") == "messages" else machine.driver
