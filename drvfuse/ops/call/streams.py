# SPDX-License-Identifier: Apache-2.0
"""The `streams` argument of the collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, CaptureError
from ...runtime.stream import Stream
from .validate import RankArray

if TYPE_CHECKING:
    from ...comm.group import Group


def resolve_streams(group: Group, streams: Any, inputs: Sequence[RankArray]) -> list[Stream]:
    """The stream of each local rank: its own for None, its input's framework stream for "current", else as given."""
    if streams is None:
        return [rank.stream for rank in group]
    if isinstance(streams, str):
        if streams != "current":
            raise ArgumentError("streams", repr(streams), 'None, "current", or a list of streams, one a local rank')
        for operand in inputs:
            if operand.producer is None:
                raise ArgumentError("streams", '"current"', f"explicit: {operand.name} does not say its stream")
        return [operand.producer for operand in inputs if operand.producer is not None]
    if not isinstance(streams, (list, tuple)):
        if len(group) != 1:
            raise ArgumentError("streams", repr(streams), f"a list of {len(group)} streams, one a local rank")
        streams = [streams]
    if len(streams) != len(group):
        raise ArgumentError("streams", f"{len(streams)} streams", f"{len(group)} streams, one a local rank")
    return [
        rank.wrap(stream, f"streams[{position}]")
        for position, (rank, stream) in enumerate(zip(group, streams, strict=True))
    ]


def refuse_capture(streams: Sequence[Stream], argument: str) -> None:
    """Raise CaptureError if a stream is being captured: `argument` was left out and nothing may be allocated there."""
    if any(stream.capture_id() is not None for stream in streams):
        raise CaptureError(f"{argument}=None allocates, which a capture forbids; pass {argument}")
