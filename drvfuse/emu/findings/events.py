# SPDX-License-Identifier: Apache-2.0
"""The last events on the emulated devices, from the ring buffer of the native runtime.

Events are strong accesses, fences, barriers, and starts and ends of blocks. A poll is an event only if it reads a new
value. Times are virtual, and advance little while a thread can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..abi import EVENTS, EventKind, structs
from .places import Identity, Index, ravel

DTYPE = np.dtype(structs.Event)


@dataclass(frozen=True)
class Event:
    """An action of a thread. `clock` is the virtual time of the action in nanoseconds. `kind` is the name of an
    `abi.EventKind` in lower case. `value` is the value that a load has read or an atomic has found, or the number of a
    barrier. In an event of a block ("start" or "end"), `thread` is the first thread of the block.
    """

    clock: int
    kind: str
    kernel: str
    device: int
    block: Index
    thread: Index
    file: str | None
    line: int | None
    opcode: str
    address: int
    value: int
    flags: int = 0


def recent(ring: Any, count: int, until: int | None = None) -> np.ndarray:
    """A copy of the entries of a native ring buffer, oldest first. `count` is the number of all entries that were ever
    written. The copy ends before entry number `until` or, if that is None, with the newest entry.
    """
    return np.ctypeslib.as_array(ring)[np.arange(max(0, count - EVENTS), count if until is None else until) % EVENTS]


def decode(records: np.ndarray, identities: Mapping[int, Identity]) -> list[Event]:
    """The events of ring buffer entries, in their order. Launches that are not in `identities` are left out."""
    found = []
    for record in records.tolist():
        entry = dict(zip(DTYPE.names or (), record, strict=True))
        identity = identities.get(entry["op"])
        if identity is None:
            continue
        site, kind = identity.site(entry["site"]), EventKind(entry["kind"]).name.lower()
        who = identity.kernel, identity.device, *identity.index(entry["block"], entry["thread"])
        where = *identity.place(entry["site"]), site.opcode if site else ""
        found.append(Event(entry["clock"], kind, *who, *where, entry["address"], entry["value"], entry["flags"]))
    return found


def of_blocks(
    records: np.ndarray, identities: Mapping[int, Identity], blocks: Iterable[tuple[int, Index]]
) -> np.ndarray:
    """The ring buffer entries of the given blocks in all launches. A block is given as (device, index)."""
    keep = np.zeros(len(records), bool)
    wanted = list(blocks)
    for op in np.unique(records["op"]).tolist():
        identity = identities.get(op)
        if identity is not None:
            linear = [ravel(block, identity.grid) for device, block in wanted if device == identity.device]
            keep |= (records["op"] == op) & np.isin(records["block"], linear)
    return records[keep]
