# SPDX-License-Identifier: Apache-2.0
"""Records as a Chrome trace: the JSON that chrome://tracing and ui.perfetto.dev open.

One process a rank, one thread a block. The slices of a block nest: the block, its phases, and in the phase "barrier"
the waits for each peer. Times are in microseconds since the first entry.
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
    """The trace of some records as the object that goes into the file."""
    lanes = _Lanes()
    events: list[dict[str, Any]] = []
    # By start, the longer first: so a slice comes after the one that it nests in.
    whole = records["role"] == BLOCK
    for record in records[np.lexsort((~whole, -records["end_ns"], records["start_ns"]))]:
        events.append(_slice(record, lanes))
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
    """A thread a block; where launches overlap, blocks of one index get threads of their own."""

    def __init__(self) -> None:
        self._busy: dict[tuple[int, int], list[float]] = {}  # (rank, block) -> when each of its threads is free
        self._of: dict[tuple[int, int, int], int] = {}
        self.threads: dict[tuple[int, int], str] = {}

    def open(self, rank: int, launch: int, block: int, start: float, end: float) -> None:
        free = self._busy.setdefault((rank, block), [])
        number = next((i for i, time in enumerate(free) if time <= start), len(free))
        free[number : number + 1] = [end]
        thread = block + number * 1_000_000
        self._of[rank, launch, block] = thread
        self.threads[rank, thread] = f"block {block}" + (f" ({number + 1})" if number else "")

    def of(self, rank: int, launch: int, block: int) -> int:
        return self._of[rank, launch, block]


def _slice(record: Any, lanes: _Lanes) -> dict[str, Any]:
    rank, launch, block = int(record["rank"]), int(record["launch"]), int(record["block"])
    start, end = float(record["start_ns"]), float(record["end_ns"])
    role, peer = str(record["role"]), int(record["peer"])
    arguments: dict[str, Any] = {"cycles": int(record["end"] - record["start"])}
    name = role
    if role == BLOCK:
        lanes.open(rank, launch, block, start, end)
        name = str(record["kernel"])
        arguments |= {"launch": launch, "sm": int(record["sm"])}
    elif peer >= 0:
        name = f"{role} for rank {peer}"
        arguments["peer"] = peer
    return {
        "name": name,
        "cat": role,
        "ph": "X",
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "pid": rank,
        "tid": lanes.of(rank, launch, block),
        "args": arguments,
    }


def _names(ranks: list[int], lanes: _Lanes) -> list[dict[str, Any]]:
    found = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    for (rank, thread), name in sorted(lanes.threads.items()):
        found.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
    return found
