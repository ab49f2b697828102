# SPDX-License-Identifier: Apache-2.0
"""From the words that traced kernels wrote to records on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import layout

if TYPE_CHECKING:
    from .clocks import Clock

Array = np.ndarray[Any, Any]

RECORD = np.dtype(
    [
        ("rank", "<i4"),
        ("launch", "<i4"),
        ("kernel", "<U48"),
        ("block", "<i4"),
        ("sm", "<i4"),
        ("role", "<U12"),
        ("peer", "<i4"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("start_ns", "<f8"),
        ("end_ns", "<f8"),
    ]
)
"""See `Trace.records`."""

BLOCK = "block"
_NAMES = np.array([*layout.ROLES, BLOCK])
_WAIT = layout.ROLES.index("wait")
_CLOCK = np.uint64((1 << layout.CLOCK_BITS) - 1)
_HALF = 1 << (layout.CLOCK_BITS - 1)
_LONG = 1000  # a block of so many ticks of the timer gives the rate of its SM's clock better than a calibration


class Section(Protocol):
    """A section of a buffer: `buffer.Section`."""

    rank: int
    launch: int
    kernel: str
    blocks: int
    events: int
    offset: int


def records(sections: Sequence[Section], words: Mapping[int, Array], clocks: Mapping[int, Clock]) -> Array:
    """The records of some sections; `words` and `clocks` are the buffers and the clocks by rank."""
    ordered = sorted(sections, key=lambda section: (section.launch, section.rank))
    tables = [_words(section, words[section.rank]) for section in ordered]
    entries = [table[:, 0][table[:, 1] != 0] for table in tables]
    origin = min((int(found.min()) for found in entries if found.size), default=0)
    parts = [_section(s, table, clocks[s.rank], origin) for s, table in zip(ordered, tables, strict=True)]
    result = np.concatenate(parts) if parts else np.empty(0, RECORD)
    if result.size:
        first = result["start_ns"].min()
        result["start_ns"] -= first
        result["end_ns"] -= first
    return result


def _words(section: Section, words: Array) -> Array:
    """A row a block."""
    width = layout.HEADER_WORDS + section.events
    first = section.offset // layout.WORD_BYTES
    return words[first : first + section.blocks * width].reshape(section.blocks, width)


def _section(section: Section, table: Array, clock: Clock, origin: int) -> Array:
    begun, ended = table[:, 1] != 0, table[:, 3] != 0
    entry = table[:, 1] & _CLOCK
    length = ((table[:, 3] - entry) & _CLOCK).astype(np.int64)
    events = table[:, layout.HEADER_WORDS :]
    after = ((events - entry[:, None]) & _CLOCK).astype(np.int64)  # cycles from the block's entry
    count = np.where(ended, table[:, 3] >> np.uint64(layout.CLOCK_BITS), np.uint64(layout.MAX_COUNT))
    # What a block that has not ended did not write is from the launch before, so older than its entry.
    here = (events != 0) & begun[:, None] & (np.arange(section.events) < count[:, None]) & (after < _HALF)
    role = (events >> np.uint64(56)).astype(np.int64) - 1
    peer = ((events >> np.uint64(layout.CLOCK_BITS)) & np.uint64(0xFF)).astype(np.int64) - 1

    laps = np.where(here & (role != _WAIT), after, 0)
    before = np.zeros_like(after)
    before[:, 1:] = np.maximum.accumulate(laps, axis=1)[:, :-1]

    whole = np.where(ended, length, -1)[:, None]
    start = np.hstack([np.zeros_like(whole), before])
    end = np.hstack([whole, after])
    block, column = np.nonzero(np.hstack([begun[:, None], here]))
    entry_ns, rate = _placed(table, length, ended, clock)
    entry_ns += table[:, 0].astype(np.int64) - origin - clock.offset_ns

    found = np.empty(len(block), RECORD)
    found["rank"], found["launch"], found["kernel"] = section.rank, section.launch, section.kernel
    found["block"] = block
    found["sm"] = (table[:, 1] >> np.uint64(layout.CLOCK_BITS)).astype(np.int64)[block] - 1
    found["role"] = _NAMES[np.hstack([np.full_like(whole, len(layout.ROLES)), role])[block, column]]
    found["peer"] = np.hstack([np.full_like(whole, -1), peer])[block, column]
    found["start"], found["end"] = start[block, column], end[block, column]
    found["start_ns"] = entry_ns[block] + found["start"] / rate[block]
    found["end_ns"] = np.where(found["end"] < 0, np.nan, entry_ns[block] + found["end"] / rate[block])
    return found


def _placed(table: Array, length: Array, ended: Array, clock: Clock) -> tuple[Array, Array]:
    """(when each block's entry was, in ns after its reading of the global timer; cycles a ns).

    A reading is up to a tick early. That of the exit, `length` cycles later, narrows down where in its tick the entry
    was; the middle of what is possible is taken.
    """
    tick = clock.resolution_ns
    took = np.where(ended, (table[:, 2] - table[:, 0]).astype(np.int64), 0)
    long = took > _LONG * tick if tick else np.zeros_like(ended)
    rate = np.where(long, length / np.maximum(took, 1), clock.cycles_per_ns)
    back = np.where(ended & ~long, took - length / clock.cycles_per_ns, 0.0)  # the entry by the exit's reading
    low, high = np.maximum(back, 0.0), np.minimum(back, 0.0) + tick
    return np.where(low <= high, (low + high) / 2, tick / 2), rate
