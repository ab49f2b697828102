# SPDX-License-Identifier: Apache-2.0
"""Results of a call: the arrays that the caller gave, or new ones, allocated in the order of the call's stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, CaptureError, kind_of
from . import operands
from .operands import Operand

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.device import Device
    from ...runtime.stream import Stream

Wanted = tuple[str, tuple[int, ...], "DType"]


def refuse_capture(streams: Sequence[Stream], argument: str) -> None:
    """Raise CaptureError if a stream is being captured: `argument` was left out and nothing may be allocated there."""
    if any(stream.capture_id() is not None for stream in streams):
        raise CaptureError(f"{argument}=None allocates, which a capture forbids; pass {argument}")


class Results:
    """One result array per local rank, in `operands`: those that the caller gave, or new ones.

    Raises CaptureError if new ones are needed during a capture.
    """

    def __init__(
        self,
        group: Group,
        argument: str,
        given: Any,
        targets: list[Operand],
        shape: tuple[int, ...],
        dtype: DType,
        streams: Sequence[Stream],
    ) -> None:
        """`targets` are the operands of `given`."""
        self.operands = targets
        self._values = targets if given is None else operands.per_rank(group, argument, given)
        if given is None:
            refuse_capture(streams, argument)
            self._values = [rank.device.empty(shape, dtype, stream=s) for rank, s in zip(group, streams, strict=True)]
            self.operands = [operands.made(f"{argument}[{i}]", array) for i, array in enumerate(self._values)]

    def returned(self, bare: bool) -> Any:
        """What the caller gets: a list, or one array if `bare`. Given arrays come back as given."""
        return self._values[0] if bare else self._values


def outputs(device: Device, stream: Stream, wanted: Sequence[Wanted], given: Any) -> tuple[list[Operand], list[Any]]:
    """The arrays of `outputs=` of an op on one device, checked, or new ones; and what the caller gets for them."""
    if given is None:
        refuse_capture([stream], "outputs")
        arrays = [device.empty(shape, dtype, stream=stream) for _, shape, dtype in wanted]
        names = [f"outputs.{name}" for name, _, _ in wanted]
        return [operands.made(name, array) for name, array in zip(names, arrays, strict=True)], arrays
    if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
        shown = f"{len(given)} arrays" if isinstance(given, (list, tuple)) else kind_of(given)
        names_of = ", ".join(name for name, _, _ in wanted)
        raise ArgumentError("outputs", shown, f"a tuple or list of {len(wanted)}: ({names_of})")
    found = []
    for value, (name, shape, dtype) in zip(given, wanted, strict=True):
        operand = operands.whole(f"outputs.{name}", value, device.driver, (dtype.name,), writable=True)
        operands.require_shape(operand, shape, "that of the result")
        found.append(operand)
    return found, list(given)
