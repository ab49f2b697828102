# SPDX-License-Identifier: Apache-2.0
"""The `trace` argument of ops, and of the collectives how much their kernels note at most, and where."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, kind_of
from ...trace.buffer import Section, Trace
from ..collectives.kernels import CollectiveKernel, LaunchShape, barriers
from .validate import RankArray

if TYPE_CHECKING:
    from ...comm.group import Group


def require_trace(value: Any, of: str) -> Trace:
    """`value`, or ArgumentError where it is no `Trace`."""
    if not isinstance(value, Trace):
        raise ArgumentError("trace", kind_of(value), f"a Trace of the {of}, or None")
    return value


class CallTrace:
    """The parts of a trace that one prepared call writes; it is kept as long as the call may be launched."""

    def __init__(self, group: Group, trace: Any) -> None:
        """Raises ArgumentError for what is no `Trace` or does not cover every device of the group."""
        self._devices = [rank.device for rank in group]
        self._trace = require_trace(trace, "group")
        self.sections: list[Section] = []
        self.operands = [[RankArray("trace", trace.buffer(device), None, False)] for device in self._devices]

    def reserve(
        self, spec: CollectiveKernel, shape: LaunchShape, items: int, chunk: int
    ) -> tuple[CollectiveKernel, list[Section]]:
        """For a launch over `items` elements (all-reduce) or rows (fused) in such chunks: the traced kernel, and a
        section a local rank.

        Raises ArgumentError if the trace has too little room.
        """
        name = f"{spec.op}_naive" if spec.local else spec.name
        phases, rounds = counts(spec, shape, items, chunk)
        found = self._trace.sections(self._devices, name, shape.blocks, phases, rounds, spec.ranks)
        self.sections += found
        return dataclasses.replace(spec, traced=found[0].capacity), found


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def counts(spec: CollectiveKernel, shape: LaunchShape, items: int, chunk: int) -> tuple[int, int]:
    """(most phases that a block notes, its barriers), for `items` elements (all-reduce) or rows (fused)."""
    rounds, chunks = barriers(spec, items, chunk), 1
    if spec.algo == "two_stage":
        items = _ceil_div(items if spec.op != "allreduce" else _ceil_div(items, spec.width), spec.ranks)
    elif spec.op == "allreduce":
        items = _ceil_div(items, spec.width)
    if spec.staged or spec.algo == "two_stage":
        chunks, items = _ceil_div(items, chunk), min(items, chunk)
    work = _allreduce_phases(spec, shape, items) if spec.op == "allreduce" else _rmsnorm_phases(spec, shape, items)
    if spec.local:
        return 1 + work + 1, 0
    return 1 + 2 * rounds + chunks * (spec.staged + work) + 1, rounds


def _allreduce_phases(spec: CollectiveKernel, shape: LaunchShape, packs: int) -> int:
    """For a chunk of which this rank reduces `packs` packs: a load of several at once, a sum and a store for each."""
    each = _ceil_div(packs, shape.blocks * shape.threads)
    loads = each // spec.packs + (spec.packs - 1 if each >= spec.packs else each)
    return loads + 2 * each + (spec.algo == "two_stage")


def _rmsnorm_phases(spec: CollectiveKernel, shape: LaunchShape, rows: int) -> int:
    """For a chunk of which this rank reduces `rows` rows: the sum, the norm and the store of each."""
    each = _ceil_div(rows, shape.blocks)
    if spec.algo == "two_stage" and spec.residual:  # a sum; then all ranks' rows
        return each * (1 + 3 * spec.ranks)
    return 3 * each + (spec.algo == "two_stage")
