# SPDX-License-Identifier: Apache-2.0
"""How the push algorithms divide their work: threads, clusters, rounds and slots, and the phases that a traced block
records.

Everything here depends on shapes and limits that are the same on every rank. A call has one round, or several where its
tensor is larger than half of the slots. Rounds use the halves alternately.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from .limits import ceil_div
from .rows import MAX_COLUMNS, MAX_ROWS, RowsWork
from .shared import PACK_BYTES, Work

GREETINGS_BYTES = 128  # bytes at the start of a half for the words that greet() of cu/sync/push.cuh sends
CLUSTER_CAPABILITY = (9, 0)
_MAX_HALF = 2**32 - 128  # the largest half in bytes: offsets in a half have 32 bits
_MOST_ITEMS = 2**31  # the largest number of items of a round: kernels count a round's packs in 32 bits
_EXTRA = 256  # a half has this many bytes more than half of `workspace_bytes`: for greetings and a few rows' scales


def half_bytes(workspace_bytes: int) -> int:
    """The number of bytes in each half of the slots of a workspace with `workspace_bytes` bytes."""
    return min(workspace_bytes // 256 * 128 + _EXTRA, _MAX_HALF)


@dataclass(frozen=True)
class PushShape:
    """The shape for which a push kernel is compiled and launched.

    A unit of work is a pack per thread of a block (all-reduce) or a row (fused), and is done by a `cluster` of blocks.
    `units` is the number of units of the largest round. A thread has `packs` packs of a unit; with `exact` all of them
    exist. A block sends `depth` units ahead of the unit that it sums. `relays`: the call has several rounds, and a rank
    learns of a peer's progress through a third rank (cu/sync/push.cuh). `chunk` is the number of packs (all-reduce) or
    rows (fused) of a round. `slot_bytes` is the number of bytes that the call uses of each half of the slots. `owners`
    is the number of ranks among which push_two_shot divides the units of a round, and 0 for other algorithms.

    Raises ArgumentError for several rounds with fewer units than owners: their greetings could be lost (`greet` in
    cu/sync/push.cuh).
    """

    units: int
    threads: int
    packs: int
    cluster: int
    exact: bool
    depth: int
    relays: bool
    chunk: int
    rounds: int
    slot_bytes: int
    owners: int = 0

    def __post_init__(self) -> None:
        if self.rounds > 1 and self.units < self.owners:
            raise ArgumentError("units", self.units, f"at least {self.owners} in a call of {self.rounds} rounds")

    def blocks(self, most: int) -> int:
        """The number of blocks: at most `most`, but at least one cluster."""
        return min(self.units, max(most // self.cluster, 1)) * self.cluster

    def shares(self, blocks: int, unit: int, by_block: bool) -> tuple[int, int]:
        """(What the first warp or block of the grid adds to the epoch, what each of the others adds); together they add
        `unit`, or 0 if the number of rounds is even. If they add 0, the epoch does not change, and the next call begins
        with the same half of the slots.
        """
        if self.rounds % 2 == 0:
            return 0, 0
        adders = blocks if by_block else blocks * self.threads // 32
        each = unit // adders
        return unit - each * (adders - 1), each


def sums_shape(work: Work, count: int, workspace_bytes: int) -> PushShape:
    """The shape for `count` >= 1 elements. ArgumentError for slots that cannot hold a pack for every thread of a
    block.
    """
    packs = ceil_div(count, work.width)
    two_shot = work.algo == "push_two_shot"
    threads = threads_of_unit(packs)
    peers = work.ranks - 1
    if two_shot:
        step, per_step = work.ranks * threads, peers * threads * (PACK_BYTES + work.width * work.out_itemsize)
    else:
        step, per_step = 1, peers * PACK_BYTES
    chunk, rounds = rounds_of(packs, step, per_step, workspace_bytes)
    return PushShape(
        units=ceil_div(min(packs, chunk), threads),
        threads=threads,
        packs=1,
        cluster=1,
        exact=packs % threads == 0 and (rounds == 1 or (chunk % threads == 0 and packs % chunk == 0)),
        depth=_depth_of_packs(packs) if two_shot else 0,
        relays=two_shot and rounds > 1 and work.ranks > 2,
        chunk=chunk,
        rounds=rounds,
        slot_bytes=GREETINGS_BYTES + ceil_div(chunk, step) * per_step,
        owners=work.ranks if two_shot else 0,
    )


def rows_shape(work: RowsWork, rows: int, columns: int, workspace_bytes: int, clusters: bool) -> PushShape:
    """The shape for 1 to MAX_ROWS rows of 1 to MAX_COLUMNS columns, on devices with or without clusters.

    ArgumentError for slots that cannot hold one row of every rank.
    """
    if rows > MAX_ROWS:
        raise ArgumentError("rows", rows, f"at most {MAX_ROWS}")
    if not 1 <= columns <= MAX_COLUMNS:
        raise ArgumentError("columns", columns, f"1 to {MAX_COLUMNS}")
    row_packs = ceil_div(columns, work.width)
    two_shot = work.algo == "push_two_shot"
    most = _most_blocks_of_row(rows) if clusters else 1
    cluster, threads, packs = _threads_of_row(row_packs, most, 1024 if work.ranks <= 4 else 512)
    row_bytes = row_packs * PACK_BYTES
    if two_shot:
        step, per_step = (
            work.ranks,
            (work.ranks - 1) * (row_bytes + work.sent_bytes(row_packs) + work.sent_scale_bytes(columns)),
        )
    else:
        step, per_step = 1, (work.ranks - 1) * row_bytes
    chunk, rounds = rounds_of(rows, step, per_step, workspace_bytes)
    return PushShape(
        units=min(rows, chunk),
        threads=threads,
        packs=packs,
        cluster=cluster,
        exact=row_packs == cluster * threads * packs,
        depth=_depth_of_rows(rows) if two_shot else 0,
        relays=two_shot and rounds > 1 and work.ranks > 2,
        chunk=chunk,
        rounds=rounds,
        slot_bytes=GREETINGS_BYTES + ceil_div(chunk, step) * per_step,
        owners=work.ranks if two_shot else 0,
    )


def trace_phases(shape: PushShape, blocks: int) -> int:
    """The largest number of phases that a traced block records."""
    each = shape.rounds * (ceil_div(shape.units * shape.cluster, blocks) + 2 * shape.depth)
    return 2 + 5 * each


def threads_of_unit(packs: int) -> int:
    """The number of threads per block for a call of `packs` packs. Each thread has one pack of a unit."""
    return 256 if packs > 1 << 16 else 64


def _depth_of_packs(packs: int) -> int:
    return 2 if packs >= 1 << 19 else 0


def _depth_of_rows(rows: int) -> int:
    return 1 if rows >= 512 else 0


def _most_blocks_of_row(rows: int) -> int:
    """The largest number of blocks that may share a row: larger if there are few rows. Measured on an H200
    (docs/performance.md)."""
    return 8 if rows <= 32 else 2


def _threads_of_row(row_packs: int, most: int, threads: int) -> tuple[int, int, int]:
    """(blocks of the cluster, threads of each, packs of a thread) for a row, if possible with no thread idle.

    At most `most` blocks of `threads` threads, so that the registers suffice.
    """
    blocks = most
    while blocks >= 1:
        if row_packs % (32 * blocks) == 0 and row_packs // blocks <= threads:
            return blocks, row_packs // blocks, 1
        blocks //= 2
    packs = ceil_div(row_packs, threads * most)
    return most, ceil_div(ceil_div(row_packs, most * packs), 32) * 32, packs


def rounds_of(total: int, step: int, per_step: int, workspace_bytes: int) -> tuple[int, int]:
    """(Items of a round, number of rounds) for `total` items, in as few rounds as the slots allow.

    Every `step` items take `per_step` bytes of a half of the slots.
    """
    fits = (half_bytes(workspace_bytes) - GREETINGS_BYTES) // per_step if per_step else _MOST_ITEMS // step
    steps = ceil_div(total, step)
    if fits < 1:
        # the least `workspace_bytes` for which half_bytes() returns enough for one step
        needed = ceil_div(GREETINGS_BYTES + per_step - _EXTRA, 128) * 256
        raise ArgumentError("workspace_bytes", workspace_bytes, f"at least {needed} in Group.local for this call")
    if steps <= fits:
        return steps * step, 1
    rounds = ceil_div(steps, fits)
    chunk = ceil_div(steps, rounds)
    return chunk * step, ceil_div(steps, chunk)
