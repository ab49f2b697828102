# SPDX-License-Identifier: Apache-2.0
"""Groups on GPUs for the tests of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import drvfuse as df


@pytest.fixture
def connect() -> Callable[[int], df.Group]:
    """`connect(ranks)`: a group with that number of GPUs."""
    return lambda ranks: df.Group.local(ranks, driver="cuda", max_blocks=16)


@pytest.fixture
def group(connect: Callable[[int], df.Group]) -> Iterator[df.Group]:
    with connect(1) as group:
        yield group
