# SPDX-License-Identifier: Apache-2.0
"""Tables of records as plain text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import counted
from ..tables import table
from . import statistics
from .clocks import VIRTUAL

if TYPE_CHECKING:
    from .clocks import Clock
    from .statistics import Records


def summary(records: Records, clocks: Mapping[int, Clock]) -> str:
    """Tables, as one text. They show for each kernel the time of its phases, the skew and the slowest block of each
    rank, and the waits for peers."""
    if not records.size:
        return "nothing was recorded\n"
    virtual = all(clock == VIRTUAL for clock in clocks.values())
    parts = ["times are by a virtual clock: they show the order of events, not their speed\n"] if virtual else []
    for kernel in statistics.kernels(records):
        parts += [f"{part}\n" for part in _of_kernel(kernel, records[records["kernel"] == kernel])]
    if not virtual:
        parts += [f"rank {rank}: {_clock(clock)}\n" for rank, clock in clocks.items()]
    return "".join(parts)


def _of_kernel(kernel: str, records: Records) -> Iterator[str]:
    """The tables of one kernel, each below its title."""
    launches, blocks = (len(set(records[name].tolist())) for name in ("launch", "block"))
    title = f"{kernel}: {counted(launches, 'launch', 'launches')}, {counted(blocks, 'block')} per rank"
    phases = statistics.phases(records)
    ranks = sorted({phase.rank for phase in phases})
    rows = []
    for role in sorted(dict.fromkeys(phase.role for phase in phases), key=lambda role: role == "finish"):
        of_role = {phase.rank: phase for phase in phases if phase.role == role}
        longest = max(of_role.values(), key=lambda phase: phase.longest)
        share = sum(phase.share for phase in of_role.values()) / len(ranks)
        means = [f"{of_role[rank].mean:.2f}" if rank in of_role else "" for rank in ranks]
        rows.append([role, f"{share:.0%}", *means, f"{longest.longest:.2f}", f"r{longest.rank} b{longest.block}"])
    yield _table(title, ["us per block", "share", *(f"r{rank}" for rank in ranks), "most", "where"], rows)
    skews = statistics.skews(records)
    over = f", medians of {launches} launches" if launches > 1 else ""
    yield _table(
        f"blocks of each rank, us after the first of all{over}",
        ["rank", "first begins", "last begins", "ends", "slowest block", "takes"],
        [
            [str(s.rank), *(f"{t:.2f}" for t in (s.first, s.last, s.end)), f"{s.block} (SM {s.sm})", f"{s.slowest:.2f}"]
            for s in skews
        ],
    )
    waits = {(wait.rank, wait.peer): wait for wait in statistics.waits(records)}
    if not waits:
        return
    peers = sorted({peer for _, peer in waits})
    rows = []
    for rank in sorted({rank for rank, _ in waits}):
        of_rank = [waits[rank, peer] for peer in peers if (rank, peer) in waits]
        last, most = max(of_rank, key=lambda wait: wait.last), max(of_rank, key=lambda wait: wait.longest)
        means = [f"{waits[rank, peer].mean:.2f}" if (rank, peer) in waits else "-" for peer in peers]
        rows.append([str(rank), *means, f"{most.longest:.2f}", f"r{last.peer} ({last.last:.0%})"])
    header = ["rank", *(f"for r{peer}" for peer in peers), "most", "mostly last"]
    yield _table("who waited for whom, us (mean)", header, rows)


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    return f"{title}\n{table(header, rows, text_columns=1)}\n"


def _clock(clock: Clock) -> str:
    text = f"global timer in steps of {clock.resolution_ns:.0f} ns, SM clock {clock.cycles_per_ns * 1000:.0f} MHz"
    if math.isinf(clock.error_ns):
        return f"{text}, not compared with the first rank"
    return f"{text}, aligned to +- {clock.error_ns:.0f} ns (offset {clock.offset_ns:.0f} ns)"
