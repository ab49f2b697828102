# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the collectives' tests: groups of the driver under test, opened once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import drvfuse as df


@pytest.fixture(scope="session")
def open_group(driver: str) -> Iterator[Callable[..., df.Group]]:
    """`open_group(n, **options)`: a group of n ranks, kept open and shared by all tests that ask for the same."""
    groups: dict[Any, df.Group] = {}

    def find(n: int, **options: Any) -> df.Group:
        key = (n, tuple(sorted(options.items())))
        if key not in groups:
            groups[key] = df.Group.local(n, driver=driver, **{"max_blocks": 4, "workspace_bytes": 1 << 20, **options})
        return groups[key]

    yield find
    for group in groups.values():
        group.close()


@pytest.fixture
def new_group(driver: str) -> Iterator[Callable[..., df.Group]]:
    """`new_group(n, **options)`: a group for this test alone, closed after it."""
    groups: list[df.Group] = []

    def make(devices: Any, **options: Any) -> df.Group:
        options = {"max_blocks": 4, "workspace_bytes": 1 << 20, "driver": driver, **options}
        groups.append(df.Group.local(devices, **options))
        return groups[-1]

    yield make
    for group in reversed(groups):
        group.close()
