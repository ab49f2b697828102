# SPDX-License-Identifier: Apache-2.0
"""The arrays that a call writes: those that the caller gave, or new arrays, allocated in the order of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, CaptureError, counted, kind_of
from . import operands
from .operands import Operand

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.device import Device
    from ...runtime.stream import Stream

Wanted = tuple[str, tuple[int, ...], "DType"]


def refuse_capture(streams: Sequence[Stream], argument: str) -> None:
    """Raise CaptureError if a stream is being captured: the caller left out `argument`, and a capture cannot
    allocate."""
    if any(stream.capture_id() is not None for stream in streams):
        raise CaptureError(f"{argument}=None allocates, which a capture forbids; pass {argument}")


def of_ranks(
    group: Group,
    argument: str,
    given: Any,
    targets: list[Operand],
    shape: tuple[int, ...] | list[tuple[int, ...]],
    dtype: DType,
    streams: Sequence[Stream],
) -> tuple[list[Operand], list[Any]]:
    """Return one result array per local rank, as operands and as the objects to return to the caller.

    They are the arrays that the caller gave, whose operands are `targets`, or new arrays. A list in place of one shape
    has a shape for each local rank. Raises CaptureError if new arrays are needed during a capture.
    """
    if given is not None:
        return targets, operands.per_rank(group, argument, given)
    refuse_capture(streams, argument)
    shapes = shape if isinstance(shape, list) else [shape] * len(group)
    arrays = [
        rank.device.empty(of_rank, dtype, stream=stream)
        for rank, of_rank, stream in zip(group, shapes, streams, strict=True)
    ]
    return [operands.made(f"{argument}[{i}]", array) for i, array in enumerate(arrays)], arrays


def outputs(device: Device, stream: Stream, wanted: Sequence[Wanted], given: Any) -> tuple[list[Operand], list[Any]]:
    """Return the result arrays of an op on one device, as operands and as the objects to return to the caller.

    They are the arrays `given` as `outputs=`, checked, or new arrays.
    """
    if given is None:
        refuse_capture([stream], "outputs")
        arrays = [device.empty(shape, dtype, stream=stream) for _, shape, dtype in wanted]
        names = [f"outputs.{name}" for name, _, _ in wanted]
        return [operands.made(name, array) for name, array in zip(names, arrays, strict=True)], arrays
    if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
        shown = counted(len(given), "array") if isinstance(given, (list, tuple)) else kind_of(given)
        names_of = ", ".join(name for name, _, _ in wanted)
        raise ArgumentError("outputs", shown, f"a tuple or list of {len(wanted)}: ({names_of})")
    found = []
    for value, (name, shape, dtype) in zip(given, wanted, strict=True):
        operand = operands.whole(f"outputs.{name}", value, device.driver, (dtype.name,), writable=True)
        operands.require_shape(operand, shape, "that of the result")
        found.append(operand)
    return found, list(given)
