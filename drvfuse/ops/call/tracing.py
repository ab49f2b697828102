# SPDX-License-Identifier: Apache-2.0
"""The `trace` argument of ops: the parts of a trace that one prepared call writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, kind_of
from ...trace.buffer import Section, Trace
from .operands import Operand, made

if TYPE_CHECKING:
    from ...runtime.device import Device


class CallTrace:
    """The parts of a trace that one prepared call writes on `devices`; kept as long as the call may be launched."""

    def __init__(self, devices: Sequence[Device], trace: Any, of: str) -> None:
        """Raises ArgumentError for a value that is not a `Trace`, and for a trace of other devices than the call's
        group or device, which `of` names.
        """
        if not isinstance(trace, Trace):
            raise ArgumentError("trace", kind_of(trace), f"a Trace of the {of}, or None")
        self._devices, self._trace = devices, trace
        self.sections: list[Section] = []
        self.operands: list[Operand] = [made("trace", trace.buffer(device)) for device in devices]

    def reserve(
        self, kernel: str, blocks: int, phases: int, rounds: int = 0, peers: int = 0, writers: int = 1
    ) -> list[Section]:
        """Reserve room for a launch on each device, as `Trace.sections` does."""
        found = self._trace.sections(self._devices, kernel, blocks, phases, rounds, peers, writers)
        self.sections += found
        return found
