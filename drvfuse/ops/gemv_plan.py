# SPDX-License-Identifier: Apache-2.0
"""How cu/gemv_partial_norm.cu cuts its work: warps, packs and rows in flight, and the rows of each block.

Nothing here changes a bit of the results.
"""

from __future__ import annotations

from dataclasses import dataclass

PACK_BYTES = 16
GROUP = 32
MAX_WARPS = 32
IN_FLIGHT = 4  # packs of a lane: what a warp waits for at once, so more warps are better than more packs


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
    def of(m: int, groups: int, rows: int) -> Shape:
        """For `groups` a row of the weight, and `rows` of it for a block."""
        warps, in_flight = (MAX_WARPS, IN_FLIGHT) if m == 1 else (MAX_WARPS // 2, 2 * IN_FLIGHT)
        packs = 1 if groups <= warps else 2 if groups <= 2 * warps else 4
        warps_a_row = min(warps, -(-groups // packs))
        chunks = -(-groups // (packs * warps_a_row))
        teams = warps // warps_a_row
        least = 1 if m == 1 and chunks == 1 else 2  # pairs of rows share what they need of act
        slots = max(least, min(in_flight // packs, -(-rows // teams)))
        while m > warps_a_row * teams:
            teams += 1
        return Shape(warps_a_row, teams, packs, slots + slots % least, chunks)

    @property
    def sum_lanes(self) -> int:
        """Lanes that add the groups of a row."""
        lanes = 1
        while lanes < min(GROUP, self.warps_a_row * self.packs):
            lanes *= 2
        return lanes


@dataclass(frozen=True)
class Shares:
    """How many rows each block has; the fields are those of `struct GemvParams`."""

    grid: int
    blocks: int
    normed_blocks: int
    normed_share: int
    normed_more: int
    unnormed_blocks: int
    unnormed_share: int
    unnormed_more: int
    last_normed: int
    last_unnormed: int

    @staticmethod
    def of(n: int, n_normed: int, most: int, step: int) -> Shares:
        """Even shares of at most `most` blocks. With normed rows the last block has normed rows only.

        Where a block has no more rows than a step they are of one kind, else it would take two steps for them.
        """
        grid = max(1, min(most, n))
        if grid == 1 and n_normed:
            return Shares(1, 0, 0, 0, 0, 0, 0, 0, n_normed, n - n_normed)
        blocks, last = (grid - 1, n_normed // grid) if n_normed else (grid, 0)
        normed, unnormed = n_normed - last, n - n_normed
        normed_blocks = unnormed_blocks = blocks
        if normed and unnormed and -(-(normed + unnormed) // blocks) <= step and blocks > 1:
            normed_blocks = max(1, min(blocks - 1, round(blocks * normed / (normed + unnormed))))
            unnormed_blocks = blocks - normed_blocks
        return Shares(
            grid,
            blocks,
            normed_blocks,
            *divmod(normed, normed_blocks),
            unnormed_blocks,
            *divmod(unnormed, unnormed_blocks),
            last,
            0,
        )

    @property
    def most_rows(self) -> int:
        """The most rows that a block can have."""
        both = self.normed_share + self.unnormed_share + (self.normed_more > 0) + (self.unnormed_more > 0)
        return max(both, self.last_normed + self.last_unnormed)
