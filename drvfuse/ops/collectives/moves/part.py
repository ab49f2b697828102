# SPDX-License-Identifier: Apache-2.0
"""A part of a call that moves bytes: its arrays, and which of their bytes go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....plans import moves
from ....plans.moves_scales import Arrangement
from ...call.operands import Operand
from ..shared import plan

if TYPE_CHECKING:
    from ....comm.group import Group


@dataclass(frozen=True)
class MovePart:
    """The rows of a call, or their scales: an array for each local rank, and the table of moves between them."""

    sources: Sequence[Operand]
    targets: Sequence[Operand]
    table: moves.Moves
    arrangement: Arrangement | None = None
    """The layout of scales that are rearranged when they arrive; None for bytes that arrive as they are."""
    from_payloads, to_payloads = False, False  # whether the sources or the targets are payloads of workspaces

    def reachable(self, group: Group, targets: bool) -> bool:
        """Whether kernels can directly access the targets of all ranks of the node or, without `targets`, the sources
        of these ranks."""
        return plan.readable_by_peers(group, self.targets if targets else self.sources)

    def far(self, group: Group, rank: int, targets: bool) -> list[int]:
        """Return the addresses of peers' arrays, by distance from rank `rank`: the targets of the ranks to which it
        sends or, without `targets`, the sources of the ranks from which it receives."""
        peers, place = group.layout.ranks(group.layout.of[rank]), group.layout.place(rank)
        step, found = (1, self.targets) if targets else (-1, self.sources)
        return [found[peers[(place + step * d) % len(peers)]].ptr for d in range(1, len(peers))]
