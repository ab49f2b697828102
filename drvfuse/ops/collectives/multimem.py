# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a call with `use_multimem=True` lie, and which form of a kernel that asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import ArgumentError

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...runtime.stream import Stream
    from ..call.planned import Ready

_WORD = 4  # the least that a multimem instruction accesses
NAMES = {"one_stage": "multimem_one_stage", "two_stage": "multimem_two_stage"}
"""What messages and `Prepared.algo` call the algorithms."""


def algorithm(group: Group, algo: str, forms: Sequence[str]) -> str:
    """The form of `forms`, whose last one "auto" means, that `algo` asks for.

    Raises ArgumentError for another one, then Unsupported where the group may not or cannot use multicast.
    """
    chosen = forms[-1] if algo == "auto" else algo
    if chosen not in forms:
        allowed = ", ".join(f'"{name}"' for name in ("auto", *forms))
        raise ArgumentError("algo", f'"{algo}"', f"one of {allowed} with use_multimem=True")
    group.require_multicast()
    return chosen


@dataclass(frozen=True)
class Placement:
    """The multicast addresses of inputs and outputs, where kernels use them, and the streams of the call.

    Inputs without a multicast address are staged. For outputs without one, results pass through the staging too.
    """

    group: Group
    streams: Sequence[Stream]
    inputs: int | None
    outputs: int | None

    @classmethod
    def of(
        cls, group: Group, streams: Sequence[Stream], inputs: Sequence[int], outputs: Sequence[int], nbytes: int
    ) -> Placement:
        """For `nbytes` at these addresses, one per local rank; an empty list: what lies there takes the staging."""
        if nbytes % _WORD or not inputs:  # the last element may share a word with the memory behind the array
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
        """Write the addresses to the parameters."""
        for ready in launches:
            for field, address in (("multimem.inputs", self.inputs), ("multimem.outputs", self.outputs)):
                if address is not None:
                    ready.point(field, address)
