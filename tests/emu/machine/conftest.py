# SPDX-License-Identifier: Apache-2.0
"""The fixture `rig`: a native engine without a `Machine`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_harness import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
