# SPDX-License-Identifier: Apache-2.0
"""How the kernels that hold rows in registers share them out: the host's side of cu/fp8_teams.cuh."""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.device import Device

MAX_COLUMNS = 32768
_SEGMENT = 512


class RowPlan(NamedTuple):
    """Warps a row, rows a block, and packs of 16 elements a thread: `slots * rounds`. Results do not depend on it."""

    team_warps: int
    teams: int
    slots: int
    rounds: int

    @classmethod
    def of(cls, device: Device, rows: int, columns: int) -> RowPlan:
        """A warp for each 512 columns, up to 8; blocks of 8 warps unless there are rows for one each only."""
        segments = -(-columns // _SEGMENT)
        team_warps = next(warps for warps in (1, 2, 4, 8) if warps >= min(segments, 8))
        teams = 1 if rows <= device.sm_count else 8 // team_warps
        return cls(team_warps, teams, min(8 // team_warps, -(-segments // team_warps)), -(-segments // 8))

    @property
    def threads(self) -> int:
        return 32 * self.team_warps * self.teams

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        names = ("TEAM_WARPS", "TEAMS", "SLOTS", "ROUNDS")
        return tuple((f"DRVFUSE_{name}", value) for name, value in zip(names, self, strict=True))
