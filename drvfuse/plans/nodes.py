# SPDX-License-Identifier: Apache-2.0
"""How a call over several nodes divides its work and the payload of the workspace.

The tensor is divided into chunks of whole items: packs (all-reduce) or rows (fused op). Each rank of a node owns a part
of a chunk, as `cu/common/partition.cuh` divides it. Ranks with the same index inside their nodes compute the same
values here, so the parts that they exchange have the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from .limits import ceil_div
from .shared import PACK_BYTES

_FLOAT = 4
STATUS_BYTES = 16
"""The bytes of the status that follows the partial sums of a node (cu/collectives/nodes/sums.cuh)."""
_MAX_PAYLOAD = 2**32 - 1  # the largest payload in bytes: the fused kernels' offsets have 32 bits


@dataclass(frozen=True)
class Share:
    """The size of an item: `packs` packs of `width` elements, and `result` bytes of results that peers gather.

    `inside` ranks form a node. `places` is the number of nodes whose partial sums lie in a payload, or 1 if the
    exchange engine adds the sums.
    """

    packs: int
    width: int
    result: int
    inside: int
    places: int
    staged: bool

    @property
    def sum_bytes(self) -> int:
        """Bytes of one node's partial sums of an item."""
        return self.packs * self.width * _FLOAT

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that one item of every owner's part takes; 0 where peers read the inputs themselves."""
        return self.inside * self.packs * PACK_BYTES if self.staged else 0


@dataclass(frozen=True)
class Chunk:
    """The items [first, first + items) of a tensor. The payload holds their results from offset 0 on, then each node's
    partial sums with their status, then the staged inputs."""

    first: int
    items: int
    share: Share

    @property
    def largest(self) -> int:
        """The largest number of items that a rank owns."""
        return ceil_div(self.items, self.share.inside)

    @property
    def sums(self) -> int:
        """The offset in the payload at which the partial sums begin."""
        return ceil_div(self.largest * self.share.result, PACK_BYTES) * PACK_BYTES

    @property
    def staging(self) -> int:
        """The offset in the payload at which the staged inputs begin."""
        return self.sums + self.share.places * (self.largest * self.share.sum_bytes + STATUS_BYTES)

    @property
    def end(self) -> int:
        """The bytes of the payload that are used."""
        return self.staging + self.largest * self.share.staging_bytes

    def count(self, place: int) -> int:
        """The number of float32 numbers that rank `place` of a node exchanges: the sums of the items that this rank
        owns, and the status."""
        each, more = divmod(self.items, self.share.inside)
        return (each + (place < more)) * self.share.packs * self.share.width + STATUS_BYTES // _FLOAT


def chunks(items: int, share: Share, payload_bytes: int) -> list[Chunk]:
    """The chunks of `items` items: as few as the payload allows, of equal size except the last.

    ArgumentError for a payload that cannot hold one item of every rank.
    """
    each = share.result + share.places * share.sum_bytes + share.staging_bytes
    around = PACK_BYTES + share.places * STATUS_BYTES  # padding after the results, and a status after each node's sums
    fits = (min(payload_bytes, _MAX_PAYLOAD) - around) // each * share.inside
    if fits < 1:
        needed = f"at least {each + around} in the group's constructor for this call over several nodes"
        raise ArgumentError("workspace_bytes", payload_bytes, needed)
    size = ceil_div(items, ceil_div(items, fits))
    return [Chunk(first, min(size, items - first), share) for first in range(0, items, size)]
