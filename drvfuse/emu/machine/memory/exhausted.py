# SPDX-License-Identifier: Apache-2.0
"""The failure of an allocation for which no memory is left. Its report names the largest allocations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....errors import counted
from ...bindings import R
from ...findings.reports import Report
from ..objects import Device
from ..process.failure import Failure
from .allocation import Allocation

if TYPE_CHECKING:
    from ..machine import Machine

_LARGEST = 3  # the number of allocations that a report names


def failure(machine: Machine, device: Device | None, nbytes: int, why: str) -> Failure:
    """The Failure to raise when `nbytes` of a device's memory or, if `device` is None, of pinned memory cannot be
    allocated. `why` says how much memory is left.
    """
    where = "pinned host memory" if device is None else f"device {device.index}"
    text = f"{counted(nbytes, 'byte')} of {where} {'was' if nbytes == 1 else 'were'} requested; {why}"
    used = sorted(_used(machine, device), key=lambda item: -item[0])
    if used:
        largest = ", ".join(f"{size} bytes {origin}" for size, origin in used[:_LARGEST])
        pieces = counted(len(used), "piece")
        text += f"; {sum(size for size, _ in used)} bytes are held in {pieces}, the largest: {largest}"
    index = None if device is None else device.index
    return Failure(R.CUDA_ERROR_OUT_OF_MEMORY, Report("out_of_memory", text, device=index))


def _used(machine: Machine, device: Device | None) -> Iterator[tuple[int, str]]:
    """(bytes, description) of all memory of a device, or of all pinned memory if `device` is None, in all processes."""
    for process in machine.processes:
        whose = "" if process.title is None else f" in process {process.title}"
        for a in process.memory.allocations():
            absent = a.registered or a.host is not None or a.origin is not None
            absent = absent or (a.graph is not None and not a.graph.backed)
            if a.mapped is None and a.device is device and not absent:
                yield a.nbytes, f"at 0x{a.base:x} of {_origin(a)}{whose}"
    for memory in machine.mappables.memories():
        if memory.device is device:
            yield memory.nbytes, "of cuMemCreate"


def _origin(a: Allocation) -> str:
    """What allocated the memory, in words for the report."""
    if a.managed:
        return "managed memory"
    if a.of_module:
        return "a module"
    if a.host_flags is not None:
        return "cuMemHostAlloc"
    return "a graph" if a.graph else "a pool" if a.pool else "cuMemAlloc"
