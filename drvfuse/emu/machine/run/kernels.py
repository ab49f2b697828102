# SPDX-License-Identifier: Apache-2.0
"""The running kernels of a machine, and how many blocks of each are resident on the multiprocessors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...findings import reports
from ..memory.heap import heap_of
from .engine_launch import EngineLaunch
from .work import Launch, Op

if TYPE_CHECKING:
    from ..machine import Machine


class Kernels:
    """The kernels of a machine that run (`running`), and those that wait for free multiprocessors (`crowded`)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: list[Op] = []
        self.crowded: list[Op] = []

    def place(self, op: Op, command: Launch) -> bool:
        """Start a kernel with as many resident blocks as fit on the multiprocessors of its device. Returns False if not
        even one cluster fits (without clusters: one block) or, for a cooperative kernel, if not all blocks fit.

        Raises WindowError if the window has no room for the memory of its blocks.
        """
        machine = self.machine
        room = self._room(op, command)
        if room < (command.blocks if command.cooperative else command.cluster_blocks):
            self.crowded.append(op)
            return False
        function = command.function
        assert function.module is not None
        op.room = room
        op.launch = EngineLaunch(
            machine.engine,
            function.image,
            function.name,
            device=command.context.device.index,
            grid=command.grid,
            block=command.block,
            smem=command.smem,
            params=command.params,
            globals_addr=function.module.globals_address,
            max_resident=machine.resident_blocks(command),
            cluster=command.cluster,
            op=op,
            access=command.context.process.table,
            process=command.context.process.title,
            heap=heap_of(command.context),
        )
        op.launch.allow(room)
        op.launch.gdc_open = op.primary is None
        self.running.append(op)
        return True

    def make_room(self) -> list[Op]:
        """Let more blocks of running kernels become resident. Called when blocks may have ended.

        Also empties `crowded`, the list of the kernels for which there was no room, and returns these kernels. The
        caller calls `place` for each of them again.
        """
        for op in self.running:
            command = op.command
            assert isinstance(command, Launch)
            if op.room < min(command.blocks, self.machine.resident_blocks(command)):
                room = self._room(op, command)
                if room > op.room:
                    op.room = room
                    op.launch.allow(room)
        again, self.crowded = self.crowded, []
        return again

    def standstill(self, kind: str, headline: str, waits: Sequence[str]) -> reports.Report:
        """The report that all running kernels have stopped, and where. `waits` describe the values in memory for which
        streams wait.
        """
        machine = self.machine
        busy = {op.command.context.device.index for op in self.running}
        primaries = {context.device.index for p in machine.processes for context in p.contexts() if context.primary}
        active = primaries | busy
        launches, crowded = [(*_named(op), op.launch) for op in self.running], map(_named, self.crowded)
        idle = {device: machine.finding(device) for device in sorted(active - busy)}
        return reports.standstill(kind, headline, launches, crowded, idle, waits)

    def _room(self, op: Op, command: Launch) -> int:
        """The number of blocks of a kernel for which the multiprocessors of its device have room, in addition to the
        blocks of the other running kernels.
        """
        machine = self.machine
        free = 1.0
        for other in self.running:
            other_command = other.command
            if other is not op and other_command.context.device is command.context.device:
                assert isinstance(other_command, Launch)
                free -= min(other.room, other.launch.remaining) / machine.resident_blocks(other_command)
        return int(machine.resident_blocks(command) * max(0.0, free) + 1e-6)


def _named(op: Op) -> tuple[str, int]:
    """(name, device) of a kernel. If the machine has several processes, the name includes the process."""
    assert isinstance(op.command, Launch)
    name, context = op.command.function.name, op.command.context
    process = context.process.title
    return name if process is None else f"{name} of process {process}", context.device.index
