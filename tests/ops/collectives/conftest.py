# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the collectives' tests: groups of the driver under test, opened once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import drvfuse as df

_SHARED_BLOCKS = 64
"""The budgets of shared groups sum to at most this many multiprocessors. A GPU has 132, and the group that a test of
another folder opens for itself needs 64, the default."""


class SharedGroups:
    """The groups that tests share, by their number of ranks and options, in the order of their last use."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._groups: dict[Any, df.Group] = {}

    def open(self, n: int, **options: Any) -> df.Group:
        """A group of n ranks. If all budgets together would exceed `_SHARED_BLOCKS`, the groups whose last use is
        longest ago are closed."""
        options = {"max_blocks": 4, "workspace_bytes": 1 << 20, **options}
        key = (n, tuple(sorted(options.items())))
        group = self._groups.pop(key, None)
        if group is None:
            self.close(options["max_blocks"])
            group = df.Group.local(n, driver=self._driver, **options)
        self._groups[key] = group
        return group

    def close(self, wanted: int = _SHARED_BLOCKS) -> None:
        """Close groups until `wanted` multiprocessors of those for shared groups are free."""
        while self._groups and wanted + sum(dict(at)["max_blocks"] for _, at in self._groups) > _SHARED_BLOCKS:
            self._groups.pop(next(iter(self._groups))).close()


@pytest.fixture(scope="session")
def shared_groups(driver: str) -> Iterator[SharedGroups]:
    groups = SharedGroups(driver)
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def open_group(shared_groups: SharedGroups) -> Callable[..., df.Group]:
    """`open_group(n, **options)`: a group of n ranks, kept open and shared by tests that ask for the same options."""
    return shared_groups.open


@pytest.fixture
def whole_devices(shared_groups: SharedGroups) -> None:
    """No shared group is open, so that a test's own groups may have nearly all multiprocessors."""
    shared_groups.close()


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
