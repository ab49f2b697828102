# SPDX-License-Identifier: Apache-2.0
"""How the kernels that use cu/coat/teams.cuh divide rows among threads, and how cu/coat/fp8_division.cu divides tiles.

Results do not depend on a plan, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

from .definitions import Defines, defines
from .limits import Limits, ceil_div
from .scratch import MAX_GRID

MAX_COLUMNS = 32768  # the largest number of columns that the kernels take
_SEGMENT = 512  # columns of a segment: what a warp holds with one pack per lane
_LARGE = 4 << 20  # the smallest number of elements of x for which LayerNorm uses large tiles
_TILE_BYTES = 8192  # bytes of x in one tile of cu/coat/fp8_division.cu
_DIVISION_WARPS = 16  # warps per multiprocessor of cu/coat/fp8_division.cu


class RowPlan(NamedTuple):
    """Teams of warps, each of which holds one row in registers. The fields: warps of a team, teams of a block, and
    packs of 16 elements per thread."""

    team_warps: int
    teams: int
    packs: int

    @classmethod
    def of(cls, limits: Limits, rows: int, columns: int, packs: int) -> RowPlan:
        """The plan with `packs` packs per thread, or one pack if there are few rows. If rows are too long for 16 warps
        with that number of packs, threads have more packs. A block has up to 16 warps.
        """
        segments = ceil_div(columns, _SEGMENT)
        packs = 1 if rows <= 4 * limits.sm_count else min(packs, segments)
        # A team has at most 16 warps, or 11 with more than 2 packs per thread, since these need more registers.
        while ceil_div(segments, packs) > (16 if packs <= 2 else 11):
            packs *= 2
        team_warps = ceil_div(segments, packs)
        teams = 1 if rows <= limits.sm_count or packs > 2 else max(1, 16 // team_warps)
        return cls(team_warps, teams, packs)

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return 32 * self.team_warps * self.teams

    @property
    def defines(self) -> Defines:
        return defines(**self._asdict())

    def grid(self, rows: int, resident: int) -> int:
        """The number of blocks: at most `resident`, the number that can run at the same time."""
        return max(1, min(ceil_div(rows, self.teams), resident))


class LayerNormTiles(NamedTuple):
    """The tiles of cu/coat/fp8_layernorm_forward.cu; small tensors have small tiles. The fields: rows of a lane's part
    of a tile, and lanes among which the rows of a tile are divided."""

    rows: int
    lanes: int

    @classmethod
    def of(cls, elements: int) -> LayerNormTiles:
        return cls(16, 2) if elements >= _LARGE else cls(4, 8)

    def grid(self, plan: RowPlan, rows: int, columns: int, resident: int) -> int:
        """The number of blocks: at most `resident`, the number that can run at the same time, since all blocks wait for
        one another at a barrier."""
        tiles = ceil_div(rows, self.rows * self.lanes) * ceil_div(columns, 32 // self.lanes * 8)
        useful = max(ceil_div(rows, plan.teams), ceil_div(tiles, plan.threads // 32))
        return max(1, min(useful, resident, MAX_GRID))


class Division:
    """The plan of cu/coat/fp8_division.cu. A tile of x has 32 rows and 8 KiB. Each lane of a warp has a part of the
    tile: `tile_rows` rows of 8 columns.

    If the kernel computes the scale, and the tensor does not fit in the registers of all warps, each warp also keeps a
    tile in shared memory until the maximum is known.
    """

    warps = 8
    threads = 32 * warps

    def __init__(self, limits: Limits, rows: int, columns: int, tile_rows: int, find_scale: bool) -> None:
        self._tile_rows = tile_rows
        self._tiles = ceil_div(rows, 32) * ceil_div(columns, 8 * tile_rows)
        self._kept = int(find_scale and self._tiles > _DIVISION_WARPS * limits.sm_count)
        self.shared_bytes = self.warps * self._kept * _TILE_BYTES

    @staticmethod
    def tile_rows(itemsize: int) -> int:
        """The number of rows of a lane's part of a tile, for elements of `itemsize` bytes."""
        return 32 // itemsize

    @property
    def defines(self) -> Defines:
        return defines(warps=self.warps, tile_rows=self._tile_rows, kept=self._kept)

    def grid(self, resident: int) -> int:
        """The number of blocks: at most `resident`, the number that can run at the same time, since all blocks wait for
        one another at a barrier."""
        return max(1, min(ceil_div(self._tiles, self.warps), resident, MAX_GRID))


def column_run(tile_rows: int, batch_rows: int, address: int) -> int:
    """The number of bytes of one store to a column of a transposed output at `address`.

    A lane has `tile_rows` bytes of a column. A store must be aligned, and its bytes must belong to one batch of
    `batch_rows` rows.
    """
    run = tile_rows
    while run > 1 and (batch_rows % run or address % run):
        run //= 2
    return run if run >= 4 else 1
