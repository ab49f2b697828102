# SPDX-License-Identifier: Apache-2.0
"""The reports of an emulated machine: faults, deadlocks, refused modules and so on, each with its place in the
source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import deadlock
from .places import Index, called_at, index_text, long_place, short_place

PAGE = "docs/findings.md"
"""The page of the documentation that has a section for each kind of report."""
NO_FINDINGS = ("unsupported", "graph", "launch")
"""The kinds of reports that do not count against the program. A call was refused, because it is not emulated, or
because a graph or the shape of a launch does not fit; programs may test that on purpose.
"""
_WORDS = 4
"""If threads at one place poll more words than this, the report of a standstill has one line for all of these words."""


@dataclass(frozen=True)
class Place:
    """The place of an access: kernel, file, line, device, block and thread. A copy or fill has no line and no thread.

    callers  the calls through which its code was inlined, as (file, line), innermost first
    process  the name of the process that made it, if the machine has several
    """

    kernel: str
    file: str | None
    line: int | None
    device: int
    block: Index | None
    thread: Index | None
    callers: tuple[tuple[str, int], ...] = ()
    process: str | None = None

    def __str__(self) -> str:
        kernel = self.kernel if self.process is None else f"{self.kernel} of process {self.process}"
        if self.block is None or self.thread is None:
            return f"{kernel} of device {self.device}" if self.process is None else f"{kernel} on device {self.device}"
        at = short_place(self.file, self.line) + called_at(self.callers)
        block, thread = index_text(self.block), index_text(self.thread)
        return f"{kernel} on device {self.device} block {block} thread {thread} at {at}"


@dataclass(frozen=True)
class Report:
    """One report of a machine. Fields that do not apply are None.

    kind      "out_of_bounds", "race", "deadlock", ...: docs/findings.md has a section for each
    message   what is wrong, as text
    kernel    the name of the kernel, or of the copy or call
    file      the source file of the place; without line information it is None, and `line` is a line of the PTX
    line      the line of the place
    device    ordinal of the emulated device; `rank` is the same number, for groups that use the devices in order
    block     the index of the block, (x, y, z)
    thread    the index of the thread in its block, (x, y, z)
    address   the address of the access
    other     for a race: the earlier access
    edge      for a race: the reason why the two accesses are not ordered
    callers   for a race: the calls through which the code of the later access was inlined, as in `Place`
    timeline  the last events before the report, as a table
    process   the name of the process of the kernel or copy, if the machine has several
    hint      the likely mistake, if there is a guess

    `str` has all of this except the timeline, in several lines; `repr` and `brief()` are one line. `page` is the
    section of the documentation that explains the kind and shows how to correct the program.
    """

    kind: str
    message: str
    kernel: str | None = None
    file: str | None = None
    line: int | None = None
    device: int | None = None
    block: Index | None = None
    thread: Index | None = None
    address: int | None = None
    other: Place | None = None
    edge: str | None = None
    callers: tuple[tuple[str, int], ...] = ()
    timeline: str | None = None
    process: str | None = None
    hint: str | None = None

    @property
    def page(self) -> str:
        return f"{PAGE}#{self.kind}"

    @property
    def finding(self) -> bool:
        """Whether this report counts against the program. Refused calls (`NO_FINDINGS`) do not."""
        return self.kind not in NO_FINDINGS

    @property
    def rank(self) -> int | None:
        return self.device

    def __repr__(self) -> str:
        place = f" at {short_place(self.file, self.line)}" if self.line else ""
        return f"<Report {self.kind}{place}{self._where()}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the text that a notebook shows."""
        printer.text(str(self))

    def __str__(self) -> str:
        place = long_place(self.file, self.line) if self.file else f"line {self.line}" if self.line else None
        lines = [": ".join(text for text in (place, self.kind, self.message) if text) + self._where()]
        lines += [f"hint: {self.hint}"] if self.hint else []
        return "\n  ".join([*lines, f"see {self.page}"])

    def brief(self) -> str:
        """The report as one line, in which files have their names without folders."""
        place = f" at {short_place(self.file, self.line)}" if self.line else ""
        text = self.message.splitlines()[0].rstrip(":")
        if self.other is not None:
            earlier = short_place(self.other.file, self.other.line) if self.other.line else self.other.kernel
            text = f"not ordered after {earlier}: {self.edge}"
        return f"{self.kind}{place}: {text}{self._where()}"

    def _where(self) -> str:
        indices = (("block", self.block), ("thread", self.thread))
        where = [f"kernel {self.kernel}"] if self.kernel else []
        where += [] if self.process is None else [f"process {self.process}"]
        where += [] if self.device is None else [f"device {self.device}"]
        where += [f"{name} {index_text(index)}" for name, index in indices if index is not None]
        return f" ({', '.join(where)})" if where else ""


