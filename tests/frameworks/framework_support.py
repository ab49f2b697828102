# SPDX-License-Identifier: Apache-2.0
"""What the tests of all frameworks share."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

RANKS = [1, pytest.param(4, marks=pytest.mark.gpus(4))]
DELAY = 20_000_000
"""Clock cycles of a kernel that only delays its stream: about 10 ms."""
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
Hosts = list[np.ndarray]


def framework(name: str) -> Any:
    """Import the module of a framework. If it is missing, skip the tests of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def randoms(rng: np.random.Generator, count: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Hosts:
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(count)]
