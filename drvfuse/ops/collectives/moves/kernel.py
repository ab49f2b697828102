# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the kernels that move bytes, and their parameters, laid out as
in the kernels' sources."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ....comm import workspace
from ....plans import moves
from ....plans import moves_scales as arranged_scales
from ....trace import layout
from ...call import faults
from ...call.specialisation import Specialisation
from ..shared.params import Call, PushCall, of_collective

ALGOS = ("push", "pull", "put")
ALGORITHMS = ("auto", *ALGOS, "naive")
RELAY = "relay"
"""An algorithm of broadcasts only, on at least three ranks."""


@dataclass(frozen=True)
class MoveKernel:
    """The compile-time settings of a kernel that moves bytes.

    `algo` is one of `ALGOS` or `RELAY`. `same`: a rank sends the same bytes to all ranks. `staged`: bytes go through
    the workspaces (put and pull only). `arranged`: scales are rearranged as `plans.moves_scales` says (not with
    relay, and with put only if bytes are staged). `compares`, `traced` and `fault` are as in `CollectiveKernel`."""

    algo: str
    ranks: int
    same: bool
    staged: bool = False
    arranged: bool = False
    compares: bool = False
    traced: int = 0
    fault: str = field(default_factory=faults.planted)

    local = False
    uses_staging = False
    wide_blocks_share = True
    cluster = 1

    @property
    def name(self) -> str:
        """The kernel's name in the compiled module."""
        return f"move_{self.algo}"

    @property
    def traced_name(self) -> str:
        """The kernel's name in traces."""
        return self.name

    @property
    def pushes(self) -> bool:
        """Whether the kernel sends by the push protocol, to slots in its peers' workspaces."""
        return self.algo in moves.PUSH

    def traced_by(self, words: int) -> MoveKernel:
        """Return the same kernel with traces of up to that number of words of a block."""
        return replace(self, traced=words)

    @property
    def specialisation(self) -> Specialisation:
        """How the kernel is compiled. It needs compute capability 8.0."""
        defines: dict[str, str | int] = {
            **workspace.defines(),
            "DRVFUSE_RANKS": self.ranks,
            "DRVFUSE_ARRANGED": int(self.arranged),
            "DRVFUSE_COMPARES": int(self.compares),
        }
        if self.algo != RELAY:
            defines["DRVFUSE_SAME"] = int(self.same)
        if not self.pushes:
            defines |= {
                "DRVFUSE_PUT": int(self.algo == "put"),
                "DRVFUSE_STAGED": int(self.staged),
                "DRVFUSE_PACKS": moves.packs_in_flight(self.staged, self.arranged),
                "DRVFUSE_KERNEL": self.name,
            }
        if self.traced:
            defines |= layout.defines(self.traced)
        file = self.name if self.pushes else "move"
        fixed = tuple(defines.items())
        return Specialisation("collectives/moves", file, fixed, self.name, (8, 0), "moves", "", self.fault)


@of_collective("collectives/moves/tables.cuh")
class Move(ctypes.Structure):
    """The bytes that one rank sends to another."""


@of_collective("collectives/moves/tables.cuh", parts=(Move,))
class Moved(ctypes.Structure):
    """The rows or the scales of a call, as one rank moves them."""

    def tailor(self, table: moves.Moves, ranks: Sequence[int], place: int) -> None:
        """Fill `sent` and `received` with the moves of `table` between rank `ranks[place]` and each of `ranks`. Entry d
        of `sent` is for the rank d places after `ranks[place]` (cyclically), entry d of `received` for the rank d
        places before it. The table has the moves of all ranks of the group."""
        own = ranks[place]
        for distance in range(len(ranks)):
            self.sent[distance] = Move(*table[own][ranks[(place + distance) % len(ranks)]])
            self.received[distance] = Move(*table[ranks[place - distance]][own])

    @property
    def offsets(self) -> int:
        """The bitwise "or" of all sizes and all offsets in this rank's input and output, which shows their
        alignment."""
        found = 0
        for sent, received in zip(self.sent, self.received, strict=True):
            found |= sent.source | sent.nbytes | received.target | received.nbytes
        return found


@of_collective("collectives/moves/arranged_scales.cuh")
class Arrangement(ctypes.Structure):
    """How scales lie in a layout by column or in tiles, and which rows each rank sends."""

    def tailor(self, arrangement: arranged_scales.Arrangement, ranks: Sequence[int], place: int) -> None:
        """Fill all fields from `arrangement`. Entry d of `first` (the first row) and of `count` (the number of rows) is
        for the rank d places before `ranks[place]` (cyclically)."""
        self.rows, self.groups = arrangement.total, arrangement.groups
        self.itemsize, self.tiles = arrangement.itemsize, int(arrangement.tiles)
        for distance in range(len(ranks)):
            self.first[distance] = arrangement.first[ranks[place - distance]]
            self.count[distance] = arrangement.rows[ranks[place - distance]]


@of_collective("collectives/moves/tables.cuh", parts=(Call, Moved, Arrangement))
class MoveParams(ctypes.Structure):
    """The parameters of a kernel with barriers."""


@of_collective("collectives/moves/slots.cuh", parts=(PushCall,))
class MovePushParams(MoveParams):
    """The parameters of a push kernel."""
