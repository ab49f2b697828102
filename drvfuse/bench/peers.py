# SPDX-License-Identifier: Apache-2.0
"""Times of the collectives of other libraries (torch, NCCL), which the benchmarks call peers. Each is measured by
separate processes, one for each GPU.

A peer that fails has the reason in place of times. Every wait is bounded by the settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.multicast_support import VETOES
from .peer_worker import NORM, PEERS
from .settings import Settings
from .sizes import EPSILON

_COMMAND = [sys.executable, "-m", "drvfuse.bench.peer_worker"]
_GRACE = 5.0  # seconds after the failure of one process of a peer until its other processes are killed
_POLL = 0.05

Key = tuple[int, int, bool]
"""Rows, columns, and whether there is a residual."""

Figures = dict[str, Any]
"""The figures of a peer for a `Key`: `us`, `spread` and for sums `adds_us`, or `failed` with the error's first line."""


def names(op: str) -> tuple[str, ...]:
    """The names of an op's peers. A peer of the fused op is a collective and then a compiled norm and quantisation;
    `NORM` names the norm and quantisation without a collective.
    """
    return PEERS if op == "allreduce" else (*PEERS, NORM)


def measure(
    peer: str, op: str, residuals: Sequence[bool], ranks: int, shapes: Sequence[tuple[int, int]], settings: Settings
) -> dict[Key, Figures]:
    """Measure `peer` with every shape and each value in `residuals`, which says whether there is a residual. Returns
    its figures."""
    with tempfile.TemporaryDirectory() as folder:
        plan = {
            "peer": peer,
            "op": op,
            "residuals": list(residuals),
            "ranks": ranks,
            "shapes": list(shapes),
            "calls": settings.calls,
            "sets": settings.sets,
            "weight_columns": [settings.gemv_columns(cols) for _, cols in shapes],
            "epsilon": EPSILON,
            "folder": folder,
            "seconds": settings.peer_seconds,
        }
        why = _run(plan, settings.peer_seconds)
        records = [_records(Path(folder) / str(rank)) for rank in range(ranks)]
    whole = [of_rank.pop(None)["failed"] for of_rank in records if None in of_rank]
    reason = whole[0] if whole else why
    keys = [(rows, cols, residual) for rows, cols in shapes for residual in residuals]
    return {key: _figures([of_rank.get(key) for of_rank in records], reason) for key in keys}


def _figures(records: Sequence[dict[str, Any] | None], reason: str) -> Figures:
    """The figures of one peer and shape, from the record of each rank, which is None if there is no record. The time of
    a replay is the slowest rank's.
    """
    for record in records:
        if record is not None and "failed" in record:
            return {"failed": record["failed"]}
    present = [record for record in records if record is not None]
    if len(present) < len(records):
        return {"failed": reason or "a process gave no times"}

    def slowest(key: str) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*(record[key] for record in present), strict=True)]

    us = slowest("us")
    found = {"us": statistics.median(us), "spread": max(us) - min(us)}
    if "chain" in present[0]:
        found["adds_us"] = statistics.median(slowest("chain")) - statistics.median(slowest("gemv"))
    return found


def _records(path: Path) -> dict[Key | None, dict[str, Any]]:
    """The records that a process has written, by (rows, columns, residual). A record under the key None says why the
    process failed. An incomplete last line is ignored.
    """
    found: dict[Key | None, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            found[(record["rows"], record["cols"], record["residual"]) if "rows" in record else None] = record
    return found


def _run(plan: dict[str, Any], seconds: float) -> str:
    """Run the processes of a plan to their end. Returns why they failed, or ""."""
    environment = {**os.environ, **VETOES, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    logs = [Path(plan["folder"]) / f"log {rank}" for rank in range(plan["ranks"])]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, path in enumerate(logs):
            with path.open("wb") as log:
                command = [*_COMMAND, str(rank), json.dumps(plan)]
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that os.killpg also kills processes that this one starts
                    )
                )
        end, hasty = time.monotonic() + seconds, False
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end:
                return _ended(processes, logs) or f"not done after {seconds:g} seconds"
            if not hasty and any(process.poll() for process in processes):
                end, hasty = min(end, time.monotonic() + _GRACE), True
            time.sleep(_POLL)
        return _ended(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ended(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> str:
    """The status of the first process that failed, and the last line that it printed."""
    for process, log in zip(processes, logs, strict=True):
        status = process.poll()
        if status:
            lines = log.read_text(errors="replace").strip().splitlines() or [""]
            return f"a process ended with status {status}: {lines[-1]}"
    return ""
