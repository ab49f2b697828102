# SPDX-License-Identifier: Apache-2.0
"""How cu/gemv_partial_norm.cu cuts its work: warps, packs and rows in flight, and the rows of each block.

Nothing here changes a bit of the results.
"""

from __future__ import annotations

from dataclasses import dataclass

PACK_BYTES = 16
GROUP = 32
MAX_WARPS = 32
PACKS = (1, 2, 4)


def groups_of_row(k: int, itemsize: int) -> int:
    """Groups of 32 packs of a row of `k` weights of `itemsize` bytes, the last one perhaps short."""
    return -(-k * itemsize // (PACK_BYTES * GROUP))


@dataclass(frozen=True)
class Shape:
    """A block: teams of warps that share a row, packs of a row that a lane has at a time, rows it has at a time."""

    warps_a_row: int
    teams: int
    packs: int
    slots: int
    chunks: int

    @property
    def warps(self) -> int:
        return self.warps_a_row * self.teams

    @property
    def step(self) -> int:
        return self.slots * self.teams

    def norm_warps(self, m: int) -> int:
        """Warps that finish a row of act."""
        warps = 32
        while warps * m > self.warps:
            warps //= 2
        return warps

    @staticmethod
    def of(m: int, groups: int, act_bytes: int) -> Shape:
        """For `groups` a row of the weight; `act_bytes` of a pack's elements of act."""
        fewest = max(1, min(4, -(-groups // MAX_WARPS)))
        packs = 4 if fewest > 2 else fewest
        warps_a_row = min(MAX_WARPS, -(-groups // packs))
        chunks = -(-groups // (packs * warps_a_row))
        teams = max(1, MAX_WARPS // warps_a_row)
        while m > warps_a_row * teams:
            teams += 1
        slots = 6 if packs == 1 and m == 1 else 4 if packs < 4 else 2
        return Shape(warps_a_row, teams, packs, slots, chunks)


@dataclass(frozen=True)
class Shares:
    """How many rows each block has; the fields are those of `struct GemvParams`."""

    grid: int
    blocks: int
    normed_share: int
    normed_more: int
    share: int
    more: int
    last_normed: int
    last_unnormed: int

    @staticmethod
    def of(n: int, n_normed: int, most: int) -> Shares:
        """Even shares of at most `most` blocks. With normed rows the last block has normed rows only."""
        grid = max(1, min(most, n))
        if not n_normed:
            return Shares(grid, grid, 0, 0, n // grid, n % grid, 0, 0)
        if grid == 1:
            return Shares(1, 0, 0, 0, 0, 0, n_normed, n - n_normed)
        blocks, last = grid - 1, n_normed // grid
        normed, rows = n_normed - last, n - last
        return Shares(grid, blocks, normed // blocks, normed % blocks, rows // blocks, rows % blocks, last, 0)

    def splits(self, step: int) -> bool:
        """Whether a step can end with the normed rows at no further step."""
        normed = self.normed_share + (self.normed_more > 0)
        rows = self.share + (self.more > 0)
        return normed > 0 and -(-normed // step) - (-(rows - normed) // step) <= -(-rows // step)
