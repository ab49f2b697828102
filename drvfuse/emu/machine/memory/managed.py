# SPDX-License-Identifier: Apache-2.0
"""Advice on managed memory. It is kept for queries, and has no other effect."""

from __future__ import annotations

import bisect
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Place(NamedTuple):
    """A location of memory: the CUmemLocationType and the number of a device or of a NUMA node."""

    kind: int
    number: int


class Piecewise(Generic[Value]):
    """A value for each byte of an allocation. At first all bytes have the same value."""

    def __init__(self, value: Value) -> None:
        self._starts, self._values = [0], [value]

    def set(self, start: int, end: int, value: Value) -> None:
        """Set the value from byte `start` up to byte `end`, which is excluded."""
        for at in (start, end):
            i = bisect.bisect_right(self._starts, at) - 1
            if self._starts[i] != at:
                self._starts.insert(i + 1, at)
                self._values.insert(i + 1, self._values[i])
        first, last = bisect.bisect_left(self._starts, start), bisect.bisect_left(self._starts, end)
        self._starts[first:last], self._values[first:last] = [start], [value]

    def common(self, start: int, end: int) -> Value | None:
        """The value of all bytes of a range; None if they differ."""
        first, last = bisect.bisect_right(self._starts, start) - 1, bisect.bisect_left(self._starts, end)
        found = set(self._values[first:last])
        return found.pop() if len(found) == 1 else None


class Advice:
    """The advice of cuMemAdvise on each byte of an allocation, and the last target of cuMemPrefetchAsync.

    attach  the CUmemAttach_flags, none of which restricts an access here
    """

    def __init__(self) -> None:
        self.attach = 1
        self.read_mostly: Piecewise[bool] = Piecewise(False)
        self.preferred: Piecewise[Place | None] = Piecewise(None)
        self.prefetched: Piecewise[Place | None] = Piecewise(None)
        self.accessed_by: dict[Place, Piecewise[bool]] = {}
