# SPDX-License-Identifier: Apache-2.0
"""How bytes are moved between the ranks of a group over several nodes: in steps inside the nodes and between them.

In a step inside the nodes a kernel moves bytes between any ranks of a node. In a step between nodes the exchange engine
moves bytes, only between ranks that have the same index inside their nodes. So bytes for a rank that has another index,
on another node, take a step of each kind. No byte is sent twice between the same two nodes, and all ranks send about
equally many bytes.

Steps are tables over all ranks of the group, and the same on all ranks: each rank does its own part of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import ArgumentError
from .limits import ceil_div
from .moves import Move, Moves, MoveWork
from .moves_scales import Arrangement, chunks_of_scales
from .shared import PACK_BYTES
from .sums import split_rows
from .traffic import Traffic


class Place(Enum):
    """The memory in which bytes of a step lie: a rank's input, its output, or the payload of its workspace."""

    INPUT = "input"
    OUTPUT = "output"
    PAYLOAD = "payload"


@dataclass(frozen=True)
class Inside:
    """A step inside the nodes, by one kernel per rank: for each part of the call (rows, scales) a table of moves over
    all ranks. Tables without bytes may be left out at the end.

    `same`: a rank's bytes are the same for all ranks of its node, itself included. `root`: in a broadcast, the index
    inside its node of the rank that has the bytes. With `arrangement` the last part consists of scales, which are
    rearranged and stored after the first `begin` bytes of the outputs. If the scales come from payloads, no other part
    has bytes.
    """

    tables: tuple[Moves, ...]
    source: Place
    target: Place
    same: bool = False
    root: int | None = None
    arrangement: Arrangement | None = None
    begin: int = 0


@dataclass(frozen=True)
class Crossing:
    """`nbytes` >= 1 bytes of part `part` that rank `sender` sends to the output or the payload of rank `receiver` on
    another node."""

    sender: int
    receiver: int
    part: int
    source: Place
    source_offset: int
    target_offset: int
    nbytes: int
    target: Place = Place.OUTPUT


Step = Inside | tuple[Crossing, ...]


