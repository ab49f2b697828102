# SPDX-License-Identifier: Apache-2.0
"""The argument `trace` of ops: the sections of a trace that one prepared call writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, kind_of
from ...trace.buffer import Section, Trace
from .operands import Operand, made

if TYPE_CHECKING:
    from ...runtime.device import Device


class CallTrace:
    """The sections of a trace that one prepared call writes on `devices`. They are kept as long as the call."""

    def __init__(self, devices: Sequence[Device], trace: Any, of: str) -> None:
        """`of` is what the trace must belong to: "group" or "device".

        Raises ArgumentError for a value that is not a `Trace`, and for a trace of other devices.
        """
        if not isinstance(trace, Trace):
            raise ArgumentError("trace", kind_of(trace), f"a Trace of the {of}, or None")
        self._devices, self._trace = devices, trace
        self.sections: list[Section] = []
        self.operands: list[Operand] = [made("trace", trace.buffer(device)) for device in devices]

    def reserve(
        self, kernel: str, blocks: int, phases: int, rounds: int = 0, peers: int = 0, writers: int = 1
    ) -> list[Section]:
        """Reserve a section for one launch on each device. `Trace.sections` explains the arguments."""
        found = self._trace.sections(self._devices, kernel, blocks, phases, rounds, peers, writers)
        self.sections += found
        return found
