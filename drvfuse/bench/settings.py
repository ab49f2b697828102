# SPDX-License-Identifier: Apache-2.0
"""What is the same for every op, floor and peer in one comparison of collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`calls` in a graph, at least, over `sets` of inputs in turn; `weight_bytes` of the weight of a chain's GEMV,
    `link_bytes` of the copy that the rate of the links is taken of, `peer_seconds` that the processes of a peer may
    take."""

    calls: int = 100
    sets: int = 8
    weight_bytes: int = 16 << 20
    link_bytes: int = 64 << 20
    peer_seconds: float = 240.0

    def gemv_columns(self, cols: int) -> int:
        """K of the GEMV whose product has `cols` elements: a multiple of 8."""
        return max(8, self.weight_bytes // (2 * cols) // 8 * 8)


EMULATED = Settings(calls=2, sets=2, weight_bytes=1 << 12, link_bytes=1 << 12)
"""For emulated devices, on which no time means anything."""