class NodeRanks:
    """The nodes of a group, all with equally many ranks; `of[rank]` is the node of a rank."""

    def __init__(self, of: Sequence[int]) -> None:
        self.of = tuple(of)
        self.nodes = [[rank for rank, node in enumerate(of) if node == number] for number in range(max(of) + 1)]
        self.count, self.inside = len(self.nodes), len(self.nodes[0])

    def place(self, rank: int) -> int:
        """The index of a rank inside its node."""
        return self.nodes[self.of[rank]].index(rank)

    def peer(self, rank: int, step: int) -> int:
        """The rank with the same index on the node that is `step` nodes further on."""
        return self.nodes[(self.of[rank] + step) % self.count][self.place(rank)]

    def table(self, moves: dict[tuple[int, int], Move]) -> Moves:
        """A table over all ranks that has the moves `moves` between pairs of ranks of one node, and no others."""
        ranks, none = range(len(self.of)), Move(0, 0, 0)
        return tuple(tuple(moves.get((i, j), none) for j in ranks) for i in ranks)

    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of ranks of one node, each rank with itself included."""
        return [(i, j) for ranks in self.nodes for i in ranks for j in ranks]

    def of_node(self, table: Moves, node: int) -> Moves:
        """The part of the table for the ranks of one node."""
        return tuple(tuple(table[i][j] for j in self.nodes[node]) for i in self.nodes[node])


def all_gather(
    tables: Sequence[Moves], ranks: NodeRanks, arrangement: Arrangement | None = None, payload_bytes: int = 0
) -> list[Step]:
    """The steps of an all-gather with the moves `tables`. Each rank sends its input to the ranks with the same index on
    other nodes. Inside every node the ranks send their own inputs to one another and then, node by node, the bytes that
    they have received.

    With `arrangement` the last table is that of scales, which are rearranged in the outputs. Scales from other nodes
    are received in payloads, in chunks that fit into `payload_bytes`, and rearranged from the payloads into the
    outputs.
    """

    def own(part: Moves, rank: int) -> Move:
        return part[rank][rank]

    whole = tables if arrangement is None else tables[:-1]
    crossings = tuple(
        Crossing(rank, ranks.peer(rank, step), number, Place.INPUT, *own(part, rank))
        for rank in range(len(ranks.of))
        for step in range(1, ranks.count)
        for number, part in enumerate(whole)
        if own(part, rank).nbytes
    )
    scales: list[Step] = []
    if arrangement is not None:
        scales = _scales_of_other_nodes(len(tables) - 1, arrangement, ranks, payload_bytes)
        if scales:
            first = scales.pop(0)
            assert isinstance(first, tuple)
            crossings += first
    steps: list[Step] = [_inside(ranks, tables, Place.INPUT, same=True, arrangement=arrangement), crossings, *scales]
    for step in range(1, ranks.count):
        received = []
        for part in whole:
            found = {}
            for i, j in ranks.pairs():
                _, at, nbytes = own(part, ranks.peer(i, step))
                found[i, j] = Move(at, at, nbytes)
            received.append(ranks.table(found))
        steps.append(Inside(tuple(received), Place.OUTPUT, Place.OUTPUT, same=True))
    return _with_work(steps)


def _scales_of_other_nodes(part: int, arrangement: Arrangement, ranks: NodeRanks, payload_bytes: int) -> list[Step]:
    """The steps that gather the scales (part `part` of the call) of other nodes. For each chunk there is a step between
    the nodes, and then one step inside the nodes for each other node's scales. In a payload the scales from
    the node that is i nodes further on begin at offset (i - 1) * `slot_bytes`."""
    steps: list[Step] = []
    for chunk in chunks_of_scales(arrangement, payload_bytes, ranks.count - 1):
        crossings, inside = [], []
        for step in range(1, ranks.count):
            slot = (step - 1) * chunk.slot_bytes
            peers = [ranks.peer(rank, step) for rank in range(len(ranks.of))]
            table = ranks.table({(i, j): Move(slot, 0, chunk.nbytes[peers[i]]) for i, j in ranks.pairs()})
            rearranged = chunk.arrangement.of_ranks(peers)
            inside.append(Inside((table,), Place.PAYLOAD, Place.OUTPUT, True, None, rearranged, chunk.target))
            crossings += [
                Crossing(
                    sender, rank, part, Place.INPUT, chunk.sources[sender], slot, chunk.nbytes[sender], Place.PAYLOAD
                )
                for rank, sender in enumerate(peers)
                if chunk.nbytes[sender]
            ]
        steps += [tuple(crossings), *inside]
    return steps


def broadcast(nbytes: int, root: int, ranks: NodeRanks) -> list[Step]:
    """The steps of a broadcast of `nbytes` from rank `root`. The root's bytes go to the ranks of its node. Each of
    these ranks sends one piece to the ranks with its index on other nodes. The ranks of each other node then send their
    pieces to one another.
    """
    home = ranks.of[root]
    first = ranks.table({(root, rank): Move(0, 0, nbytes) for rank in ranks.nodes[home]})
    pieces, begin = [], 0
    for packs in split_rows(ceil_div(nbytes, PACK_BYTES), ranks.inside):
        end = min(nbytes, begin + packs * PACK_BYTES)
        pieces.append(Move(begin, begin, end - begin))
        begin = end
    crossings = tuple(
        Crossing(rank, ranks.peer(rank, step), 0, Place.OUTPUT, *piece)
        for rank, piece in zip(ranks.nodes[home], pieces, strict=True)
        for step in range(1, ranks.count)
        if piece.nbytes
    )
    last = ranks.table({(i, j): pieces[ranks.place(i)] for i, j in ranks.pairs() if ranks.of[i] != home})
    return _with_work(
        [
            Inside((first,), Place.INPUT, Place.OUTPUT, same=True, root=ranks.place(root)),
            crossings,
            Inside((last,), Place.OUTPUT, Place.OUTPUT, same=True),
        ]
    )


def all_to_all(table: Moves, ranks: NodeRanks, payload_bytes: int) -> list[Step]:
    """The steps of an all-to-all. Rows for rank k of another node are first copied to the payload of rank k of the
    sender's node, and sent from that payload, in chunks that fit into `payload_bytes`. The rows that stay inside a node
    are moved last.

    Rows for ranks with the sender's own index are copied too, to the sender's payload: in an in-place call received
    bytes replace bytes to be sent, so a whole chunk must be in payloads before any part of it is received.
    """
    slots = (ranks.count - 1) * ranks.inside
    away = [move.nbytes for i, row in enumerate(table) for j, move in enumerate(row) if ranks.of[i] != ranks.of[j]]
    chunk = min(payload_bytes // slots, max(away) + PACK_BYTES - 1) // PACK_BYTES * PACK_BYTES
    if not chunk and any(away):
        needed = f"at least {slots * PACK_BYTES} in the group's constructor for this call over several nodes"
        raise ArgumentError("workspace_bytes", payload_bytes, needed)
    steps: list[Step] = []
    for begin in range(0, max(away), max(1, chunk)):
        crossings = []
        for step in range(1, ranks.count):
            staged = {}
            for i, j in ranks.pairs():
                at, to, nbytes = table[i][ranks.peer(j, step)]
                count = min(chunk, nbytes - begin)
                if count <= 0:
                    continue
                slot = ((step - 1) * ranks.inside + ranks.place(i)) * chunk
                staged[i, j] = Move(at + begin, slot, count)
                crossings.append(Crossing(j, ranks.peer(j, step), 0, Place.PAYLOAD, slot, to + begin, count))
            steps.append(Inside((ranks.table(staged),), Place.INPUT, Place.PAYLOAD))
        steps.append(tuple(crossings))
    steps.append(_inside(ranks, [table], Place.INPUT))
    return _with_work(steps)


def _inside(
    ranks: NodeRanks,
    tables: Sequence[Moves],
    source: Place,
    same: bool = False,
    arrangement: Arrangement | None = None,
) -> Inside:
    """A step with those moves of `tables` that stay inside nodes, from `source` to the outputs."""
    kept = [ranks.table({(i, j): part[i][j] for i, j in ranks.pairs()}) for part in tables]
    return Inside(tuple(kept), source, Place.OUTPUT, same, arrangement=arrangement)


def _with_work(steps: Sequence[Step]) -> list[Step]:
    """The steps in which at least one rank moves something."""
    return [step for step in steps if (_moves_any(step) if isinstance(step, Inside) else step)]


def _moves_any(step: Inside) -> bool:
    stays = step.source is step.target
    every = ((i, j, move) for table in step.tables for i, row in enumerate(table) for j, move in enumerate(row))
    return any(move.nbytes and not (stays and i == j and move.source == move.target) for i, j, move in every)


def work_of(step: Inside, ranks: NodeRanks) -> MoveWork:
    """The work for which the step's kernel is planned, the same on all nodes. For each pair of indices (i, j) inside a
    node, it has the largest number of bytes that rank i of any node sends to rank j of that node.
    """
    found = []
    for table in step.tables:
        nodes = [ranks.of_node(table, node) for node in range(ranks.count)]
        found.append(tuple(tuple(map(_largest, zip(*rows, strict=True))) for rows in zip(*nodes, strict=True)))
    return MoveWork(tuple(found), step.same, step.root, step.arrangement)


def _largest(moves: tuple[Move, ...]) -> Move:
    """A move that has as many bytes as the largest of the moves, and is aligned if all of them are."""
    some = [move for move in moves if move.nbytes] or [Move(0, 0, 0)]
    source, target = (max(move[end] % PACK_BYTES for move in some) for end in range(2))
    return Move(source, target, max(move.nbytes for move in some))


def crossing_traffic(crossings: Sequence[Crossing]) -> Traffic:
    """Traffic of bytes that are read on one device and stored on another."""
    nbytes = sum(crossing.nbytes for crossing in crossings)
    return Traffic(nbytes, nbytes)
