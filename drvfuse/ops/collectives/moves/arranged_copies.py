# SPDX-License-Identifier: Apache-2.0
"""Algorithm "naive" for scales by column or in tiles: copies by the driver, and a kernel that stores each scale to its
place among those of all rows.

Chunk by chunk every rank copies its peers' scales to slots in its workspace, and the kernel reads the slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....comm import workspace
from ....plans.limits import ceil_div
from ....plans.shared import PACK_BYTES, naive_slot
from ...call.specialisation import Specialisation, load
from ..shared import naive
from ..shared.params import of_collective
from .kernel import Arrangement

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.launch import Launch
    from ....runtime.stream import Stream
    from .call import MovePart

_THREADS = 256


@of_collective("collectives/moves/place_scales.cu", parts=(Arrangement,))
class PlaceScalesParams(ctypes.Structure):
    """The parameters of the kernel that places scales."""


class ArrangedCopies:
    """The copies and kernels by which all ranks gather the scales of one call with algorithm "naive"."""

    def __init__(self, group: Group, part: MovePart) -> None:
        """Raises ArgumentError if the workspaces are too small for 16 bytes of each peer."""
        self._group, self._part = group, part
        slot = naive_slot(group.workspace.payload_bytes, group.size, PACK_BYTES)
        sizes = [part.table[rank][rank].nbytes for rank in range(group.size)]
        self._slots = [
            naive.sources(group, position, part.sources[position].ptr, slot) for position in range(group.size)
        ]
        self._own = [self._launch(position, position, 0, size) for position, size in enumerate(sizes)]
        self._chunks = [
            [
                (position, peer, begin, min(slot, size - begin), self._launch(position, peer, begin, size, slot))
                for position in range(group.size)
                for peer, size in enumerate(sizes)
                if peer != position and size > begin
            ]
            for begin in range(0, max(sizes), slot)
        ]

    @property
    def launches(self) -> list[list[Launch]]:
        """The kernels of each rank."""
        found = [[launch] for launch in self._own]
        for chunk in self._chunks:
            for position, _, _, _, launch in chunk:
                found[position].append(launch)
        return found

    def launch(self, streams: Sequence[Stream], captured: bool) -> None:
        """Queue all copies and kernels. A rank fills and reads its slots on its own stream, so no event is needed
        between chunks."""
        for launch, stream in zip(self._own, streams, strict=True):
            launch(stream)
        for chunk in self._chunks:
            for position, peer, begin, nbytes, launch in chunk:
                source, target = self._part.sources[peer].ptr + begin, self._slots[position][peer]
                naive.copy(self._group, position, peer, target, source, nbytes, streams[position], captured)
                launch(streams[position])

    def _launch(self, position: int, peer: int, begin: int, size: int, most: int | None = None) -> Launch:
        """Return the launch on rank `position` that stores scales of rank `peer`. The peer has `size` bytes of scales;
        the launch stores at most `most` of them (None: no limit), from byte `begin` on."""
        arrangement = self._part.arrangement
        assert arrangement is not None
        nbytes = size - begin if most is None else min(most, size - begin)
        parameters = PlaceScalesParams(
            scales=self._part.targets[position].ptr,
            source=self._slots[position][peer],
            begin=begin // PACK_BYTES,
            nbytes=nbytes,
            distance=(position - peer) % self._group.size,
            clears=int(peer == position),
        )
        parameters.arrangement.tailor(arrangement, range(self._group.size), position)
        device = self._group.ranks[position].device
        kernel = load(device, Specialisation("collectives/moves", "place_scales", tuple(workspace.defines().items())))
        blocks = max(1, min(ceil_div(nbytes, PACK_BYTES * _THREADS), self._group.max_blocks))
        return kernel.prepare(blocks, _THREADS, parameters, device=device)
