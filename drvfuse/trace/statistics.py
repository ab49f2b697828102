# SPDX-License-Identifier: Apache-2.0
"""Statistics of records: time by phase, the blocks, the skew of the ranks, and the waits for peers.

Each statistic is over all launches of one kernel. All times are in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .decode import BLOCK

Records = np.ndarray[Any, Any]
_WAIT = "wait"


@dataclass(frozen=True)
class Phase:
    """A phase of a kernel's blocks on one rank: the mean and the largest time that a block spends in the phase, the
    mean as a share of the whole time of a block, and the block with the largest time."""

    rank: int
    role: str
    mean: float
    share: float
    longest: float
    block: int


@dataclass(frozen=True)
class Skew:
    """The times at which the blocks of one rank begin and end, and the block that took longest.

    `first` and `last` are the entries of the first and the last block, and `end` is the last exit. They are relative to
    the first entry of a block on any rank, and are medians over launches.
    """

    rank: int
    first: float
    last: float
    end: float
    slowest: float
    block: int
    sm: int


@dataclass(frozen=True)
class Wait:
    """The mean and the largest time that blocks of `rank` waited for `peer`, and the share of these blocks' barriers at
    which `peer` arrived last of all peers.
    """

    rank: int
    peer: int
    mean: float
    longest: float
    last: float


def kernels(records: Records) -> list[str]:
    """The kernels in the records, in the order of their first launch."""
    return list(dict.fromkeys(records["kernel"].tolist()))


def phases(records: Records) -> list[Phase]:
    """The phases of the blocks of one kernel, by rank, in the order in which they begin. Waits are left out, since they
    are parts of barriers; the other phases add up to the blocks' time."""
    found = []
    for rank in np.unique(records["rank"]).tolist():
        own = records[records["rank"] == rank]
        whole = own[own["role"] == BLOCK]
        time = float(_duration(whole).sum())
        laps = own[~np.isin(own["role"], (BLOCK, _WAIT))]
        for role in dict.fromkeys(laps["role"][np.argsort(laps["start"], kind="stable")].tolist()):
            chosen = laps[laps["role"] == role]
            blocks, which = np.unique(chosen[["launch", "block"]], return_inverse=True)
            total = np.bincount(which, _duration(chosen))
            mean = float(total.sum()) / len(whole)
            share = float(total.sum()) / time if time else 0.0
            most = int(total.argmax())
            found.append(Phase(rank, role, mean, share, float(total[most]), int(blocks["block"][most])))
    return found


def skews(records: Records) -> list[Skew]:
    """The skew of each rank over the launches of one kernel."""
    whole = records[records["role"] == BLOCK]
    times: dict[int, list[tuple[float, float, float]]] = {}
    for launch in np.unique(whole["launch"]).tolist():
        of_launch = whole[whole["launch"] == launch]
        origin = of_launch["start_ns"].min()
        for rank in np.unique(of_launch["rank"]).tolist():
            own = of_launch[of_launch["rank"] == rank]
            begin, end = (own[name] - origin for name in ("start_ns", "end_ns"))
            times.setdefault(rank, []).append((begin.min(), begin.max(), end.max()))
    found = []
    for rank, measured in sorted(times.items()):
        own = whole[whole["rank"] == rank]
        slowest = own[np.argmax(_duration(own))]
        first, last, end = (float(value) / 1000 for value in np.median(np.array(measured), axis=0))
        took = float(slowest["end_ns"] - slowest["start_ns"]) / 1000
        found.append(Skew(rank, first, last, end, took, int(slowest["block"]), int(slowest["sm"])))
    return found


def waits(records: Records) -> list[Wait]:
    """The waits of each rank for each peer in the launches of one kernel."""
    chosen = records[(records["role"] == _WAIT) & (records["peer"] != records["rank"])]
    if not chosen.size:
        return []
    # Waits of a block that begin at the same time belong to one barrier.
    _, barrier = np.unique(chosen[["launch", "rank", "block", "start"]], return_inverse=True)
    latest = np.full(int(barrier.max()) + 1, -1, np.int64)
    np.maximum.at(latest, barrier, chosen["end"])
    last = chosen["end"] == latest[barrier]
    found = []
    for rank, peer in sorted(set(chosen[["rank", "peer"]].tolist())):
        these = (chosen["rank"] == rank) & (chosen["peer"] == peer)
        took = _duration(chosen[these])
        found.append(Wait(rank, peer, float(took.mean()), float(took.max()), float(last[these].mean())))
    return found


def _duration(records: Records) -> np.ndarray[Any, Any]:
    return (records["end_ns"] - records["start_ns"]) / 1000
