# SPDX-License-Identifier: Apache-2.0
"""The last events on the emulated devices as text, with one column per block and one row per event, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..abi import EventKind
from . import mbarriers
from .events import Event, decode, of_blocks
from .places import Identity, Index, called_at, index_text, short_place
from .rows import Again, last_rows

if TYPE_CHECKING:
    from ..space.allocation import Allocation
    from ..space.window import Window
    from .reports import Report

WIDTH = 120
ROWS = 32
COLUMNS = 3  # if there are more blocks, they share one column, which names the block of each event
APART = 8  # if more blocks wait for different words, blocks that wait at the same places count as one
NEAR = 256  # bytes around an unwritten word in which a write by a peer is mentioned
_TYPE = re.compile(r"[busf]\d+|v\d|global|bf16(x2)?|f16x2")


@dataclass(frozen=True)
class Participant:
    """A block or one thread of a block. The barriers of its block are events of the thread too."""

    device: int
    block: Index
    thread: Index | None = None

    def takes(self, event: Event) -> bool:
        if (event.device, event.block) != (self.device, self.block):
            return False
        return self.thread in (None, event.thread) or event.kind in ("start", "end", "barrier", "cluster")

    def __str__(self) -> str:
        text = f"device {self.device} block {index_text(self.block)}"
        return text if self.thread is None else f"{text} thread {index_text(self.thread)}"


# Rendering -----------------------------------------------------------------------------------------------------------


class Names:
    """Short names of addresses, such as "A+0x40", and the memory for which the letters stand."""

    def __init__(self, window: Window | None) -> None:
        self._window = window
        self._letters: dict[int, tuple[str, Allocation, str]] = {}

    def of(self, address: int) -> str:
        window = self._window
        held = window.index.find(address) if window else None
        gone = window.index.freed(address) if window and held is None else None
        allocation = held or gone
        if allocation is None:
            return f"0x{address:x}"
        if allocation.address not in self._letters:
            number = len(self._letters)
            letter = chr(65 + number) if number < 26 else f"M{number}"
            self._letters[allocation.address] = letter, allocation, ", which was freed" if gone else ""
        return f"{self._letters[allocation.address][0]}+0x{address - allocation.address:x}"

    def legend(self) -> list[str]:
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
    """The last `rows` events of some blocks or threads, newest last. Each has a column, or all share one if there are
    many.

    Successive events of threads of a block that did the same share a row. `last` adds a row with what a participant
    does now.
    """
    names = names or Names(window)
    hidden, shown = last_rows([e for e in events if any(p.takes(e) for p in participants)], rows)
    shared = len(participants) > COLUMNS
    heads = ["block", "event"] if shared else [str(p) for p in participants]
    table: list[list[str] | str] = []
    clock = -1
    for members in shown:
        if isinstance(members, Again):
            table.append(str(members))
            continue
        time = str(members[0].clock) if members[0].clock != clock else ""
        clock = members[0].clock
        text = _text(members, names)
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
    return "\n".join([*lines, *(_cut(text, width) for text in names.legend())])


def _text(members: Sequence[Event], names: Names) -> str:
    """The text of a cell: what was done, by which threads, and where."""
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
            value = mbarriers.brief(e.opcode, e.value) or _value(e.value)
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


def _value(value: int) -> str:
    return str(value) if value < 1_000_000 else f"0x{value:x}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " | ".join(_cut(c, w).ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()


def _cut(text: str, width: int) -> str:
    """A text, shortened to a width. A place in brackets at its end is kept."""
    if len(text) <= width:
        return text
    place = re.search(r" \([^()]*\)$", text)
    end = place[0] if place and len(place[0]) + 8 < width else ""
    return text[: width - len(end) - 2] + ".." + end


# Findings ------------------------------------------------------------------------------------------------------------


def of_race(
    report: Report, records: np.ndarray, identities: Mapping[int, Identity], window: Window | None = None
) -> str:
    """The last events of both blocks of a race, or of both threads if they are of one block. The last row is the later
    access.
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


