# SPDX-License-Identifier: Apache-2.0
"""The launch sequence of algorithm "naive": copies between devices and a local kernel, ordered by events in the
streams.

It needs peer access only during a graph capture. Chunk by chunk every rank copies its peers' inputs to its own
workspace, waits until all ranks have copied, and sums. Because of that wait a call may be in place. No peer reads an
input after the input's rank has completed its kernel, so the input may then be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....comm.workspace import PAYLOAD_OFFSET
from ....errors import Unsupported
from ....runtime.launch import Launch
from ....runtime.reach import copyable_by
from ....runtime.stream import Event
from ...call.planned import Ready
from ...call.prepared import LaunchSequence

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.stream import Stream


@dataclass(frozen=True)
class Chunk:
    """A part of a call. `copies[i]` is the part of each input that rank i sums, as an offset and a number of bytes, and
    `launches[i]` is the kernel that sums it."""

    copies: Sequence[tuple[int, int]]
    launches: Sequence[Launch]


def sources(group: Group, position: int, own: int, slot: int, offset: int = 0) -> list[int]:
    """Return the addresses from which rank `position` sums, by rank: its own input at `own`, and its slots, which hold
    the parts of the other ranks' inputs.

    `offset` bytes are subtracted from each address, because the kernel adds the offset of the part to the addresses
    that it gets.
    """
    base = group.workspace.pointers[position] + PAYLOAD_OFFSET
    slot = -(-slot // 16) * 16
    found = [own if i == position else base + (i - (i > position)) * slot for i in range(group.size)]
    return [address - offset for address in found]


def sequence(
    group: Group,
    inputs: Sequence[int],
    slot: int,
    chunks: Sequence[Sequence[tuple[int, int]]],
    launches: Callable[[int, list[list[int]]], list[Ready]],
    whole: bool,
) -> tuple[LaunchSequence, list[Ready]]:
    """Return the launch sequence of a call whose inputs are at `inputs`, and the launches in it.

    `chunks[c][i]` is the part of each input that rank i copies and sums in chunk c (`Chunk`), of up to `slot` bytes.
    `launches(c, table)` returns the launches of all ranks, for the addresses from which they sum: those of the parts
    or, unless `whole`, those from which kernels reach the parts by adding their offsets."""
    made, every = [], []
    for number, copies in enumerate(chunks):
        table = [
            sources(group, position, own + offset, slot, 0 if whole else offset)
            for position, (own, (offset, _)) in enumerate(zip(inputs, copies, strict=True))
        ]
        ready = launches(number, table)
        made.append(Chunk(copies, [one.launch for one in ready]))
        every += ready
    return Naive(group, inputs, slot, made), every


class Naive:
    """The launch sequence of a call by algorithm "naive": its copies and kernels."""

    def __init__(self, group: Group, inputs: Sequence[int], slot: int, chunks: Sequence[Chunk]) -> None:
        """`inputs` are the addresses of the ranks' inputs. A chunk has up to `slot` bytes of each input."""
        self._group = group
        self._inputs = tuple(inputs)
        self._chunks = chunks
        self.launches = [[chunk.launches[position] for chunk in chunks] for position in range(len(group))]
        self._slots = [sources(group, position, 0, slot) for position in range(group.size)]
        self._ready = [Event(rank.device) for rank in group]
        self._copied = [Event(rank.device) for rank in group]

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        check_together(captures, alone)
        if captures[0] is not None:
            nbytes = max(offset + nbytes for chunk in self._chunks for offset, nbytes in chunk.copies)
            require_access(self._group, self._inputs, [nbytes] * len(self._inputs))

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        captured = streams[0].capture_id() is not None
        meet(self._ready, streams)
        for chunk in self._chunks:
            for position, (stream, (offset, nbytes)) in enumerate(zip(streams, chunk.copies, strict=True)):
                for peer, source in enumerate(self._inputs):
                    if peer != position and nbytes:
                        target = self._slots[position][peer]
                        copy(self._group, position, peer, target, source + offset, nbytes, stream, captured)
            meet(self._copied, streams)
            for launch, stream in zip(chunk.launches, streams, strict=True):
                launch(stream)


def check_together(captures: Sequence[int | None], alone: bool) -> None:
    """Raise Unsupported unless all ranks are launched together, on streams that are all in one capture or in none.

    Events cannot order work inside a capture with work outside it.
    """
    if alone:
        raise Unsupported('algo="naive" launches all local ranks together; call launch() without rank=')
    if len(set(captures)) > 1:
        raise Unsupported(
            'algo="naive" in a graph capture needs the streams of all local ranks in that one capture: '
            "copies of one rank are ordered against the others by events"
        )


def require_access(group: Group, inputs: Sequence[int], nbytes: Sequence[int]) -> None:
    """Raise Unsupported unless every device can copy the inputs of the others in a capture (`copyable_by`)."""
    for peer, (source, size) in enumerate(zip(inputs, nbytes, strict=True)):
        for position, rank in enumerate(group):
            if peer != position and size and not copyable_by(source, size, rank.device):
                raise Unsupported(
                    f'algo="naive" in a graph capture needs inputs that every device of the group has access to, '
                    f"and device {rank.device.index} cannot access inputs[{peer}]; launch the call outside a capture"
                )


def meet(events: Sequence[Event], streams: Sequence[Stream]) -> None:
    """Make later work of each stream wait for the work that is queued on all streams now."""
    for event, stream in zip(events, streams, strict=True):
        event.record(stream)
    for position, stream in enumerate(streams):
        for peer, event in enumerate(events):
            if peer != position:
                stream.wait(event)


def copy(
    group: Group, position: int, peer: int, target: int, source: int, nbytes: int, stream: Stream, captured: bool
) -> None:
    """Copy `nbytes` bytes from address `source` on the device of rank `peer` to address `target` on the device of rank
    `position`. `stream` is a stream of rank `position`."""
    device = group.ranks[position].device
    with device.use():
        if captured or peer == position:  # in a capture cuMemcpyPeerAsync is refused
            device.driver.cuMemcpyDtoDAsync(target, source, nbytes, stream.handle)
        else:  # unlike cuMemcpyDtoDAsync, it can copy memory that the device cannot access
            holder = group.ranks[peer].device
            device.driver.cuMemcpyPeerAsync(target, device.context, source, holder.context, nbytes, stream.handle)
