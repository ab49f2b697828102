# SPDX-License-Identifier: Apache-2.0
"""Stored times of the fastest peers, for peers that are not installed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "stored_peers.json").read_text())
    return found


def source() -> str:
    """The origin of the stored times: what was measured, and how."""
    return str(_stored()["source"])


def shapes() -> list[tuple[int, int]]:
    """The shapes (rows, columns) for which times are stored; they are the same for two and for four GPUs."""
    return [(row["rows"], row["cols"]) for row in _stored()["rows"] if row["gpus"] == 2]


def fastest(op: str, ranks: int, rows: int, cols: int, residual: bool) -> tuple[str, float] | None:
    """The name and microseconds of the fastest peer of the all-reduce, or of the fused op with residual.

    Returns None for a shape that is not stored. For the fused op without residual it returns the fastest peer of the
    all-reduce, the first step of a sequence of unfused ops.
    """
    for row in _stored()["rows"]:
        if (row["gpus"], row["rows"], row["cols"]) == (ranks, rows, cols):
            name, us = row["residual" if op != "allreduce" and residual else "allreduce"]
            return name, us
    return None
