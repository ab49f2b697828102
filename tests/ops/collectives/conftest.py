# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the collectives' tests: groups of the driver under test, opened once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import drvfuse as df

_SHARED_BLOCKS = 80
"""The budgets of shared groups sum to at most this many multiprocessors. An emulated GPU has 132, and groups that a
test opens for itself need the rest."""


@pytest.fixture(scope="session")
def open_group(driver: str) -> Iterator[Callable[..., df.Group]]:
    """`open_group(n, **options)`: a group of n ranks, kept open and shared by tests that ask for the same options.

    If all budgets together would exceed `_SHARED_BLOCKS`, the groups whose last use is longest ago are closed.
    """
    groups: dict[Any, df.Group] = {}

    def find(n: int, **options: Any) -> df.Group:
        options = {"max_blocks": 4, "workspace_bytes": 1 << 20, **options}
        key = (n, tuple(sorted(options.items())))
        group = groups.pop(key, None)
        if group is None:
            while groups and options["max_blocks"] + sum(dict(at)["max_blocks"] for _, at in groups) > _SHARED_BLOCKS:
                groups.pop(next(iter(groups))).close()
            group = df.Group.local(n, driver=driver, **options)
        groups[key] = group  # at the end: the dictionary is in the order of last use
        return group

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
