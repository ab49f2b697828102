# SPDX-License-Identifier: Apache-2.0
"""Collectives that only move bytes: which bytes go from which rank to which, and how their kernels divide the work.

All-gather, broadcast and all-to-all are described by a table of moves: `moves[i][j]` is the move from rank i's input to
rank j's output. A call has one table for its rows and another for their scales, if there are any. All values here
depend on numbers that are the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .limits import ceil_div
from .moves_scales import Arrangement
from .push import GREETINGS_BYTES, PushShape, rounds_of, threads_of_unit
from .shared import MAX_BLOCKS, MAX_THREADS, PACK_BYTES, LaunchShape, chunk_of
from .traffic import Traffic
from .tuning import Costs

PUSH = ("push", "relay")
_BLOCKS_OF_OWN = 8  # in grids of eight blocks or more, every eighth copies bytes that stay on their rank (move.cu)
_KEY_BYTES = 4  # bytes of the key of a warp's packs (cu/collectives/moves/move_push.cu)


class Move(NamedTuple):
    """`nbytes` bytes from offset `source` of an input to offset `target` of an output."""

    source: int
    target: int
    nbytes: int

    @property
    def packs(self) -> int:
        return ceil_div(self.nbytes, PACK_BYTES)


Moves = tuple[tuple[Move, ...], ...]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def all_gather(rows: Sequence[int], row_bytes: int) -> Moves:
    """The moves of an all-gather: rank i's `rows[i]` rows go to every output, after the rows of the ranks before it."""
    starts = _starts(rows)
    return tuple(
        tuple(Move(0, start * row_bytes, count * row_bytes) for _ in rows)
        for start, count in zip(starts, rows, strict=True)
    )


def all_gather_scales(arrangement: Arrangement) -> Moves:
    """The moves of scales with `arrangement`: every rank sends its scales to every output. The targets of these
    moves are not used, as the scales of a rank do not stay together in an output."""
    return tuple((Move(0, 0, nbytes),) * len(arrangement.rows) for nbytes in arrangement.rank_bytes)


def broadcast(ranks: int, root: int, nbytes: int) -> Moves:
    """The moves of a broadcast: the root's input goes to every output."""
    return tuple(tuple(Move(0, 0, nbytes if i == root else 0) for _ in range(ranks)) for i in range(ranks))


def all_to_all(splits: Sequence[Sequence[int]], row_bytes: int) -> Moves:
    """The moves of an all-to-all: `splits[i][j]` rows go from rank i to rank j. An input has the rows in the order of
    the ranks that get them, an output in the order of the ranks that send them."""
    sources = [_starts(of_rank) for of_rank in splits]
    targets = [_starts(to_rank) for to_rank in zip(*splits, strict=True)]
    return tuple(
        tuple(
            Move(sources[i][j] * row_bytes, targets[j][i] * row_bytes, count * row_bytes)
            for j, count in enumerate(of_rank)
        )
        for i, of_rank in enumerate(splits)
    )


@dataclass(frozen=True)
class MoveWork:
    """What a call moves: a table of moves for its rows, and another one for scales, if there are any. `same`: a rank's
    bytes are the same for all ranks, itself included. `root` is the root of a broadcast. `arrangement` describes scales
    in the layout "column" or "tiles"."""

    tables: tuple[Moves, ...]
    same: bool
    root: int | None = None
    arrangement: Arrangement | None = None

    @property
    def ranks(self) -> int:
        return len(self.tables[0])

    @property
    def nbytes(self) -> int:
        """The number of all bytes that are moved, including those that stay on their rank."""
        return sum(move.nbytes for table in self.tables for of_rank in table for move in of_rank)

    def aligned(self, algo: str) -> bool:
        """Whether every move to another rank begins at a multiple of 16 bytes where `algo` accesses the memory of a
        peer: in the peer's output with "put", in the peer's input with "pull"."""
        far = [
            move.target if algo == "put" else move.source
            for table in self.tables
            for i, of_rank in enumerate(table)
            for j, move in enumerate(of_rank)
            if i != j and move.nbytes
        ]
        return all(offset % PACK_BYTES == 0 for offset in far)

    @property
    def most(self) -> int:
        """The largest number of packs that one rank sends to another."""
        return max((self._packs(i, j) for i in range(self.ranks) for j in range(self.ranks) if i != j), default=0)

    @property
    def most_own(self) -> int:
        """The largest number of packs that stay on one rank."""
        return max(self._packs(i, i) for i in range(self.ranks))

    @property
    def remote(self) -> int:
        """The number of bytes that all ranks together send to other ranks."""
        return sum(self.sent(i) for i in range(self.ranks))

    @property
    def busiest(self) -> int:
        """The bytes on the busiest link: the largest number that a rank sends to the others, or receives from them."""
        return max(max(self.sent(i), self.received(i)) for i in range(self.ranks))

    def sent(self, rank: int) -> int:
        return sum(table[rank][j].nbytes for table in self.tables for j in range(self.ranks) if j != rank)

    def received(self, rank: int) -> int:
        return sum(table[i][rank].nbytes for table in self.tables for i in range(self.ranks) if i != rank)

    def _packs(self, i: int, j: int) -> int:
        return sum(table[i][j].packs for table in self.tables)


