# SPDX-License-Identifier: Apache-2.0
"""How the kernels of the FP8 norms' backward pass divide rows and columns among blocks and warps.

The division fixes the order of their sums, so ops and references both take it from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .limits import Limits, ceil_div
from .scratch import SUMS_AT

MAX_COLUMNS = 32768  # the largest number of columns that the kernels take
MAX_GRADIENTS = 3  # the largest number of arrays whose sum is the gradient
DW_SEGMENTS = 132  # the largest number of segments into which a kernel divides the rows
# The largest numbers of rows and of elements for which cu/coat/fp8_rmsnorm_backward_few.cu is used.
FEW_ROWS, FEW_ELEMENTS = 512, 1 << 21
_SLICE = 32  # columns of a slice in cu/coat/fp8_rmsnorm_backward_few.cu; the slices are distributed over its blocks
_MAX_RING = 8  # the largest number of rows that a team loads ahead
# With at least this number of rows per team, a team loads two rows ahead, and RMSNorm's kernel stores dx of the last
# two rows of a segment after the segment's sums.
_LONG = 12
_RING_CAPABILITY = (9, 0)  # the least compute capability with bulk copies


def workspace_bytes(columns: int) -> int:
    """The number of bytes of workspace that suffices for every call with this number of columns."""
    # The sum in parentheses is at least `BackwardShape.team_columns`, the number of words of a segment. For two
    # gradients (dw and db) there are twice as many words; callers then pass 2 * columns, which suffices.
    return SUMS_AT + 4 * DW_SEGMENTS * (columns + columns // 16 + 1024)


def few_rows(rows: int, columns: int) -> bool:
    """Whether cu/coat/fp8_rmsnorm_backward_few.cu serves this shape. The blocks of that kernel read x twice and
    exchange no sums."""
    return rows <= FEW_ROWS and rows * columns <= FEW_ELEMENTS


class BackwardShape(NamedTuple):
    """How a backward kernel divides its work. All fields except `few` decide the order of its sums (see the kernels'
    files)."""

    packs: int
    """Packs of a row, of 8 columns each, that a thread has."""
    team_warps: int
    """Warps of a team, which works on one row at a time."""
    teams: int
    """Teams of a block; 1 if `few`."""
    segments: int
    """Segments of rows; if `few`, the quartets of a block: groups of four threads with the same rows."""
    strands: int
    """Parts of the sum over the segments or quartets, which different threads add; if `few`, one for each warp."""
    few: bool
    """Whether the kernel is cu/coat/fp8_rmsnorm_backward_few.cu."""

    @classmethod
    def of(cls, rows: int, columns: int) -> BackwardShape:
        row_packs = -(-columns // 8)
        packs = 2 if row_packs <= 2 * 640 else -(-row_packs // 512)
        few = few_rows(rows, columns)
        if few and rows <= 2 * DW_SEGMENTS and row_packs >= 512:
            packs = max(4, packs)
        team_warps = -(-row_packs // (32 * packs))
        if few:
            # The maximum number of warps of a block: smaller for fewer rows, as a block with more warps takes longer to
            # start.
            most = 4 if rows <= DW_SEGMENTS else 12 if rows <= 2 * DW_SEGMENTS else 16
            warps = team_warps * max(1, most // team_warps)
            return cls(packs, team_warps, 1, min(rows, 8 * warps), warps, True)
        teams = 2 if team_warps in (9, 10) else max(1, 16 // team_warps)
        segments = min(rows, DW_SEGMENTS)
        quads = -(-64 * team_warps * packs // DW_SEGMENTS)  # quads of columns that each block adds up
        strands = max(1, min(64, 32 * team_warps * teams // quads, segments // 2))
        return cls(packs, team_warps, teams, segments, strands, False)

    @property
    def block_teams(self) -> int:
        """Number of teams of a block, which divide its rows among themselves."""
        return self.strands // self.team_warps if self.few else self.teams

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return 32 * self.team_warps * self.block_teams

    def team_rows(self, rows: int) -> int:
        """The largest number of rows that one team, which works on a row at a time, takes from a segment of rows."""
        return -(-rows // (self.segments * self.block_teams))

    def ring_slots(self, rows: int, slot: int, room: int) -> int:
        """The number of rows that each team loads ahead, 0 or 2 to 8. `slot` is the number of bytes of shared memory
        that one row for each team takes, and `room` the number that is available."""
        # Two rows that are loaded ahead keep memory busy. If a block has few rows, loading more of them ahead helps, up
        # to half of the block's rows. Beyond that, some multiprocessors finish before others, and the launch lasts as
        # long as the slowest. (Measured on an H200.)
        team_rows = self.team_rows(rows)
        wanted = 2 if team_rows >= _LONG else min(team_rows // 2 + 1, (128 << 10) // slot)
        slots = min(max(wanted, 2), room // slot, _MAX_RING)
        return slots if slots >= 2 else 0

    def shares(self, rows: int) -> tuple[int, int]:
        """(The number of rows of a segment, the number of segments that have one row more.)"""
        segments = max(self.segments, 1)
        return (rows if self.few else rows // segments), rows % segments

    @property
    def team_columns(self) -> int:
        """The number of columns that the packs of a team have together, at least that of the tensor."""
        return 256 * self.team_warps * self.packs

    def sum_bytes(self, sums: int) -> int:
        """The bytes of shared memory for two arrays of the kernels: `weights`, for w, and `shared`, for `sums` sums
        over the rows.
        """
        if self.few:
            return 4 * (self.team_columns + 8 * self.threads * sums)
        exchanged = self.teams * self.team_columns if self.teams > 1 else 0
        return 4 * (self.team_columns + max(exchanged, 4 * self.threads))


@dataclass(frozen=True)
class BackwardPlan:
    """A launch of a backward kernel."""

    shape: BackwardShape
    ring: int
    """Rows that each team loads ahead through shared memory; 0: none."""
    kept: bool
    """Whether dx of a segment's last two rows is stored after the segment's sums."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    grid: int
    """Blocks."""
    waits: bool
    """Whether blocks wait for one another through the workspace."""

    @classmethod
    def of(
        cls,
        limits: Limits,
        rows: int,
        columns: int,
        QB: int,
        gradients: int,
        sums: int,
        *,
        centred: bool,
        aligned: bool,
        scales_aligned: bool,
    ) -> BackwardPlan:
        """The plan of a call with `sums` sums over the rows. `aligned`: the rows of all arrays, scales excepted, begin
        and end at multiples of 16 bytes.
        """
        shape = BackwardShape.of(rows, columns)
        # The kernel for few rows divides columns among its blocks to compute sums over the rows. A call without such
        # sums uses the other kernel, whose blocks have rows only.
        if not sums and shape.few:
            shape = shape._replace(segments=min(rows, DW_SEGMENTS), teams=shape.block_teams, few=False)
        smem = shape.sum_bytes(sums) if sums else 0
        # Ring::slot_bytes() of cu/coat/backward_ring.cuh, times the number of teams.
        slot = shape.block_teams * ceil_div(columns * (1 + 2 * gradients) + columns // QB * 2, 128) * 128
        copied = aligned and scales_aligned and columns % (8 * QB) == 0 and limits.capability >= _RING_CAPABILITY
        # If each segment has a single row, there is no next row that could be loaded ahead.
        fits = copied and not shape.few and rows > shape.segments
        ring = shape.ring_slots(rows, slot, limits.shared_bytes - 4096 - smem) if fits else 0
        kept = ring > 0 and shape.team_rows(rows) >= _LONG and not centred
        useful = max(ceil_div(rows, shape.block_teams), ceil_div(columns, _SLICE)) if shape.few else shape.segments
        grid = max(1, min(useful, limits.sm_count))
        return cls(shape, ring, kept, smem + ring * slot, grid, bool(sums) and not shape.few)
