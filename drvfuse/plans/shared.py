# SPDX-License-Identifier: Apache-2.0
"""What the plans of all collectives share: chunks of the workspace, barriers, and how many phases a traced block
records.

Everything in the plans depends on shapes and limits that are the same on every rank, so every rank arrives at the same
kernel, grid and number of barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from .limits import ceil_div

PACK_BYTES = 16
MAX_BLOCKS = 256  # the number of blocks for which a workspace has flags
MAX_THREADS = 512


@dataclass(frozen=True)
class LaunchShape:
    """Grid and block, and the number of packs per thread that the kernel must be compiled for."""

    blocks: int
    threads: int
    packs: int


@dataclass(frozen=True)
class Work:
    """The properties of a kernel that sums over ranks or nodes, as far as chunks, barriers and traces depend on them.

    The units of the kernel are packs of 16 bytes of the input, or rows (`plans.rows.RowsWork`)."""

    algo: str
    ranks: int
    itemsize: int  # bytes of an element of the inputs
    out_itemsize: int  # bytes of an element of the output
    staged: bool = False  # the kernel copies its input to the workspace, where peers read it
    local: bool = False  # no peer takes part
    multimem: bool = False  # inputs are read through multicast memory; if they are staged, they are staged there
    to_outputs: bool = False  # results are stored through multicast memory to the outputs of all ranks
    nodes: bool = False  # the kernel adds the partial sums of nodes
    partial: bool = False  # the kernel writes the partial sums of its node

    @property
    def width(self) -> int:
        """Elements of an input pack."""
        return PACK_BYTES // self.itemsize

    def phases(self, shape: LaunchShape, units: int) -> int:
        """The number of phases that a traced block records in one chunk, if its rank sums `units` units there. For
        packs: one load for several packs, and a sum and a store for each pack."""
        each = ceil_div(units, shape.blocks * shape.threads)
        loads = each // shape.packs + (shape.packs - 1 if each >= shape.packs else each)
        return loads + 2 * each + (self.algo == "two_stage")


def ragged(elements: int, itemsize: int) -> bool:
    """Whether the last pack of `elements` elements is incomplete."""
    return elements * itemsize % PACK_BYTES != 0


def chunk_of(wanted: int, each: int, payload_bytes: int, what: str) -> int:
    """The number of items of a chunk: `wanted`, or as many items of `each` bytes as the payload holds.

    Raises ArgumentError if the payload holds none.
    """
    chunk = min(wanted, payload_bytes // each)
    if chunk < 1:
        raise ArgumentError(
            "workspace_bytes", payload_bytes, f"at least {each} in Group.local for this call: one {what}"
        )
    return chunk


def naive_slot(payload_bytes: int, ranks: int, unit: int) -> int:
    """The largest number of bytes of a rank's input that a chunk of algorithm "naive" takes, a multiple of `unit`.

    The payload has one slot of this size for each other rank. Slots begin at multiples of 16 bytes. Raises
    ArgumentError if a slot has no room for one unit.
    """
    available = payload_bytes // max(ranks - 1, 1) // 16 * 16
    if available < unit:
        needed = ceil_div(unit, 16) * 16 * (ranks - 1)
        raise ArgumentError("workspace_bytes", payload_bytes, f"at least {needed} in Group.local for this call")
    return available // unit * unit


def barriers(work: Work, units: int, chunk: int) -> int:
    """The number of barriers that a launch over `units` units passes with chunks of `chunk` units of every rank."""
    if work.local:
        return 0
    if work.partial:
        return 1 + work.staged
    if work.nodes:
        return 1
    if work.algo == "two_stage":
        chunks = ceil_div(ceil_div(units, work.ranks), chunk)
        return 1 + chunks * (2 if work.staged else 1)
    return 1 + (ceil_div(units, chunk) if work.staged else 1)


def trace_counts(work: Work, shape: LaunchShape, units: int, chunk: int) -> tuple[int, int]:
    """(The largest number of phases, the number of barriers) that a traced block records for `units` units."""
    rounds, chunks = barriers(work, units, chunk), 1
    if work.algo == "two_stage":
        units = ceil_div(units, work.ranks)
    if work.staged or work.algo == "two_stage":
        chunks, units = ceil_div(units, chunk), min(units, chunk)
    phases = work.phases(shape, units)
    if work.local:
        return 1 + phases + 1, 0
    return 1 + 2 * rounds + chunks * (work.staged + phases) + 1, rounds
