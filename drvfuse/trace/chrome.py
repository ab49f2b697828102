# SPDX-License-Identifier: Apache-2.0
"""Records as a Chrome trace: the JSON that chrome://tracing and ui.perfetto.dev open.

Each rank is a process and each block a thread, both numbered from 1, since Perfetto reserves 0. The slices of a block
are nested: the block, its phases, and in the phase "barrier" the waits for each peer. Times are in microseconds since
the first entry. They are rounded to whole nanoseconds, as Perfetto does, so that adjacent slices do not overlap there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import BLOCK

if TYPE_CHECKING:
    from .clocks import Clock


def write(path: str | Path, records: np.ndarray[Any, Any], clocks: Mapping[int, Clock]) -> None:
    """Write `trace_object` to a file."""
    Path(path).write_text(json.dumps(trace_object(records, clocks)) + "\n")


def trace_object(records: np.ndarray[Any, Any], clocks: Mapping[int, Clock]) -> dict[str, Any]:
    """The JSON object that `write` writes for these records."""
    lanes = _Lanes()
    events: list[dict[str, Any]] = []
    starts, ends = (np.rint(records[name]).astype(np.int64) for name in ("start_ns", "end_ns"))
    # Ordered by start, then by length: a slice comes after the slice that contains it.
    for number in np.lexsort((records["role"] != BLOCK, -ends, starts)):
        events.append(_slice(records[number], int(starts[number]), int(ends[number]), lanes))
    return {
        "traceEvents": [*_names(sorted({int(rank) for rank in records["rank"]}), lanes), *events],
        "displayTimeUnit": "ns",
        "otherData": {
            "clocks": {
                str(rank): {key: value if math.isfinite(value) else None for key, value in asdict(clock).items()}
                for rank, clock in clocks.items()
            }
        },
    }


class _Lanes:
    """The lanes of the viewer, which the format calls threads: one for each block of a rank. If launches overlap, the
    blocks with the same index have several lanes."""

    def __init__(self) -> None:
        self._busy: dict[tuple[int, int], list[int]] = {}  # (rank, block) -> the time from which each lane is free
        self.of: dict[tuple[int, int, int], int] = {}
        self.threads: dict[tuple[int, int], str] = {}

    def open(self, rank: int, launch: int, block: int, start: int, end: int) -> None:
        free = self._busy.setdefault((rank, block), [])
        number = next((i for i, time in enumerate(free) if time <= start), len(free))
        free[number : number + 1] = [end]
        thread = 1 + block + number * 1_000_000
        self.of[rank, launch, block] = thread
        self.threads[rank, thread] = f"block {block}" + (f" ({number + 1})" if number else "")


def _slice(record: Any, start: int, end: int, lanes: _Lanes) -> dict[str, Any]:
    rank, launch, block = int(record["rank"]), int(record["launch"]), int(record["block"])
    role, peer = str(record["role"]), int(record["peer"])
    arguments: dict[str, Any] = {"cycles": int(record["end"] - record["start"])}
    name = role
    if role == BLOCK:
        lanes.open(rank, launch, block, start, end)
        name = str(record["kernel"])
        arguments |= {"launch": launch, "sm": int(record["sm"])}
    elif peer >= 0:
        name = f"{role} for rank {peer}" if peer != rank else f"{role} for itself"
        arguments["peer"] = peer
    return {
        "name": name,
        "cat": role,
        "ph": "X",
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "pid": 1 + rank,
        "tid": lanes.of[rank, launch, block],
        "args": arguments,
    }


def _names(ranks: list[int], lanes: _Lanes) -> list[dict[str, Any]]:
    found = [("process_name", rank, 0, f"rank {rank}") for rank in ranks]
    found += [("thread_name", rank, thread, name) for (rank, thread), name in sorted(lanes.threads.items())]
    return [
        {"name": kind, "ph": "M", "pid": 1 + rank, "tid": thread, "args": {"name": name}}
        for kind, rank, thread, name in found
    ]
