# SPDX-License-Identifier: Apache-2.0
"""The last events on the emulated devices as text, with one column per block and one row per event, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import mbarriers
from .events import Event, decode, of_blocks
from .places import Identity, Index, called_at, index_text, short_place
from .rows import Repetition, last_rows

if TYPE_CHECKING:
    from ..space.allocation import Allocation
    from ..space.window import Window
    from .reports import Report

WIDTH = 120  # characters of a line
ROWS = 32  # the maximum number of rows of a table
_COLUMNS = 3  # if there are more blocks, they share one column, which names the block of each event
_TYPE = re.compile(r"[busf]\d+|v\d|global|bf16(x2)?|f16x2")


@dataclass(frozen=True)
class Participant:
    """A block, or one thread of a block, whose events a timeline shows. The events of a thread include the barriers,
    the start and the end of its block.
    """

    device: int
    block: Index
    thread: Index | None = None

    def takes(self, event: Event) -> bool:
        """Whether an event belongs to this participant."""
        if (event.device, event.block) != (self.device, self.block):
            return False
        return self.thread in (None, event.thread) or event.kind in ("start", "end", "barrier", "cluster")

    def __str__(self) -> str:
        text = f"device {self.device} block {index_text(self.block)}"
        return text if self.thread is None else f"{text} thread {index_text(self.thread)}"


# Rendering -----------------------------------------------------------------------------------------------------------


class Names:
    """Short names of addresses, such as "A+0x40". A letter means an allocation; `legend` lists the letters."""

    def __init__(self, window: Window | None) -> None:
        self._window = window
        self._letters: dict[int, tuple[str, Allocation, str]] = {}

    def of(self, address: int) -> str:
        """The name of an address. An address outside of all allocations is written as a number."""
        window = self._window
        live = window.index.find(address) if window else None
        gone = window.index.freed(address) if window and live is None else None
        allocation = live or gone
        if allocation is None:
            return f"0x{address:x}"
        if allocation.address not in self._letters:
            number = len(self._letters)
            letter = chr(65 + number) if number < 26 else f"M{number}"
            self._letters[allocation.address] = letter, allocation, ", which was freed" if gone else ""
        return f"{self._letters[allocation.address][0]}+0x{address - allocation.address:x}"

    def legend(self) -> list[str]:
        """A line for each letter that names have used so far, with the allocation that the letter means."""
        return [f"{letter}: {allocation}{gone}" for letter, allocation, gone in self._letters.values()]


def render(
    events: Iterable[Event],
    participants: Sequence[Participant],
    *,
    window: Window | None = None,
    names: Names | None = None,
    rows: int = ROWS,
    width: int = WIDTH,
    last: Mapping[Participant, str] | None = None,
) -> str:
    """A table of the last events of some blocks or threads, newest last, with `rows` rows of `width` characters. Each
    participant has a column; more than `_COLUMNS` participants share one column.

    Successive events share a row if they show that threads of one block did the same thing. `last` adds a row for each
    participant, with what the participant does now.
    """
    names = names or Names(window)
    hidden, shown = last_rows([e for e in events if any(p.takes(e) for p in participants)], rows)
    shared = len(participants) > _COLUMNS
    heads = ["block", "event"] if shared else [str(p) for p in participants]
    table: list[list[str] | str] = []
    clock = -1
    for members in shown:
        if isinstance(members, Repetition):
            table.append(str(members))
            continue
        time = str(members[0].clock) if members[0].clock != clock else ""
        clock = members[0].clock
        text = cell_text(members, names)
        takers = [p for p in participants if p.takes(members[0])]
        if shared:
            table += [[time, str(p), text] for p in takers]
        else:
            table.append([time, *(text if p in takers else "" for p in participants)])
    for p, text in (last or {}).items():
        table.append(["race", str(p), text] if shared else ["race", *(text if p is q else "" for q in participants)])
    cells = [row for row in table if not isinstance(row, str)]
    first = max([len(row[0]) for row in cells] + [2])
    if shared:
        second = max([len(row[1]) for row in cells] + [len("block")])
        widths = [first, second, width - first - second - 6]
    else:
        each = (width - first - 3 * len(heads)) // len(heads)
        widths = [first, *[each] * len(heads)]
    lines = [_row(["ns", *heads], widths), "-+-".join("-" * w for w in widths)]
    lines += [f"({hidden} earlier events)"] if hidden else []
    lines += [row if isinstance(row, str) else _row(row, widths) for row in table]
    return "\n".join([*lines, *(cut(text, width) for text in names.legend())])


def cell_text(members: Sequence[Event], names: Names) -> str:
    """The text of a cell for events that share a row: what was done, by which threads, and where."""
    e = members[0]
    place = f"({short_place(e.file, e.line)})" if e.line else ""
    if e.kind == "start":
        return f"starts {e.kernel}"
    if e.kind == "end":
        return f"ends {e.kernel}"
    if e.kind == "barrier":
        return f"barrier {e.value}, t{index_text(e.thread)} came last {place}"
    if e.kind == "cluster":
        return f"the cluster's barrier, phase {e.value} {place}"
    if e.kind in ("gdc_wait", "trigger"):
        what = "passes griddepcontrol.wait" if e.kind == "gdc_wait" else "allows the dependent launch"
        return f"{what} {_threads(members)} {place}"
    parts = [_short(e.opcode) or e.kind]
    if e.kind in ("load", "store", "atomic"):
        addresses = sorted({m.address for m in members})
        parts.append(f"[{names.of(addresses[0])}{' ..' if len(addresses) > 1 else ''}]")
        if e.kind != "store" and len({m.value for m in members}) == 1:
            value = mbarriers.brief(e.opcode, e.value) or value_text(e.value)
            parts.append(f"{'saw' if e.kind == 'load' else 'found'} {value}")
    return " ".join([*parts, _threads(members), place])


def _threads(members: Sequence[Event]) -> str:
    threads = list(dict.fromkeys(m.thread for m in members))
    if len(threads) == 1:
        return f"t{index_text(threads[0])}" + (f" x{len(members)}" if len(members) > 1 else "")
    times = f" x{len(members)}" if members[0].clock != members[-1].clock else ""
    return f"t{index_text(min(threads))}-t{index_text(max(threads))}{times}"


def _short(opcode: str) -> str:
    """An opcode without its state space and its type."""
    return ".".join(part for part in opcode.split(".") if not _TYPE.fullmatch(part))


def value_text(value: int) -> str:
    return str(value) if value < 1_000_000 else f"0x{value:x}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " | ".join(cut(c, w).ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()


def cut(text: str, width: int) -> str:
    """A text, shortened to a width. A place in brackets at the end of the text is kept."""
    if len(text) <= width:
        return text
    place = re.search(r" \([^()]*\)$", text)
    end = place[0] if place and len(place[0]) + 8 < width else ""
    return text[: width - len(end) - 2] + ".." + end


# Findings ------------------------------------------------------------------------------------------------------------


def of_race(
    report: Report, records: np.ndarray, identities: Mapping[int, Identity], window: Window | None = None
) -> str:
    """The timeline of a race: the last events of its two blocks, or of its two threads if these are of one block. The
    last row is the later access.
    """
    other = report.other
    assert report.device is not None and other is not None
    inside = other.block is not None and (report.device, report.block) == (other.device, other.block)
    sides = [
        Participant(device, block, thread if inside else None)
        for device, block, thread in (
            (other.device, other.block, other.thread),
            (report.device, report.block, report.thread),
        )
        if block is not None
    ]
    if not sides:
        return ""
    names = Names(window)
    address = "" if report.address is None else f" [{names.of(report.address)}]"
    last = {}
    if report.block is not None:
        last[sides[-1]] = f"races{address} {_place_of(report)}"
    chosen = of_blocks(records, identities, [(s.device, s.block) for s in sides])
    events = decode(chosen, identities)
    text = render(events, sides, names=names, last=last)
    process = "" if other.process is None else f" of process {other.process}"
    who = f"{other.kernel}{process} on device {other.device}"
    if other.block is not None and other.thread is not None:
        who += f" block {index_text(other.block)} {_place_of(other)}{called_at(other.callers)}"
    called = called_at(report.callers).removeprefix(", ")
    return "\n".join([f"the earlier access: {who}", *([f"the later access: {called}"] if called else []), text])


def _place_of(found: Any) -> str:
    thread = "" if found.thread is None else f"t{index_text(found.thread)} "
    return thread + (f"({short_place(found.file, found.line)})" if found.line else "")
