# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tracing tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import drvfuse as df
from drvfuse.runtime.driver import get_driver


@pytest.fixture(scope="module")
def group(driver: str) -> Iterator[df.Group]:
    """Three ranks (two if there are no more devices) of up to four blocks, shared by the tests of a module."""
    ranks = min(3, int(get_driver(driver).cuDeviceGetCount()))
    with df.Group.local(ranks, driver=driver, max_blocks=4, workspace_bytes=1 << 20) as found:
        yield found