def push_shape(work: MoveWork, workspace_bytes: int) -> PushShape:
    """The shape of a push call. In a unit each thread of a block sends one pack to every peer. `chunk` is the number of
    packs of a round.

    Raises ArgumentError if the slots cannot hold one unit from every peer.
    """
    most = max(work.most, work.most_own)
    threads = threads_of_unit(most)
    peers = work.ranks - 1
    per_unit = peers * (threads * PACK_BYTES + threads // 32 * _KEY_BYTES)
    # At least one unit, even if no bytes move to peers: every rank must receive words from all others.
    units = max(1, ceil_div(work.most, threads))
    of_round, rounds = rounds_of(units, 1, per_unit, workspace_bytes)
    # With each unit a thread also copies one of the packs that stay on its rank.
    beside = of_round * rounds * threads if peers else 0
    rest = max(0, work.most_own - beside)
    return PushShape(
        units=max(of_round, ceil_div(rest, threads)),
        threads=threads,
        packs=1,
        cluster=1,
        exact=False,
        depth=0,
        relays=False,
        chunk=of_round * threads,
        rounds=rounds,
        slot_bytes=GREETINGS_BYTES + of_round * per_unit,
    )


def packs_in_flight(staged: bool, arranged: bool) -> int:
    """The number of packs that a thread has in flight with "put" and "pull". Kernels that also rearrange staged scales
    need registers for that, so they have fewer."""
    return 4 if staged and arranged else 8


def barrier_shape(work: MoveWork, max_blocks: int, staged: bool) -> LaunchShape:
    """Grid and block of the algorithms "put" and "pull"."""
    packs = max(work.most, work.most_own)
    threads = 256 if packs <= 256 * 64 else MAX_THREADS
    blocks = min(max(1, ceil_div(packs, threads)), max_blocks, MAX_BLOCKS)
    return LaunchShape(blocks, threads, packs_in_flight(staged, work.arrangement is not None))


def staged_chunk(work: MoveWork, algo: str, payload_bytes: int) -> int:
    """The number of packs of each move that are staged at a time: all packs, or as many as half of the payload
    holds."""
    slots = 1 if work.same and algo == "pull" else max(1, work.ranks - 1)
    return chunk_of(max(1, work.most), 2 * slots * PACK_BYTES, payload_bytes, "16-byte pack for every rank")


def barriers(work: MoveWork, chunk: int) -> int:
    """The number of barriers that a launch passes. `chunk` is the number of packs staged at a time, 0 if none are."""
    return 2 if not chunk else 1 + ceil_div(max(1, work.most), chunk)


def trace_counts(work: MoveWork, shape: LaunchShape, chunk: int) -> tuple[int, int]:
    """(The largest number of phases, the number of barriers) that a traced block records."""
    rounds = barriers(work, chunk)

    def copying(packs: int, blocks: int) -> int:
        return 2 * ceil_div(packs, blocks * shape.threads * shape.packs)

    if chunk:
        passes = (rounds - 1) * 2 * (work.ranks - 1)
        phases = copying(work.most_own, shape.blocks) + passes * copying(min(work.most, chunk), shape.blocks)
    elif shape.blocks >= _BLOCKS_OF_OWN:  # a block copies bytes that stay or bytes that move, not both
        own = shape.blocks // _BLOCKS_OF_OWN
        phases = max(copying(work.most_own, own), (work.ranks - 1) * copying(work.most, shape.blocks - own))
    else:
        phases = copying(work.most_own, shape.blocks) + (work.ranks - 1) * copying(work.most, shape.blocks)
    return 2 + 2 * rounds + phases, rounds


def traffic(work: MoveWork, algo: str, staged: bool) -> Traffic:
    """The traffic of a call by `algo`, over all ranks. Bytes that stay on their rank count as local reads and
    writes."""
    remote, own = work.remote, work.nbytes - work.remote
    if algo == "naive":
        # A copy by the driver reads on one device and writes on the other. With staging each byte is copied twice.
        local = 4 * remote if staged else 2 * remote
        return Traffic(2 * own + local, remote)
    once = sum(table[i][i - 1].nbytes for table in work.tables for i in range(work.ranks) if work.ranks > 1)
    if algo == "push" and work.same and work.ranks > 1:  # bytes are read once, for all peers and the rank's own output
        return Traffic(own + once + 3 * remote, remote)
    if algo in PUSH:  # the sender reads bytes; the receiver polls, clears and writes them
        return Traffic(2 * own + (once if work.same else remote) + 3 * remote, remote)
    if staged and algo == "pull" and work.same:  # one staged copy of the input serves all peers
        return Traffic(2 * own + 2 * once + remote, remote)
    return Traffic(2 * own + (3 * remote if staged else remote), remote)


def algorithm(costs: Costs, work: MoveWork, behind_barriers: str, staged: bool) -> str:
    """The algorithm that "auto" selects: "push", `behind_barriers`, which is the name of an algorithm with barriers,
    or, for a broadcast over three ranks or more, "relay".
    """
    nbytes = work.busiest
    times = {"push": costs.move_push.microseconds(nbytes)}
    times[behind_barriers] = (costs.move_staged if staged else costs.move_direct).microseconds(nbytes)
    if work.root is not None and work.ranks > 2:
        times["relay"] = costs.move_relay.microseconds(work.sent(work.root) / (work.ranks - 1))
    return min(times, key=lambda algo: times[algo])
