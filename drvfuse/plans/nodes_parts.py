# SPDX-License-Identifier: Apache-2.0
"""How a reduce-scatter over several nodes divides its work and the payload of the workspace.

Rank k of a node sums, over the ranks of its node, the parts that rank k of every node owns. The results are its partial
sums. It keeps those of its own part, and sends the others to the ranks that own the parts. So a rank receives from
every other node the partial sums of its own part, and adds the sums of all nodes in the order of the nodes.

Parts that are larger than the payload are divided into chunks, with equally many packs or rows of every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from .limits import ceil_div
from .shared import PACK_BYTES
from .sums import Parts, naive_chunks
from .sums import traffic as scatter_traffic
from .traffic import Traffic

_FLOAT = 4


@dataclass(frozen=True)
class ScatterChunk:
    """The elements [begin, end) of each rank's part, and the layout of partial sums in every payload. From offset
    `area` on there are places of equal size: one for each node's sums of the rank's own part, and then one for the sums
    that the rank sends to each other node.

    A place has float32 packs of `width` elements, one for each pack of the largest part of the chunk. A sum has the
    same position in its pack as the element has in the tensor's pack, so the first and the last pack may be used in
    part. `ragged`: a whole part begins or ends within a pack.
    """

    parts: tuple[tuple[int, int], ...]
    width: int
    nodes: int
    area: int
    ragged: bool

    def packs(self, rank: int) -> int:
        """The number of packs that contain at least one element of the rank's part."""
        begin, end = self.parts[rank]
        return ceil_div(end, self.width) - begin // self.width if begin < end else 0

    @property
    def largest(self) -> int:
        """The number of packs of the largest part."""
        return max(map(self.packs, range(len(self.parts))))

    @property
    def stride(self) -> int:
        """The bytes that one node's sums take in a payload, for the largest part."""
        return self.largest * self.width * _FLOAT

    @property
    def end(self) -> int:
        """The bytes of the payload that are used."""
        return self.area + (2 * self.nodes - 1) * self.stride

    def received(self, node: int) -> int:
        """The offset of the sums of the rank's own part that come from `node`."""
        return self.area + node * self.stride

    def sent(self, step: int) -> int:
        """The offset of the sums that are sent to the node `step` >= 1 nodes further on."""
        return self.area + (self.nodes + step - 1) * self.stride

    def skew(self, rank: int) -> int:
        """The bytes that precede the first sum of the rank's part in the part's first pack."""
        return self.parts[rank][0] % self.width * _FLOAT

    def sum_bytes(self, rank: int) -> int:
        """The bytes of the sums that one node computes for the part of `rank`."""
        begin, end = self.parts[rank]
        return (end - begin) * _FLOAT


def pack_chunks(parts: Parts, nodes: int, area: int, payload_bytes: int) -> list[ScatterChunk]:
    """Chunks of whole packs, for parts with at least one element. ArgumentError for a payload that cannot hold a pack.

    The chunks do not use the payload before `area`.
    """
    fits = _packs_that_fit(parts.width, nodes, area, payload_bytes, 1)
    chunks = ceil_div(parts.largest, fits)
    packs = ceil_div(parts.largest, chunks)
    ranges = [naive_chunks(parts, rank, packs, chunks) for rank in range(len(parts.starts) - 1)]
    return [ScatterChunk(of_chunk, parts.width, nodes, area, parts.ragged) for of_chunk in zip(*ranges, strict=True)]


def row_chunks(
    counts: Sequence[int], columns: int, width: int, nodes: int, area: int, payload_bytes: int
) -> list[tuple[int, ScatterChunk]]:
    """(The number of a part's rows that precede the chunk, the chunk) for each chunk of whole rows. The part of rank r
    has `counts[r]` rows."""
    least = ceil_div(columns, width) + (columns % width != 0)  # the largest number of packs that a row may touch
    fits = _packs_that_fit(width, nodes, area, payload_bytes, least)
    if columns % width:
        fits -= 1  # rows that begin within a pack touch up to one pack more than their elements fill
    rows = max(1, min(max(counts), fits * width // columns))
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    found = []
    for first in range(0, max(counts), rows):
        bounds = [
            tuple((start + min(count, at)) * columns for at in (first, first + rows))
            for start, count in zip(starts, counts, strict=True)
        ]
        parts = tuple((low, high) for low, high in bounds)
        found.append((first, ScatterChunk(parts, width, nodes, area, columns % width != 0)))
    return found


def _packs_that_fit(width: int, nodes: int, area: int, payload_bytes: int, least: int) -> int:
    """The number of packs for which a payload has room in every place of a `ScatterChunk`. ArgumentError if that is
    fewer than `least`."""
    each = (2 * nodes - 1) * width * _FLOAT
    fits = (payload_bytes - area) // each
    if fits < least:
        times = 2 if area else 1
        needed = f"at least {times * least * each + PACK_BYTES} in the group's constructor for this call"
        raise ArgumentError("workspace_bytes", payload_bytes, f"{needed} over several nodes")
    return fits


def traffic(algo: str, nodes: int, inside: int, elements: int, itemsize: int, staged: bool) -> Traffic:
    """The traffic of a sum over the ranks of all nodes.

    Every node writes partial sums of the whole tensor. The partial sums of parts that other nodes own are read and
    sent.
    """
    of_node = scatter_traffic(algo, inside, elements * itemsize, staged)
    sums = _FLOAT * elements
    local = nodes * (of_node.local + 2 * sums) + (nodes - 1) * sums
    return Traffic(local, nodes * of_node.remote + (nodes - 1) * sums)
