# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tracing tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import drvfuse as df


@pytest.fixture(scope="module")
def group(driver: str) -> Iterator[df.Group]:
    """Three ranks with up to four blocks each, shared by the tests of a module."""
    with df.Group.local(3, driver=driver, max_blocks=4, workspace_bytes=1 << 20) as found:
        yield found
