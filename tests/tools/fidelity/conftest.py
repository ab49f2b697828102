# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the results that were recorded on GPUs, and an emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drvfuse as df
from drvfuse import emu
from tools.fidelity import fixture

RECORDED = [Path(__file__).with_name(name) for name in ("h200.npz", "h200_more.npz")]
MATRIX = Path(__file__).with_name("h200_matrix.npz")


@pytest.fixture(scope="session")
def recorded() -> tuple[dict[str, fixture.Stored], list[dict[str, Any]]]:
    """The recorded results of a GPU by the names of the forms; and the GPU, driver and assembler of each file with
    results."""
    answers, origins = zip(*map(fixture.load, RECORDED), strict=True)
    return {name: stored for part in answers for name, stored in part.items()}, list(origins)


@pytest.fixture(scope="session")
def recorded_matrix() -> tuple[dict[str, fixture.Stored], dict[str, Any]]:
    """The recorded results of matrix instructions."""
    return fixture.load(MATRIX)


@pytest.fixture
def device() -> Iterator[df.Device]:
    """The device of a fresh emulated machine. Its few multiprocessors make grids small; results do not depend on
    them.
    """
    with emu.Machine(devices=1, sm_count=8) as machine:
        yield df.device(0, driver=machine)
