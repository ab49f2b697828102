# SPDX-License-Identifier: Apache-2.0
"""Calls that have been launched on some ranks of a group only.

Kernels of ranks in one process carry nothing that identifies their call: the first kernel on one rank takes part in one
call with the first kernel on every other rank, even if the host launched them for different calls. So the host records
which calls were launched on each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..errors import LaunchError
from .history import CallNote, Noted


class PartialCalls:
    """The calls, oldest first, that were launched on some but not all of `indices`, the ranks of this process."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._calls: list[Noted] = []
        self._indices = indices
        self._launched = [0] * len(indices)  # how many of `_calls` were launched on each rank
        self._lock = threading.Lock()

    def begin(self, positions: Sequence[int], call: Noted) -> bool:
        """Record the launch of `call` on the ranks at `positions`. Returns whether any call is not yet launched on all
        ranks.

        Raises LaunchError, and records nothing, if another call must first be launched on one of these ranks.
        """
        if not self._calls and len(positions) == len(self._launched):
            return False
        with self._lock:
            for position in positions:
                unfinished = self._launched[position] < len(self._calls)
                if unfinished and self._calls[self._launched[position]] is not call:
                    first = self._calls[self._launched[position]].note
                    raise LaunchError(
                        f"{first} must first be launched on rank {self._indices[position]}, as it was launched on "
                        "another rank: all ranks take part in calls in the same order; group.reset() drops unfinished "
                        "calls"
                    )
            for position in positions:
                if self._launched[position] == len(self._calls):
                    self._calls.append(call)
                self._launched[position] += 1
            finished = min(self._launched)
            del self._calls[:finished]
            self._launched = [count - finished for count in self._launched]
            return bool(self._calls)

    @property
    def first(self) -> CallNote | None:
        """The oldest call that is not launched on all ranks, if there is one."""
        with self._lock:
            return self._calls[0].note if self._calls else None

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._calls.clear()
            self._launched = [0] * len(self._launched)
