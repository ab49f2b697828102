# SPDX-License-Identifier: Apache-2.0
"""Algorithm "naive" of the collectives that move bytes: copies by the driver, ordered by events in the streams.

When the streams of all ranks have reached the call, each rank copies from its peers' inputs to its output. Then the
streams wait for one another again, so an input may be overwritten by later work on the stream of the input's rank. An
in-place all-to-all would overwrite data that a peer still reads, so each rank first copies to its workspace, chunk by
chunk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....comm import workspace
from ....plans.limits import ceil_div
from ....plans.shared import PACK_BYTES, naive_slot
from ....runtime.stream import Event
from ...call.specialisation import Specialisation, load
from ..shared import naive
from ..shared.params import of_collective
from .kernel import Arrangement

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.launch import Launch
    from ....runtime.stream import Stream
    from .part import MovePart


class Copies:
    """The launch sequence of a call that moves bytes by algorithm "naive": its copies on all ranks."""

    def __init__(self, group: Group, parts: Sequence[MovePart], staged: bool) -> None:
        """`staged`: the call is in place and copies through the workspaces. Raises ArgumentError if the workspaces
        are too small."""
        self._group, self._parts = group, parts
        self._as_they_lie = [part for part in parts if part.arrangement is None]
        self._arranged = [ArrangedCopies(group, part) for part in parts if part.arrangement is not None]
        self._slot = naive_slot(group.workspace.payload_bytes, group.size, 1) if staged else 0
        self._slots = [naive.sources(group, position, 0, self._slot) for position in range(len(group))]
        self.launches: list[list[Launch]] = [
            [launch for part in self._arranged for launch in part.launches[position]] for position in range(len(group))
        ]
        self._met = [Event(rank.device) for rank in group]

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        naive.check_together(captures, alone)
        if captures[0] is not None:
            for part in self._parts:
                sources = [(operand.ptr, operand.array.nbytes) for operand in part.sources]
                naive.require_access(self._group, *map(list, zip(*sources, strict=True)))

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        captured = streams[0].capture_id() is not None
        naive.meet(self._met, streams)
        for part in self._as_they_lie:
            for position, stream in enumerate(streams):
                for peer, source in enumerate(part.sources):
                    if self._slot and peer != position:
                        continue
                    move = part.table[peer][position]
                    at, to = source.ptr + move.source, part.targets[position].ptr + move.target
                    if move.nbytes and at != to:
                        naive.copy(self._group, position, peer, to, at, move.nbytes, stream, captured)
            if self._slot:
                self._by_workspaces(part, streams, captured)
        for arranged in self._arranged:
            arranged.launch(streams, captured)
        naive.meet(self._met, streams)

    def _by_workspaces(self, part: MovePart, streams: Sequence[Stream], captured: bool) -> None:
        """Copy the bytes from the peers' inputs to the workspaces, chunk by chunk, and from there to the outputs."""
        largest = max(move.nbytes for of_rank in part.table for move in of_rank)
        for begin in range(0, largest, self._slot):
            todo = [
                (position, peer, min(self._slot, part.table[peer][position].nbytes - begin))
                for position in range(len(streams))
                for peer in range(len(streams))
                if peer != position and part.table[peer][position].nbytes > begin
            ]
            for position, peer, nbytes in todo:
                at = part.sources[peer].ptr + part.table[peer][position].source + begin
                to = self._slots[position][peer]
                naive.copy(self._group, position, peer, to, at, nbytes, streams[position], captured)
            naive.meet(self._met, streams)
            for position, peer, nbytes in todo:
                to = part.targets[position].ptr + part.table[peer][position].target + begin
                at = self._slots[position][peer]
                naive.copy(self._group, position, position, to, at, nbytes, streams[position], captured)


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
