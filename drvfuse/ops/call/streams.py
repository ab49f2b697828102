# SPDX-License-Identifier: Apache-2.0
"""The arguments `stream` and `streams` of ops, and the `Stream` objects that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ArgumentError, counted, shown
from ...runtime.stream import Stream, StreamLike

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...runtime.device import Device
    from .operands import Operand

StreamArgument = StreamLike | Literal["current"] | None
"""None for the device's own stream, "current" for the current stream of the first array's framework, or a stream."""
Streams = StreamArgument | Sequence[StreamLike]
"""None or "current" for all local ranks of a group, one stream for a single local rank, or a list with one for each."""


def _current(operand: Operand, argument: str) -> Stream:
    if operand.producer is None:
        raise ArgumentError(argument, '"current"', f"explicit: {operand.name} does not name its stream")
    return operand.producer


def resolve_stream(device: Device, stream: Any, inputs: Sequence[Operand]) -> Stream:
    """Return the stream that the argument `stream` means: the device's own for None, the stream of the first input's
    framework for "current", else the given stream or handle. The handles 0 and 1 are the legacy default stream."""
    if stream is None:
        return device.stream
    if isinstance(stream, str):
        if stream != "current":
            raise ArgumentError("stream", shown(stream), 'None, "current" or a stream')
        return _current(inputs[0], "stream")
    return Stream.wrap(device, stream)


def resolve_streams(group: Group, streams: Any, inputs: Sequence[Operand]) -> list[Stream]:
    """Return the stream of each local rank, as the argument `streams` selects it: the rank's own for None, the stream
    of its input's framework for "current", else the given stream."""
    if streams is None:
        return [rank.stream for rank in group.ranks]
    if isinstance(streams, str):
        if streams != "current":
            raise ArgumentError("streams", shown(streams), 'None, "current", or a list of streams, one per local rank')
        return [_current(operand, "streams") for operand in inputs]
    several = isinstance(streams, (list, tuple))
    if (len(streams) if several else 1) != len(group):
        got = f"a list of {counted(len(streams), 'stream')}" if several else shown(streams)
        raise ArgumentError("streams", got, f"a list of {counted(len(group), 'stream')}, one per local rank")
    return [
        rank.wrap(stream, f"streams[{position}]")
        for position, (rank, stream) in enumerate(zip(group.ranks, streams if several else [streams], strict=True))
    ]
