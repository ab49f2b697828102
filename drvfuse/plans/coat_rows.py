# SPDX-License-Identifier: Apache-2.0
"""How the kernels that hold rows in registers share them out: the host's side of cu/coat/teams.cuh."""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.device import Device

MAX_COLUMNS = 32768
_SEGMENT = 512


class RowPlan(NamedTuple):
    """Warps a row, rows a block, and packs of 16 elements a thread. Results do not depend on it."""

    team_warps: int
    teams: int
    packs: int

    @classmethod
    def of(cls, device: Device, rows: int, columns: int, packs: int) -> RowPlan:
        """`packs` a thread, or 1 where there are few rows, and more in long rows; blocks of up to 16 warps."""
        segments = -(-columns // _SEGMENT)
        packs = 1 if rows <= 4 * device.sm_count else min(packs, segments)
        while -(-segments // packs) > (16 if packs <= 2 else 11):  # more packs need more registers
            packs *= 2
        team_warps = -(-segments // packs)
        teams = 1 if rows <= device.sm_count or packs > 2 else max(1, 16 // team_warps)
        return cls(team_warps, teams, packs)

    @property
    def threads(self) -> int:
        return 32 * self.team_warps * self.teams

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        names = ("TEAM_WARPS", "TEAMS", "PACKS")
        return tuple((f"DRVFUSE_{name}", value) for name, value in zip(names, self, strict=True))
