# SPDX-License-Identifier: Apache-2.0
"""The engine of groups whose nodes are all in this process: copies between devices, ordered by events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..errors import Unsupported
from ..runtime.stream import Event
from .exchange import Gather, Member, Part, Piece, Pieces

if TYPE_CHECKING:
    from .layout import Nodes

_FLOAT = 4


class InProcess:
    """An engine for tests. It needs no library, but all ranks of the group must be in this process.

    `all_gather` and `all_to_all` are ordered by streams, and can be captured if the streams of all ranks belong to one
    capture. `all_reduce` copies through the host, blocks, and adds the nodes in descending order, so that tests can
    distinguish its sums from those of the order "fixed".
    """

    name = "in process"
    watched = False

    def __init__(self) -> None:
        self._events: dict[int, tuple[Event, Event]] = {}

    def open(self, nodes: Nodes, members: Sequence[Member], gather: Gather, timeout: float) -> None:
        if len(members) != len(nodes.of):
            raise Unsupported(
                f'exchange="in_process" needs all {len(nodes.of)} ranks of the group in one process; this process has '
                f"{len(members)}"
            )
        self._events = {member.rank: (Event(member.device), Event(member.device)) for member in members}

    def check_captures(self, captures: Sequence[int | None]) -> None:
        if len({*captures}) > 1:
            raise Unsupported(
                'exchange="in_process" orders ranks by events, so it can be captured only into one graph over the '
                "streams of all ranks: Graph.capture(streams)"
            )

    def all_gather(self, parts: Sequence[Part]) -> None:
        for rail in _rails(parts):
            self._meet(rail, 0)
            for part in rail:
                for other in rail:
                    if other is not part:
                        _copy(part, other)
            self._meet(rail, 1)  # so that no rank overwrites numbers that others still copy

    def all_to_all(self, parts: Sequence[Pieces]) -> None:
        for rail in _rails(parts):
            self._meet(rail, 0)
            for to in rail:
                for source in rail:
                    sent = [piece for piece in source.sent if piece.node == to.member.node]
                    received = [piece for piece in to.received if piece.node == source.member.node]
                    for piece, place in zip(sent, received, strict=True):
                        _copy_piece(to, place, source, piece)
            self._meet(rail, 1)

    def _meet(self, rail: Sequence[_Exchanged], which: int) -> None:
        """Order the streams of the parts in `rail`, which are exchanged with one another: later work on each stream
        waits for the work that is queued now on all of them. Each rank has two events; `which`, 0 or 1, selects those
        that are used.
        """
        events = [self._events[part.member.rank][which] for part in rail]
        for event, part in zip(events, rail, strict=True):
            event.record(part.stream)
        for part in rail:
            for event in events:
                part.stream.wait(event)

    def all_reduce(self, parts: Sequence[Part]) -> None:
        if any(part.stream.capture_id() is not None for part in parts):
            raise Unsupported('exchange="in_process" adds on the host: node_order="engine" cannot be captured')
        for rail in _rails(parts):
            total = np.zeros(rail[0].count, np.float32)
            own = np.empty_like(total)
            for part in reversed(rail):
                driver = part.member.device.driver
                part.stream.synchronize()
                with part.member.device.use(), np.errstate(all="ignore"):
                    driver.cuMemcpyDtoH(own.ctypes.data, part.address, own.nbytes)
                    total += own
            for part in rail:
                with part.member.device.use():
                    part.member.device.driver.cuMemcpyHtoD(part.address, total.ctypes.data, total.nbytes)

    def abort(self) -> None:
        """Do nothing, since copies between devices always end."""

    def close(self) -> None:
        for pair in self._events.values():
            for event in pair:
                event.close()
        self._events = {}


_Exchanged = TypeVar("_Exchanged", Part, Pieces)


def _rails(parts: Sequence[_Exchanged]) -> list[list[_Exchanged]]:
    """One list for each number inside a node: the parts of the ranks with that number, in node order. Only ranks with
    the same number exchange with one another.
    """
    ordered = sorted(parts, key=lambda part: (part.member.place, part.member.node))
    return [list(rail) for _, rail in groupby(ordered, key=lambda part: part.member.place)]


def _copy(to: Part, source: Part) -> None:
    """Copy the numbers of the node of `source` to `to`. They lie at the same offset from `address` in both parts."""
    offset = _FLOAT * source.count * source.member.node
    _copy_bytes(to, to.address + offset, source, source.address + offset, _FLOAT * source.count)


def _copy_piece(to: Pieces, place: Piece, source: Pieces, piece: Piece) -> None:
    assert place.nbytes == piece.nbytes, "the ranks of a pair differ in what they exchange"
    _copy_bytes(to, place.address, source, piece.address, piece.nbytes)


def _copy_bytes(to: Part | Pieces, target: int, source: Part | Pieces, address: int, nbytes: int) -> None:
    """Queue a copy of `nbytes` from `address` on the device of `source` to `target` on the device and stream of
    `to`."""
    device, holder = to.member.device, source.member.device
    with device.use():
        if to.stream.capture_id() is None:
            device.driver.cuMemcpyPeerAsync(target, device.context, address, holder.context, nbytes, to.stream.handle)
        else:  # a capture refuses cuMemcpyPeerAsync
            device.driver.cuMemcpyDtoDAsync(target, address, nbytes, to.stream.handle)
