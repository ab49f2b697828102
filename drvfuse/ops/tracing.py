# SPDX-License-Identifier: Apache-2.0
"""The `trace` argument of the collectives: how many events their kernels write at most, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..trace.buffer import Section, Trace
from .kernels import LaunchShape, Specialisation
from .validate import Operand

if TYPE_CHECKING:
    from ..comm.group import Group


class CallTrace:
    """The parts of a trace that one prepared call writes; it is kept as long as the call may be launched."""

    def __init__(self, group: Group, trace: Any) -> None:
        """Raises ArgumentError for what is no `Trace` or does not cover every device of the group."""
        if not isinstance(trace, Trace):
            raise ArgumentError("trace", f"a {type(trace).__name__}", "a Trace of the group, or None")
        self._devices = [rank.device for rank in group]
        self._trace = trace
        self.sections: list[Section] = []
        self.operands = [[Operand("trace", trace.buffer(device), None, False)] for device in self._devices]

    def reserve(self, spec: Specialisation, shape: LaunchShape, items: int, chunk: int) -> list[Section]:
        """A section a local rank for a launch over `items` elements (all-reduce) or rows (fused) in such chunks.

        Raises ArgumentError if the trace has too little room.
        """
        name = f"{spec.op}_naive" if spec.local else spec.name
        found = self._trace.sections(self._devices, name, shape.blocks, events(spec, shape, items, chunk))
        self.sections += found
        return found


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _frame(spec: Specialisation, chunks: int, of_chunk: int) -> int:
    """Events of a call in `chunks` chunks: the producer, the barriers, what a chunk takes, and the end."""
    barrier = spec.ranks + 2
    if spec.local:
        return 1 + of_chunk
    if spec.algo == "two_stage":
        return 1 + barrier + chunks * ((2 if spec.staged else 1) * barrier + spec.staged + of_chunk) + 1
    return 1 + (1 + chunks) * barrier + chunks * (spec.staged + of_chunk) + 1


def _chunks(spec: Specialisation, items: int, chunk: int) -> tuple[int, int]:
    """(number of chunks, items of a chunk that one rank works on)."""
    if spec.algo == "two_stage":
        items = _ceil_div(items, spec.ranks)
    elif not spec.staged:
        return 1, items
    return _ceil_div(items, chunk), min(items, chunk)


def allreduce_events(spec: Specialisation, shape: LaunchShape, count: int, chunk: int) -> int:
    """For `count` elements in chunks of `chunk` packs: a load of several packs, and a sum and a store for each."""
    chunks, packs = _chunks(spec, _ceil_div(count, spec.width), chunk)
    each = _ceil_div(packs, shape.blocks * shape.threads)
    loads = each // spec.packs + (spec.packs - 1 if each >= spec.packs else each)
    return _frame(spec, chunks, loads + 2 * each + (spec.algo == "two_stage"))


def rmsnorm_events(spec: Specialisation, shape: LaunchShape, rows: int, chunk: int) -> int:
    """For `rows` rows in chunks of `chunk` rows: the sum, the norm and the store of each."""
    chunks, mine = _chunks(spec, rows, chunk)
    each = _ceil_div(mine, shape.blocks)
    if spec.algo == "two_stage" and spec.residual:  # a sum; then all ranks' rows
        return _frame(spec, chunks, each * (1 + 3 * spec.ranks))
    return _frame(spec, chunks, 3 * each + (spec.algo == "two_stage"))


EVENTS = {"allreduce": allreduce_events, "allreduce_rmsnorm_fp8": rmsnorm_events}


def events(spec: Specialisation, shape: LaunchShape, items: int, chunk: int) -> int:
    """For `items` elements (all-reduce) or rows (fused)."""
    return EVENTS[spec.op](spec, shape, items, chunk)
