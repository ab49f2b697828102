# SPDX-License-Identifier: Apache-2.0
"""The properties of a device that plans depend on."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 8
"""The maximum number of ranks of a group, or of one of its nodes: the ranks whose memory a kernel reaches."""


@dataclass(frozen=True)
class Limits:
    """A device's number of multiprocessors, largest number of bytes of shared memory per block, and compute
    capability."""

    sm_count: int
    shared_bytes: int
    capability: tuple[int, int]


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
