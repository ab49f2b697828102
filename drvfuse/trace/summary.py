# SPDX-License-Identifier: Apache-2.0
"""Records as tables for the terminal, by rich."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Unsupported
from . import statistics

if TYPE_CHECKING:
    from rich.console import Console

    from .clocks import Clock
    from .statistics import Records


def summary(records: Records, clocks: Mapping[int, Clock], width: int = 100) -> str:
    """The tables of `show` as plain text."""
    rich = _rich()
    text = io.StringIO()
    show(rich.Console(file=text, width=width), records, clocks)
    return text.getvalue()


def show(console: Console, records: Records, clocks: Mapping[int, Clock]) -> None:
    """Print, for each kernel: the time of the phases, the ranks' skew and slowest blocks, and who waited for whom."""
    if not records.size:
        console.print("nothing was recorded")
        return
    for kernel in statistics.kernels(records):
        _show_kernel(console, kernel, records[records["kernel"] == kernel])
    for rank, clock in clocks.items():
        console.print(f"rank {rank}: {_clock(clock)}", highlight=False)


def _show_kernel(console: Console, kernel: str, records: Records) -> None:
    launches, blocks = (len(set(records[name].tolist())) for name in ("launch", "block"))
    title = f"{kernel}: {launches} launch{'es' * (launches > 1)}, {blocks} block{'s' * (blocks > 1)} a rank"
    phases = statistics.phases(records)
    ranks = sorted({phase.rank for phase in phases})
    cells = {(phase.rank, phase.role): phase for phase in phases}
    rows = []
    for role in dict.fromkeys(phase.role for phase in phases):
        row = [role]
        for rank in ranks:
            phase = cells.get((rank, role))
            row += [f"{phase.mean:.2f}", f"{phase.longest:.2f}", f"{phase.share:.0%}"] if phase else ["", "", ""]
        rows.append(row)
    _table(console, title, ["us in", *(f"{what} r{r}" for r in ranks for what in ("mean", "max", ""))], rows)
    skews = statistics.skews(records)
    _table(
        console,
        "ranks, us after the first block",
        ["rank", "first block begins", "last block begins", "ends", "slowest block", "takes"],
        [
            [str(s.rank), *(f"{t:.2f}" for t in (s.first, s.last, s.end)), f"{s.block} (SM {s.sm})", f"{s.slowest:.2f}"]
            for s in skews
        ],
    )
    waits = statistics.waits(records)
    if waits:
        _table(
            console,
            "who waited for whom, us",
            ["rank", "for rank", "mean", "max", "came last"],
            [[str(w.rank), str(w.peer), f"{w.mean:.2f}", f"{w.longest:.2f}", f"{w.last:.0%}"] for w in waits],
        )


def _table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    console.print(title, style="bold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _clock(clock: Clock) -> str:
    if not clock.resolution_ns:
        return "virtual clock: the order of events is meant, not their speed"
    text = f"global timer in steps of {clock.resolution_ns:.0f} ns, SM clock {clock.cycles_per_ns * 1000:.0f} MHz"
    if math.isinf(clock.error_ns):
        return f"{text}, not compared with the first rank"
    return f"{text}, aligned to +- {clock.error_ns:.0f} ns (offset {clock.offset_ns:.0f} ns)"


def _rich() -> Any:
    try:
        import rich.console
    except ModuleNotFoundError:
        raise Unsupported("a trace's tables need rich: pip install 'drvfuse[cli]'") from None
    return rich.console