def of_deadlock(
    waits: Sequence[tuple[str, int, Sequence[Any]]],
    records: np.ndarray,
    identities: Mapping[int, Identity],
    window: Window | None = None,
    without_work: Iterable[str] = (),
    rows: int = ROWS,
) -> str:
    """The words for which the threads of a deadlock wait, the last writes to them, and the last events of the blocks.

    `waits` are (kernel, device, `Blocked` threads of the launch). Of several blocks that wait at the same places for
    the same words, only the first is shown; if there are too many such groups, the words may differ. `without_work` are
    lines about the devices that run nothing.
    """
    names = Names(window)
    stood: dict[tuple[Any, ...], Participant] = {}
    alike: dict[tuple[Any, ...], Participant] = {}  # the first block of those that wait at the same places
    words: dict[int, list[tuple[int, Any]]] = {}
    for kernel, device, blocked in waits:
        places: dict[Index, list[tuple[Any, ...]]] = {}
        for b in blocked:
            places.setdefault(b.block, []).append((b.status, b.file, b.line, b.address))
            if b.address:
                words.setdefault(b.address, []).append((device, b))
        for block, found in places.items():
            key = (kernel, device, *dict.fromkeys(found))
            stood.setdefault(key, Participant(device, block))
            alike.setdefault((kernel, device, *dict.fromkeys(f[:3] for f in found)), stood[key])
    lines = []
    for address, pollers in list(words.items())[:rows]:
        lines += _word(address, pollers, records, identities, names, window)
    if len(words) > rows:
        lines.append(f"and {len(words) - rows} other words")
    lines += without_work
    fit = len(stood) <= APART
    participants = list((stood if fit else alike).values())
    if participants:
        chosen = of_blocks(records, identities, [(p.device, p.block) for p in participants])
        events = decode(chosen, identities)
        which = "alike" if fit else "at the same places, though for other words,"
        lines += ["", f"what they did last, of blocks that wait {which} the first:"]
        lines.append(render(events, participants, names=names, rows=rows))
    return "\n".join(lines)


def _word(
    address: int,
    pollers: Sequence[tuple[int, Any]],
    records: np.ndarray,
    identities: Mapping[int, Identity],
    names: Names,
    window: Window | None,
) -> list[str]:
    """The lines about a polled word: which threads wait for it, which thread wrote it last (by any of its addresses)
    or, if none did, which devices wrote near it.
    """
    device, first = pollers[0]
    who = f"device {device} block {index_text(first.block)} thread {index_text(first.thread)}"
    more = f" and {len(pollers) - 1} other threads" if len(pollers) > 1 else ""
    holds = "" if first.seen is None or first.mbarrier else f", holds {_value(first.seen)}"
    lines = [f"{names.of(address)}{holds}: polled by {who}{more} {_place_of_wait(first)}".rstrip()]
    if first.mbarrier:
        lines.append(f"  it is an mbarrier: {first.mbarrier}")
    writes = records[np.isin(records["kind"], (EventKind.STORE, EventKind.ATOMIC))]
    places = np.array([address] if window is None else window.index.same(address), np.int64)
    here = decode(writes[np.isin(writes["address"].astype(np.int64), places)][-1:], identities)
    if here:
        e = here[0]
        by = f"device {e.device} block {index_text(e.block)} thread {index_text(e.thread)}"
        lines.append(f"  last written by {by}: {_text([e], names)}")
        return [_cut(line, WIDTH) for line in lines]
    lines.append("  nobody wrote it in the events that are kept")
    offsets = writes["address"].astype(np.int64)[:, None] - places
    peers = sorted({e.device for e in decode(writes[(np.abs(offsets) <= NEAR).any(1)], identities)})
    if peers:
        lines.append(f"  words within {NEAR} bytes of it were written by device {', '.join(map(str, peers))} only")
    return [_cut(line, WIDTH) for line in lines]


def _place_of_wait(blocked: Any) -> str:
    return f"({short_place(blocked.file, blocked.line)})" if blocked.file else ""
