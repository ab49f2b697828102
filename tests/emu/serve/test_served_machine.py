# SPDX-License-Identifier: Apache-2.0
"""One machine, several processes: memory, descriptors, host functions, death."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_helpers import ok

import drvfuse as df

pytestmark = pytest.mark.emu


def attached() -> Any:
    cuda = df.emu.default_machine().driver
    ok(cuda.cuInit(0))
    return cuda


def _sum(rank: int, size: int, seed: int) -> bool:
    """A whole group in one client."""
    rng = np.random.default_rng(seed)
    host = [rng.standard_normal((5, 96), np.float32) for _ in range(2)]
    with df.Group.local([2 * rank, 2 * rank + 1]) as group:
        xs = [member.array(a) for member, a in zip(group, host, strict=True)]
        return all((y.numpy() == host[0] + host[1]).all() for y in df.allreduce(group, xs))


def test_each_process_runs_a_group_of_its_own(pool):
    assert pool.run(2, _sum, 7) == [True, True]
    assert not pool.machine.reports
    assert pool.machine.held()["device_bytes"] == 0
