# SPDX-License-Identifier: Apache-2.0
"""Checks before a queued copy or fill runs: its addresses must hold the same allocations as when it was queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....errors import counted
from ...findings.reports import Report
from ...space.mapped import usable
from ..memory.foreign import FOREIGN
from ..memory.process_memory import READ, READ_WRITE

if TYPE_CHECKING:
    from ...space.window import Window
    from ..memory.process_memory import ProcessMemory
    from .work import Command

_WRONG = {
    "out_of_bounds": "host memory that is not mapped any more",
    "use_after_free": "which was freed, unmapped or mapped again since the call that queued it",
    "no_access": "which no device was given access to (cuMemSetAccess)",
    "read_only": "which every device may only read (cuMemSetAccess)",
}


def touched(command: Command) -> list[tuple[int, ...]]:
    """For each access of a command, the numbers of the allocations that the access touches.

    A second call returns the same numbers only if no memory of these accesses was freed or allocated between the calls.
    """
    memory = command.context.process.memory
    return [tuple(a.number for a in memory.within(at.address, at.nbytes)) for at in command.accesses()]


def refusal(command: Command, meant: list[tuple[int, ...]]) -> Report | None:
    """The reason why a command cannot run now, or None if it can. `meant` is the result of `touched` at the time
    when the command was queued.
    """
    memory, window = command.context.process.memory, command.context.process.machine.window
    for at, then, now in zip(command.accesses(), meant, touched(command), strict=True):
        kind = ""
        if not window.contains(at.address, at.nbytes):
            elsewhere = at.address >= FOREIGN or window.contains(at.address)
            kind = "" if elsewhere or usable(at.address, at.nbytes, at.write) else "out_of_bounds"
        elif now != then or not _present(memory, window, at.address, at.nbytes):
            kind = "use_after_free"
        elif not _permits(memory, at.address, at.nbytes, READ):
            kind = "no_access"
        elif at.write and not _permits(memory, at.address, at.nbytes, READ_WRITE):
            kind = "read_only"
        if kind:
            name, verb = command.title, "writes" if at.write else "reads"
            text = f"a queued {name} {verb} {counted(at.nbytes, 'byte')} at 0x{at.address:x}, {_WRONG[kind]}"
            device, process = command.context.device.index, command.context.process.title
            return Report(kind, text, device=device, address=at.address, process=process)
    return None


def _present(memory: ProcessMemory, window: Window, address: int, nbytes: int) -> bool:
    """True if a range is live memory. Memory of a graph is live only between its allocation and its free."""
    if memory.uncovered(address, nbytes) is not None:
        return False
    return all(a.graph is None or window.index.covers(a.base, a.nbytes) for a in memory.within(address, nbytes))


def _permits(memory: ProcessMemory, address: int, nbytes: int, flags: int) -> bool:
    """True if every mapping of a range gives the access `flags` to at least one device. One device is enough, as the
    driver chooses the device that copies. Plain memory and pools permit all copies, which go through the host if need
    be.
    """
    mapped = [a for a in memory.within(address, nbytes) if a.memory is not None]
    return all(any(has & flags == flags for has in a.access.values()) for a in mapped)
