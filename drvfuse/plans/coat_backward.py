# SPDX-License-Identifier: Apache-2.0
"""How the FP8 backward's kernels share out rows and columns, which orders their sums: for ops and references."""

from __future__ import annotations

from typing import NamedTuple

DW_SEGMENTS = 132
FEW_ROWS, FEW_ELEMENTS = 512, 1 << 21  # what is read twice rather than exchanged between blocks


class BackwardShape(NamedTuple):
    """How the kernel shares out its work; `packs` to `strands` order the sums, as the kernels' files say.

    packs of 8 columns a thread, warps a team, teams and segments of rows, strands in the sum over segments. With `few`
    rows the segments are the slots of cu/coat/fp8_rmsnorm_backward_few.cu, the strands its warps, and `teams` is 1.
    """

    packs: int
    team_warps: int
    teams: int
    segments: int
    strands: int
    few: bool

    @classmethod
    def of(cls, rows: int, columns: int) -> BackwardShape:
        row_packs = -(-columns // 8)
        packs = 2 if row_packs <= 2 * 640 else -(-row_packs // 512)
        few = rows <= FEW_ROWS and rows * columns <= FEW_ELEMENTS
        if few and rows <= 2 * DW_SEGMENTS and row_packs >= 512:
            packs = max(4, packs)
        team_warps = -(-row_packs // (32 * packs))
        if few:
            most = 4 if rows <= DW_SEGMENTS else 12 if rows <= 2 * DW_SEGMENTS else 16  # more are slower to start
            warps = team_warps * max(1, most // team_warps)
            return cls(packs, team_warps, 1, min(rows, 8 * warps), warps, True)
        teams = 2 if team_warps in (9, 10) else max(1, 16 // team_warps)
        segments = min(rows, DW_SEGMENTS)
        quads = -(-64 * team_warps * packs // DW_SEGMENTS)  # of columns, for each block to add up
        strands = max(1, min(64, 32 * team_warps * teams // quads, segments // 2))
        return cls(packs, team_warps, teams, segments, strands, False)

    @property
    def block_teams(self) -> int:
        """Teams of a block, which share out its rows."""
        return self.strands // self.team_warps if self.few else self.teams

    @property
    def threads(self) -> int:
        return 32 * self.team_warps * self.block_teams

    def team_rows(self, rows: int) -> int:
        """Rows of the team that has most, of one segment."""
        return -(-rows // (self.segments * self.block_teams))

    @property
    def team_columns(self) -> int:
        """Columns that the packs of a team cover."""
        return 256 * self.team_warps * self.packs

    def sum_bytes(self, sums: int) -> int:
        """Of shared memory for w and for adding up `sums` sums over the rows: `weights` and `shared` of the kernels."""
        if self.few:
            return 4 * (self.team_columns + 8 * self.threads * sums)
        exchanged = self.teams * self.team_columns if self.teams > 1 else 0
        return 4 * (self.team_columns + max(exchanged, 4 * self.threads))
