# SPDX-License-Identifier: Apache-2.0
"""The rows of a timeline: similar events share a row, and repeated rows are shown once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .events import Event

PERIOD = 8  # the maximum length of a sequence of rows whose repetitions are shown once


@dataclass(frozen=True)
class Repetition:
    """A line in place of `times` more repetitions of the `rows` rows above it. `until` is the virtual time at which the
    last repetition ends.
    """

    rows: int
    times: int
    until: int

    @property
    def events(self) -> int:
        return self.rows * self.times

    def __str__(self) -> str:
        which = "the row above" if self.rows == 1 else f"the {self.rows} rows above"
        return f"({which} {self.times} times more, until {self.until} ns)"


def last_rows(events: Iterable[Event], rows: int) -> tuple[int, list[list[Event] | Repetition]]:
    """The last `rows` rows of some events: (number of rows that are left out, rows). There may be a few more rows, so
    that repeated rows are shown with their repetitions.
    """
    folded = _folded(_grouped(events))
    start = max(0, len(folded) - rows)
    for at, item in enumerate(folded[start : start + PERIOD + 1], start):
        # The line of a repetition refers to the rows above it. If these are cut off, start with the first of them.
        if isinstance(item, Repetition):
            start = min(start, at - item.rows)
            break
    return sum(item.events if isinstance(item, Repetition) else 1 for item in folded[:start]), folded[start:]


def _grouped(events: Iterable[Event]) -> list[list[Event]]:
    """The groups of events that share a row. Successive events share a row if they differ only in thread, address and
    value. Loads of one word by one block share a row if they return the same value and only loads come between them.
    """
    groups: list[list[Event]] = []
    # (block, place in the source, address of the word) of a load -> (the value that it returned last, its row)
    polls: dict[tuple[Any, ...], tuple[int, list[Event]]] = {}
    for e in events:
        if e.kind == "load":
            word = (e.device, e.block, e.file, e.line, e.opcode, e.address)
            held = polls.get(word)
            if held and held[0] == e.value:
                held[1].append(e)
                continue
        else:
            polls.clear()
        if groups and e.kind not in ("start", "end", "barrier", "cluster") and _alike(e) == _alike(groups[-1][-1]):
            groups[-1].append(e)
            continue
        groups.append([e])
        if e.kind == "load":
            polls[word] = e.value, groups[-1]
    return groups


def _alike(e: Event) -> tuple[Any, ...]:
    """What successive events must have in common to share a row. Events of griddepcontrol.wait may differ in time,
    since the threads of a block pass it one after another.
    """
    clock = 0 if e.kind == "gdc_wait" else e.clock
    return e.device, e.block, e.kind, e.file, e.line, e.opcode, clock


def _folded(groups: Sequence[list[Event]]) -> list[list[Event] | Repetition]:
    """The rows, with a Repetition in place of the repetitions of a row, or of a sequence of up to PERIOD rows."""
    keys = [_key(members) for members in groups]
    folded: list[list[Event] | Repetition] = []
    at = 0
    while at < len(keys):
        best, saved = (1, 1), 0
        for period in range(1, PERIOD + 1):
            end = at + period
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            times = (end - at) // period
            if (times - 1) * period - 1 > saved:
                best, saved = (period, times), (times - 1) * period - 1
        period, times = best
        folded += groups[at : at + period]
        at += period * times
        if times > 1:
            folded.append(Repetition(period, times - 1, groups[at - 1][-1].clock))
    return folded


def _key(members: Sequence[Event]) -> tuple[Any, ...]:
    """What two rows must have in common to be repetitions: everything but the time and the last thread at a barrier."""
    e = members[0]
    who = () if e.kind in ("barrier", "cluster") else tuple((m.thread, m.address, m.value) for m in members)
    number = e.value if e.kind == "barrier" else 0
    return e.device, e.block, e.kind, e.kernel, e.file, e.line, e.opcode, number, who
