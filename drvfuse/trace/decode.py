# SPDX-License-Identifier: Apache-2.0
"""Converts the words of traced kernels to records on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DrvfuseError
from . import layout

if TYPE_CHECKING:
    from .buffer import Section
    from .clocks import Clock

Array = np.ndarray[Any, Any]

RECORD = np.dtype(
    {
        "names": ["rank", "launch", "kernel", "block", "sm", "role", "peer", "start", "end", "start_ns", "end_ns"],
        "formats": ["<i4", "<i4", "<U48", "<i4", "<i4", "<U12", "<i4", "<i8", "<i8", "<f8", "<f8"],
    }
)
"""The fields of a record, as `Trace.records` describes them."""

BLOCK = "block"
_NAMES = np.array([*layout.ROLES, BLOCK])
_WAIT, _BARRIER, _FINISH = (layout.ROLES.index(role) for role in ("wait", "barrier", "finish"))
_CLOCK = np.uint64((1 << layout.CLOCK_BITS) - 1)
_LONG = 1000  # in timer ticks: a block that runs longer gives its SM's clock rate better than a calibration does


def records(sections: Sequence[Section], words: Mapping[int, Array], clocks: Mapping[int, Clock]) -> Array:
    """The records of some sections; `words` and `clocks` are the buffers and the clocks by rank."""
    ordered = sorted(sections, key=lambda section: (section.launch, section.rank))
    tables = [_words(section, words[section.rank]) for section in ordered]
    entries = [table[:, 0][table[:, 3] != 0] for table in tables]
    origin = min((int(found.min()) for found in entries if found.size), default=0)
    parts = [_section(s, table, clocks[s.rank], origin) for s, table in zip(ordered, tables, strict=True)]
    result = np.concatenate(parts) if parts else np.empty(0, RECORD)
    if result.size:
        first = result["start_ns"].min()
        result["start_ns"] -= first
        result["end_ns"] -= first
    return result


def _words(section: Section, words: Array) -> Array:
    """The words of a section, one row per block."""
    first = section.offset // layout.WORD_BYTES
    return words[first : first + section.blocks * section.words].reshape(section.blocks, section.words)


def _section(section: Section, table: Array, clock: Clock, origin: int) -> Array:
    ran, entry = table[:, 3] != 0, table[:, 1:2]
    waits = section.rounds * section.peers
    seen = table[:, layout.HEADER_WORDS : layout.HEADER_WORDS + waits]
    laps = table[:, layout.HEADER_WORDS + waits :]
    lapped = (laps != 0) & ran[:, None]
    most = int(lapped.sum(axis=1).max(initial=0)) + 1
    if most > section.phases:
        raise DrvfuseError(
            f"{section.kernel} recorded {most} phases or more in a block where {section.phases} were expected"
        )
    role = np.where(lapped, ((laps - entry) >> np.uint64(layout.CLOCK_BITS)).astype(np.int64) - 1, -1)
    role = np.hstack([role, np.where(ran, _FINISH, -1)[:, None]])
    end = np.where(lapped, _cycles(laps, entry), 0)
    length = _cycles(table[:, 3], entry[:, 0])
    start = np.hstack([np.zeros((section.blocks, 1), np.int64), np.maximum.accumulate(end, axis=1)])
    end = np.hstack([end, length[:, None]])
    lapped = np.hstack([lapped, ran[:, None]])

    # The waits of round r belong to the block's barrier number r, counted from 0.
    barrier = role == _BARRIER
    number = np.cumsum(barrier, axis=1) - 1
    began = np.full((section.blocks, section.rounds), -1, np.int64)
    block, column = np.nonzero(barrier & (number < section.rounds))
    began[block, number[block, column]] = start[block, column]
    from_ = np.repeat(began, section.peers, axis=1)
    until = _cycles(seen, entry)
    waited = (seen != 0) & (from_ >= 0)

    whole = np.zeros((section.blocks, 1), np.int64)
    start = np.hstack([whole, start, from_])
    end = np.hstack([length[:, None], end, until])
    role = np.hstack([whole + len(layout.ROLES), role, np.full_like(until, _WAIT)])
    peer = np.full_like(role, -1)
    peer[:, peer.shape[1] - waits :] = np.tile(np.arange(section.peers), section.rounds)
    block, column = np.nonzero(np.hstack([ran[:, None], lapped, waited]))
    order = np.lexsort((-end[block, column], start[block, column], block))
    block, column = block[order], column[order]
    entry_ns, rate = _placed(table, length, clock)
    entry_ns += table[:, 0].astype(np.int64) - origin - clock.offset_ns

    found = np.empty(len(block), RECORD)
    found["rank"], found["launch"], found["kernel"] = section.rank, section.launch, section.kernel
    found["block"] = block
    found["sm"] = ((table[:, 2] - table[:, 0]) >> np.uint64(layout.CLOCK_BITS)).astype(np.int64)[block]
    found["role"] = _NAMES[role[block, column]]
    found["peer"] = peer[block, column]
    found["start"], found["end"] = start[block, column], end[block, column]
    found["start_ns"] = entry_ns[block] + found["start"] / rate[block]
    found["end_ns"] = entry_ns[block] + found["end"] / rate[block]
    return found


def _cycles(words: Array, entry: Array) -> Array:
    """The values of the SM's clock or of the global timer in the low bits of `words`, minus the value `entry`, which
    was read when the block began.
    """
    return ((words - entry) & _CLOCK).astype(np.int64)


def _placed(table: Array, length: Array, clock: Clock) -> tuple[Array, Array]:
    """For each block, the delay of its entry: the time of the entry minus the value that the global timer had then, in
    ns. Also for each block, the number of cycles per ns.

    The timer advances in ticks, so its value may be up to one tick old. The timer's value at the block's exit, `length`
    cycles later, gives further bounds of the delay. The result is the middle of the interval that remains.
    """
    tick = clock.resolution_ns
    took = _cycles(table[:, 2], table[:, 0])
    long = took > _LONG * tick if tick else np.zeros(len(took), bool)
    rate = np.where(long, length / np.maximum(took, 1), clock.cycles_per_ns)
    # a lower bound of the delay, from the timer's value at the exit
    back = np.where(long, 0.0, took - length / clock.cycles_per_ns)
    low, high = np.maximum(back, 0.0), np.minimum(back, 0.0) + tick
    return np.where(low <= high, (low + high) / 2, tick / 2), rate
