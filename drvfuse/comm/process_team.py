# SPDX-License-Identifier: Apache-2.0
"""The `Team` for multicast memory of ranks in different processes. It sends votes and descriptors over a board."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bootstrap.descriptors import share
from ..errors import MulticastError

if TYPE_CHECKING:
    from ..bootstrap.board import Board
    from ..runtime.device import Device

_FIELDS = ("call", "args_text", "code", "name", "explanation", "calls", "rank")


class ProcessTeam:
    """A `comm.multicast.Team` of the ranks of `board`. One of these ranks is in this process, on `device`."""

    def __init__(self, board: Board, device: Device) -> None:
        self._board = board
        self.size = board.size
        self.places: Mapping[int, Device] = {board.rank: device}

    def outcomes(self, own: MulticastError | None) -> Sequence[MulticastError | None]:
        """The outcomes of all processes, by rank. The outcome of this process is the object `own` itself, which keeps
        its notes and its cause."""
        outcome = json.dumps(None if own is None else [getattr(own, field) for field in _FIELDS]).encode()
        answers = self._board.gather("set up multicast memory", outcome)
        return [own if rank == self._board.rank else _read(answer) for rank, answer in enumerate(answers)]

    def pass_on(self, exported: Sequence[int]) -> tuple[Mapping[int, int], int | None]:
        received = share(self._board, exported, "pass multicast memory on")
        of_object = received[0].pop() if self._board.rank else None
        return {rank: descriptor for rank, (descriptor,) in received.items()}, of_object


def _read(answer: bytes) -> MulticastError | None:
    values: list[Any] | None = json.loads(answer)
    if values is None:
        return None
    return MulticastError(*values)
