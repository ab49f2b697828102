# SPDX-License-Identifier: Apache-2.0
"""The operations that have not started: which of them may start, and in which order."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from .work import Op


class Backlog:
    """The operations of a machine that wait for no other operation, except perhaps their primary (the kernel of which
    they are programmatic dependents). The order in which they start depends only on the driver calls and the seed.

    With seed 0, operations start in the order of the calls. With another seed, the order is random, and some operations
    are held: they start only after one or two other operations have ended. With an odd seed, a programmatic dependent
    starts as soon as its primary has triggered, with an even seed when the primary has ended.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._ready: list[Op] = []  # a heap, whose first operation starts next
        self._held: list[tuple[int, Op]] = []  # a heap of (value of `_ended` at which it may start, operation)
        self._secondaries: list[Op] = []  # operations that wait only for the trigger or the end of their primary
        self._ended = 0

    def draw(self) -> int:
        """A number by which ready operations of the same priority are sorted: a random one, but always 0 with seed 0.
        Operations with equal numbers start in the order of the calls.
        """
        return self._random.getrandbits(32) if self._seed else 0

    def release(self, op: Op) -> None:
        """Add an operation to the backlog. Does nothing while the operation waits for others than its primary: `ended`
        calls this again for it when one of these has ended.
        """
        if op.waits:
            return
        if op.primary is not None:
            self._secondaries.append(op)
            return
        hold = self._random.choice((0, 0, 1, 2)) if self._seed else 0
        if hold:
            heapq.heappush(self._held, (self._ended + hold, op))
        else:
            self.ready(op)

    def ready(self, op: Op) -> None:
        """Add an operation to those that may start now, of which `take` returns the first."""
        heapq.heappush(self._ready, op)

    def ended(self, op: Op) -> None:
        """Add to the backlog the operations that waited only for `op`. A kernel whose primary is `op` may now start or,
        if it runs already, pass griddepcontrol.wait. Called when `op` has ended.
        """
        self._ended += 1
        for secondary in op.secondaries:
            secondary.primary = None
            if secondary.launch is not None:
                secondary.launch.primary_ended(op)
            elif secondary in self._secondaries:
                self._secondaries.remove(secondary)
                self.release(secondary)
        for dependent in op.dependents:
            dependent.waits -= 1
            self.release(dependent)
        op.dependents, op.secondaries = [], []

    def take(self) -> Op | None:
        """Remove and return the operation that starts next. None if no operation may start."""
        return heapq.heappop(self._ready) if self._ready else None

    def wake_early(self) -> bool:
        """Under odd seeds, let dependents of triggered kernels start. Returns whether any operation may start."""
        if self._seed % 2 == 1:
            for op in [op for op in self._secondaries if _triggered(op.primary)]:
                self._secondaries.remove(op)
                self.ready(op)
        return bool(self._ready)

    def wake_held(self) -> None:
        """Let the held operations start that have waited for enough other operations to end (see `Backlog`)."""
        while self._held and self._held[0][0] <= self._ended:
            self.let_go()

    def let_go(self) -> bool:
        """Let the first of the held operations start. Returns False if none is held."""
        if self._held:
            self.ready(heapq.heappop(self._held)[1])
            return True
        return False

    def all(self) -> Iterator[Op]:
        yield from self._ready
        yield from (op for _, op in self._held)
        yield from self._secondaries


def _triggered(primary: Op | None) -> bool:
    return primary is not None and primary.launch is not None and bool(primary.launch.triggered)
