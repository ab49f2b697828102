# SPDX-License-Identifier: Apache-2.0
"""The settings of one comparison of collectives. They apply to drvfuse's ops, to the peers and to the floors alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How much a benchmark measures. A graph has at least `calls` calls, which use `sets` sets of inputs in turn. A
    weight of the chained GEMVs has `weight_bytes`, and the copy that measures the rate of links has `link_bytes`.
    `peer_seconds` is the time limit of a peer's processes."""

    calls: int = 100
    sets: int = 8
    weight_bytes: int = 16 << 20
    link_bytes: int = 64 << 20
    peer_seconds: float = 240.0

    def gemv_columns(self, cols: int) -> int:
        """K of the GEMV whose product has `cols` elements: a multiple of 8."""
        return max(8, self.weight_bytes // (2 * cols) // 8 * 8)


EMULATED = Settings(calls=2, sets=2, weight_bytes=1 << 12, link_bytes=1 << 12)
"""The settings for emulated devices, whose times have no meaning."""