def standstill(
    kind: str,
    headline: str,
    launches: Sequence[tuple[str, int, Any]],
    crowded: Iterable[tuple[str, int]],
    without_work: Mapping[int, Report | None],
    stream_waits: Iterable[str] = (),
) -> Report:
    """The report of launches that cannot continue, or that are stopped: where each thread is, and what it waits for.

    `launches` are (name of the kernel, possibly with its process; device; EngineLaunch). `crowded` are the kernels
    (name, device) that have not started, since no multiprocessor can take one of their blocks yet. `without_work` are
    the devices that run nothing, with the finding that ended their kernels, if there was one. `stream_waits` are texts
    about streams that wait for a value in memory.

    Threads that wait at the same place for the same word share a line. If the threads at one place wait for more than
    _WORDS words, all threads at this place share one line.
    """
    lines: list[str] = []
    missing: list[str] = []
    first: Any = None
    waits = [(kernel, device, launch.blocked()) for kernel, device, launch in launches]
    for (_, _, launch), (kernel, device, waiting) in zip(launches, waits, strict=True):
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for blocked in waiting:
            first = first or (launch.identity, blocked)
            key = (blocked.status, blocked.file, blocked.line, blocked.address, blocked.seen, blocked.mbarrier)
            groups.setdefault(key, []).append(blocked)
        for words in _by_place(groups).values():
            (status, file, line, address, seen, mbarrier), _ = words[0]
            place = short_place(file, line) if line else "an unknown place"
            state = f"an mbarrier: {mbarrier}" if mbarrier else f"which holds {seen}"
            word = f" on 0x{address:x}, {state}" if address else ""
            if len(words) > 1:
                word = f" on {len(words)} words or values, the first{word.removeprefix(' on')}"
            members = [blocked for _, group in words for blocked in group]
            lines.append(f"device {device}, {kernel}: {_who(members)} {status}{word}, at {place}")
        if not groups:
            lines.append(f"device {device}, {kernel}: no block is resident")
        if launch.unplaced:
            share = f"{launch.unplaced} of its {launch.block_count} blocks"
            ended = f", and {launch.ended} have ended" if launch.ended else ""
            held = launch.block_count - launch.unplaced - launch.ended
            lines.append(
                f"device {device}, {kernel}: {share} never became resident: {held} are resident and do not end{ended}. "
                "Blocks that wait for one another must all fit on the device at once (a cooperative launch asks for it)"
            )
            missing.append(f"{share.replace('its', 'the', 1)} of {kernel} on device {device} never became resident")
    for kernel, device in crowded:
        lines.append(f"device {device}, {kernel}: waits for a multiprocessor with room for a block")
    lines += [f"device {wait}" for wait in stream_waits]
    idle = [
        f"device {device} has no launch queued" if report is None else _ended(device, report)
        for device, report in without_work.items()
    ]
    lines += idle
    text = f"{'; '.join([headline, *missing])}:\n  " + "\n  ".join(lines)
    if first is None:
        return Report(kind, text)
    engine = launches[0][2].engine
    story = deadlock.of_deadlock(waits, engine.history(), engine.identities, engine.window, idle)
    identity, blocked = first
    where = blocked.file, blocked.line, identity.device, blocked.block, blocked.thread, blocked.address
    return Report(kind, text, identity.kernel, *where, timeline=story, process=identity.process)


def _by_place(groups: Mapping[tuple[Any, ...], list[Any]]) -> dict[tuple[Any, ...], list[Any]]:
    """The groups of threads that each line of the report describes, by a key for the line. If more than _WORDS groups
    wait at one place, these groups share a line; any other group has a line of its own.
    """
    at = Counter(key[:3] for key in groups)
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for key, members in groups.items():
        lines.setdefault(key[:3] if at[key[:3]] > _WORDS else key, []).append((key, members))
    return lines


def _ended(device: int, report: Report) -> str:
    """How the kernels of a device ended, as text."""
    what = "kernel" if report.kernel else "work"
    place = f" at {short_place(report.file, report.line)}" if report.line else ""
    return f"device {device}'s {what} ended with {report.kind}{place}"


def _who(members: Sequence[Any]) -> str:
    blocks = Counter(m.block for m in members)
    if len(members) == 1:
        return f"block {index_text(members[0].block)} thread {index_text(members[0].thread)}"
    if len(blocks) == 1:
        return f"{len(members)} threads of block {index_text(next(iter(blocks)))}"
    return f"{len(members)} threads of {len(blocks)} blocks ({index_text(min(blocks))} to {index_text(max(blocks))})"
