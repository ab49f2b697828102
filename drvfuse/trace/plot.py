# SPDX-License-Identifier: Apache-2.0
"""Records as a timeline in an image file, by matplotlib: one row per block, one colour per phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, Unsupported, shown
from . import layout
from .clocks import VIRTUAL
from .decode import BLOCK

if TYPE_CHECKING:
    from .clocks import Clock

MOST_BLOCKS = 16  # the most blocks shown for a rank; if it has more, evenly spaced blocks are chosen
_IDLE = {"producer": "#b0b0b0", "sync": "#909090", "barrier": "#dcdcdc", "receive": "#c8c8c8"}
_DRAWN = tuple(role for role in layout.ROLES if role != "wait")


def plot(path: str | Path, records: np.ndarray[Any, Any], clocks: Mapping[int, Clock]) -> None:
    """Draw the phases of the ranks' blocks over time. A mark shows when the wait for a peer ended.

    `clocks` are the clocks of the ranks. The suffix of `path` selects the format. Raises Unsupported without
    matplotlib, and ArgumentError for an unknown suffix or without records, before anything is written.
    """
    check_image("path", path)
    figure = figure_class()
    if not records.size:
        raise ArgumentError("records", "empty", "the records of at least one launch")
    rows = _rows(records)
    image = figure(figsize=(12, 1.5 + 0.22 * len(rows)), layout="constrained")
    axes = image.subplots()
    colors = _colors()
    for role in _DRAWN:
        chosen = records[records["role"] == role]
        for number, (rank, block) in enumerate(rows):
            of_row = chosen[(chosen["rank"] == rank) & (chosen["block"] == block)]
            if of_row.size:
                spans = np.stack([of_row["start_ns"], of_row["end_ns"] - of_row["start_ns"]], axis=1) / 1000
                axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=colors[role], label=role)
    seen = records[(records["role"] == "wait") & (records["peer"] != records["rank"])]
    places = [
        (time / 1000, number)
        for number, (rank, block) in enumerate(rows)
        for time in seen["end_ns"][(seen["rank"] == rank) & (seen["block"] == block)]
    ]
    if places:
        axes.plot(*zip(*places, strict=True), "k|", markersize=6, label="peer seen")
    axes.set_yticks(range(len(rows)), [f"rank {rank} block {block}" for rank, block in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for number in range(1, len(rows)):
        if rows[number][0] != rows[number - 1][0]:
            axes.axhline(number - 0.5, color="black", linewidth=0.6)
    axes.set_xlabel(f"us since the first block began{_accuracy(clocks)}")
    axes.set_title(_title(records, rows), fontsize=9)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    image.savefig(path, dpi=120)


def _rows(records: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """(rank, block) of each row."""
    whole = records[records["role"] == BLOCK]
    found = []
    for rank in np.unique(whole["rank"]).tolist():
        blocks = np.unique(whole["block"][whole["rank"] == rank])
        chosen = np.unique(np.linspace(0, len(blocks) - 1, min(len(blocks), MOST_BLOCKS)).round().astype(int))
        found += [(rank, int(block)) for block in blocks[chosen]]
    return found


def _title(records: np.ndarray[Any, Any], rows: list[tuple[int, int]]) -> str:
    names = ", ".join(dict.fromkeys(records["kernel"].tolist()))
    blocks = len(np.unique(records[["rank", "block"]]))
    return names if len(rows) == blocks else f"{names} ({len(rows)} of {blocks} blocks)"


def _accuracy(clocks: Mapping[int, Clock]) -> str:
    """The end of the plot's title, which tells how exactly the ranks are placed on the time axis."""
    if all(clock == VIRTUAL for clock in clocks.values()):
        return ", by a virtual clock: it shows the order of events, not their speed"
    worst = max(clock.error_ns for clock in clocks.values())
    if math.isinf(worst):
        return "; the ranks' clocks were not compared"
    return f"; ranks aligned to +- {worst:.0f} ns" if len(clocks) > 1 else ""


def _colors() -> dict[str, Any]:
    """Role -> its colour: grey for waiting, other colours for work."""
    from matplotlib import colormaps

    work = [role for role in _DRAWN if role not in _IDLE]
    return {**_IDLE, **{role: colormaps["tab20"](number) for number, role in enumerate(work)}}


def check_image(argument: str, path: str | Path) -> None:
    """Raise ArgumentError if matplotlib does not know the suffix of `path`, and Unsupported without matplotlib."""
    figure_class()
    from matplotlib.backend_bases import FigureCanvasBase

    if Path(path).suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ArgumentError(argument, shown(str(path)), "a file name that ends in .png, .svg or another image format")


def figure_class() -> Any:
    """matplotlib's Figure; raises Unsupported without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise Unsupported("an image needs matplotlib: pip install 'drvfuse[plot]'") from None
    return Figure
