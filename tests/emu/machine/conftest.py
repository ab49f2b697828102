# SPDX-License-Identifier: Apache-2.0
"""An engine without a machine for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_harness import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
