# SPDX-License-Identifier: Apache-2.0
"""Calls with `use_multimem=True`: their algorithms, and which of their arrays lie in multicast memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....errors import ArgumentError

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.stream import Stream
    from ...call.planned import Ready

_WORD = 4  # bytes of the smallest access of a multimem instruction
NAMES = {"one_stage": "multimem_one_stage", "two_stage": "multimem_two_stage"}
"""The names of the algorithms in messages and in `Prepared.algo`."""


def algorithm(group: Group, algo: str, forms: Sequence[str]) -> str:
    """Return the one of `forms` that `algo` asks for; "auto" means the last.

    Raises ArgumentError for another algorithm, and Unsupported if the group may not or cannot use multicast.
    """
    chosen = forms[-1] if algo == "auto" else algo
    if chosen not in forms:
        allowed = ", ".join(f'"{name}"' for name in ("auto", *forms))
        raise ArgumentError("algo", f'"{algo}"', f"one of {allowed} with use_multimem=True")
    group.require_multicast()
    return chosen


@dataclass(frozen=True)
class Placement:
    """The multicast addresses of a call's inputs and outputs, each None if the arrays have none, and the call's
    streams.

    Inputs without a multicast address are staged. Results for outputs without one are stored to the staging and copied.
    """

    group: Group
    streams: Sequence[Stream]
    inputs: int | None
    outputs: int | None

    @classmethod
    def of(
        cls, group: Group, streams: Sequence[Stream], inputs: Sequence[int], outputs: Sequence[int], nbytes: int
    ) -> Placement:
        """Return the placement of arrays of `nbytes` bytes at these addresses, one per local rank. An empty list means
        arrays that are always staged."""
        if nbytes % _WORD or not inputs:  # staged, as the last word may include memory after the array
            return cls(group, streams, None, None)
        source = group.multicast_at(inputs, nbytes)
        target = group.multicast_at(outputs, nbytes) if outputs and source is not None else None
        return cls(group, streams, source, target)

    @property
    def staged(self) -> bool:
        return self.inputs is None

    @property
    def to_outputs(self) -> bool:
        return self.outputs is not None

    def make_staging(self) -> None:
        """Make the group's staging unless it exists. Raises CaptureError where one of the streams is being captured."""
        self.group.multicast_staging(self.streams)

    def point(self, launches: Sequence[Ready]) -> None:
        """Write the multicast addresses to the parameters of the launches."""
        for ready in launches:
            for field, address in (("multimem.inputs", self.inputs), ("multimem.outputs", self.outputs)):
                if address is not None:
                    ready.point(field, address)
