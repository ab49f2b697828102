# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/performance.md and of the README, from the tables of that page: `python -m tools.speed_plot`.

A picture holds the digest of what it shows, so that `outdated` finds those that no longer match their tables. Pictures
are transparent, in colours that are readable on light and dark pages. Drawing needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .performance_tables import Row, number, shape_of, table

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
GREY = "#7a7a7a"
COLOURS = ("#2f7fd0", "#c8602a", "#3a9a4a", "#9467c8", "#b08a1e", "#d0568a", "#2a9aa0", "#8a6d5a", "#6f8a2a")
Points = list[tuple[float, float]]


def kib_of_shape(row: Row) -> float:
    """KiB of a bfloat16 array whose shape is the first cell of the row."""
    rows, columns = shape_of(next(iter(row.values())))
    return rows * columns * 2 / 1024


def kib(row: Row) -> float:
    return float(next(value for key, value in row.items() if key.startswith("KiB")).replace(",", ""))


@dataclass(frozen=True)
class Panel:
    """One diagram of a table: a line for each column in `lines`, with the values of the rows over their `size`. The
    table is the first of `section` that has the column `where`.
    """

    title: str
    section: str
    lines: dict[str, str]
    """Column -> label; a column that ends in "()" means the number in brackets in that column."""
    where: str
    size: Callable[[Row], float] = kib_of_shape
    only: Row = field(default_factory=dict)
    """Cells that a row must have to be shown."""
    unit: str = "KiB per rank"

    def points(self, column: str) -> Points:
        """The pairs (size, value) of a column in the order of sizes. Of several rows of one size, the first counts."""
        found: dict[float, float] = {}
        for row in table(self.section, self.where):
            if all(row[key] == value for key, value in self.only.items()):
                value = number(row[column.removesuffix("()")], column.endswith("()"))
                if value:
                    found.setdefault(self.size(row), value)
        return sorted(found.items())


@dataclass(frozen=True)
class Forms(Panel):
    """One diagram with a line for each row of a table, whose columns are shapes. The numbers in brackets are drawn."""

    def points(self, column: str) -> Points:
        (row,) = [row for row in table(self.section, self.where) if row["form"] == column]
        cells = {name: number(cell, True) for name, cell in row.items() if name != "form" and not cell.endswith("*")}
        return [(kib_of_shape({"": name}), value) for name, value in cells.items() if value]


ALGORITHMS = {name: name for name in ("one_stage", "two_stage", "push_one_shot", "push_two_shot")}
PEERS = {
    "NCCL": "NCCL",
    "torch one-shot": "torch symmetric memory, one-shot",
    "torch two-shot": "torch symmetric memory, two-shot",
    "stored": "fastest other peer, measured once",
}
WIRE = {"wire": "the bytes alone, at link speed"}
READING = {"read": "reading the weights alone"}
BOUNDS = {*WIRE.values(), *READING.values()}
"""Labels of lines that no kernel can fall below."""
ALLREDUCE, FUSED = "All-reduce on 2 GPUs", "All-reduce + RMSNorm + FP8 on 2 GPUs"
SCATTER, MOVES = "Reduce-scatter and many tensors on 2 GPUs", "All-gather, broadcast, all-to-all"
FP8, QUANTISED = "FP8 RMSNorm", "RMSNorm with quantisation on one device"
NCCL = {"auto": "auto", "NCCL": "NCCL", "NCCL windows": "NCCL, symmetric windows", **WIRE}
MOVED = {"push": "push", "put": "put", "pull": "pull", "NCCL": "NCCL's best form", **WIRE}
FORMS = (
    "per group of 128",
    "MXFP8, scales in tiles",
    "NVFP4, scales in tiles",
    "LayerNorm",
    "per row, and normed outputs",
)

PICTURES: dict[str, tuple[Panel, ...]] = {
    "speed": (
        Panel("All-reduce, 2 x H200, bfloat16", ALLREDUCE, {"auto": "drvfuse", **PEERS, **WIRE}, "auto"),
        Panel(
            "Residual add + all-reduce + RMSNorm + FP8",
            FUSED,
            {"auto": "drvfuse", **PEERS, **WIRE},
            "auto",
            only={"residual": "yes"},
        ),
    ),
    "allreduce": (
        Panel("All-reduce: algorithms", ALLREDUCE, {"auto": "auto", **ALGORITHMS, **WIRE}, "auto"),
        Panel("All-reduce: peers", ALLREDUCE, {"auto": "auto", "NCCL windows": NCCL["NCCL windows"], **PEERS}, "auto"),
    ),
    "fused": tuple(
        Panel(
            f"All-reduce + RMSNorm + FP8, {words}",
            FUSED,
            {"auto": "auto", "one_stage": "one_stage", "two_stage": "two_stage", **PEERS, "norm alone": "norm alone"},
            "auto",
            only={"residual": residual},
        )
        for residual, words in (("no", "no residual"), ("yes", "with residual"))
    ),
    "fused_forms": (
        Forms("Fused forms beside the plain one", "Forms", {name: name for name in FORMS}, "form", unit="KiB per rank"),
    ),
    "reduce_scatter": (
        Panel("Reduce-scatter", SCATTER, {"auto": "auto", "push": "push", "pull": "pull", **NCCL}, "push", kib),
        Panel("All-reduce of 16 tensors in one call", SCATTER, NCCL, "KiB, 16 tensors", kib, unit="KiB per tensor"),
    ),
    "moves": tuple(
        Panel(op, MOVES, MOVED, "op", kib, {"op": op}, "KiB of an output")
        for op in ("all-gather", "all-to-all", "broadcast")
    ),
    "gemv": (
        Panel(
            "GEMV of one token with partial RMSNorm",
            "GEMV with partial RMSNorm",
            {
                "normed": "drvfuse",
                "EARLY": "drvfuse, in a chain with PDL",
                "cuBLAS + norm": "cuBLAS + norm",
                "Inductor": "torch.compile",
                **READING,
            },
            "N x K (normed)",
            unit="KiB of weights",
        ),
    ),
    "fp8_rmsnorm": (
        Panel(
            "FP8 RMSNorm, forward",
            FP8,
            {"forward us": "drvfuse", "COAT": "COAT", "torch": "torch.compile"},
            "forward us",
            unit="KiB of input",
        ),
        Panel(
            "FP8 RMSNorm, backward",
            FP8,
            {"backward us": "drvfuse", "COAT (2)": "COAT", "torch (2)": "torch.compile"},
            "backward us",
            unit="KiB of input",
        ),
    ),
    "rmsnorm_fp8": tuple(
        Panel(
            f"RMSNorm with quantisation, {form}",
            QUANTISED,
            {form: "drvfuse", f"{form}()": "torch.compile"},
            "MXFP8",
            unit="KiB of input",
        )
        for form in ("per row", "per group of 128")
    ),
    "nodes": (
        Panel(
            "All-reduce of 2 nodes by NCCL",
            "A process for each GPU",
            {"call": "call", "node_sums": "node_sums", "exchange": "exchange", "kernel after it": "kernel after it"},
            "node_sums",
        ),
    ),
}
"""Name of a picture -> its diagrams. All but "speed", which is the README's, are in docs/performance.md."""


def curves(panel: Panel) -> list[tuple[str, Points]]:
    """The label and the points of each line. LookupError for a line without points."""
    found = [(label, panel.points(column)) for column, label in panel.lines.items()]
    for label, points in found:
        if not points:
            raise LookupError(f"{panel.title!r} has no figures of {label!r}")
    return found


def digest(name: str) -> str:
    """A digest of all that a picture shows."""
    shown = [(panel.title, panel.unit, curves(panel)) for panel in PICTURES[name]]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def path_of(name: str) -> Path:
    return IMAGES / f"{name}.svg"


def outdated() -> list[str]:
    """The pictures that are missing, or whose figures differ from those of their tables."""
    return [
        name for name in PICTURES if not path_of(name).is_file() or f">{digest(name)}<" not in path_of(name).read_text()
    ]


def draw(name: str) -> None:
    """Draw a picture of docs/images/."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = PICTURES[name]
    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": GREY, "axes.labelcolor": GREY}
    style |= {"axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.titlecolor": GREY}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            _draw_panel(axes, panel)
        figure.axes[0].set_ylabel(
            "time / time of the plain form" if isinstance(panels[0], Forms) else "microseconds per call"
        )
        figure.savefig(
            path_of(name), transparent=True, metadata={"Date": None, "Creator": None, "Description": digest(name)}
        )


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    lines = curves(panel)
    sizes = sorted({x for _, points in lines for x, _ in points})
    ratios = isinstance(panel, Forms)
    for (label, points), colour in zip(lines, COLOURS, strict=False):
        main, bound = colour == COLOURS[0] and not ratios, label in BOUNDS
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            color=GREY if bound else colour,
            linestyle=":" if bound else "-" if main or ratios else "--",
            linewidth=2.4 if main else 1.3,
            marker="o" if len(sizes) <= 6 else None,
            markersize=3,
        )
    axes.set(xscale="log", title=panel.title, xlabel=panel.unit)
    axes.set_xticks(ticks(sizes[0], sizes[-1]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if not ratios:
        axes.set_yscale("log")
        shown = [y for label, points in lines if label not in BOUNDS for _, y in points]
        axes.set_ylim(min(shown) / 1.5, max(shown) * 1.5)  # the bounds may lie outside of the picture
        axes.set_yticks([y for y in (1, 3, 10, 30, 100, 300, 1000) if min(shown) / 1.5 <= y <= max(shown) * 1.5])
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.patch.set_alpha(0)
    axes.grid(alpha=0.25, color=GREY)
    axes.legend(fontsize=7.5, frameon=False)


def ticks(low: float, high: float) -> list[float]:
    """Powers of 4 or 16 from `low` to `high`, at most six."""
    step = 4 if high / low <= 4**6 else 16
    found, at = [], 1.0 if low < 1 else float(2 ** round(math.log2(low)))
    while at <= high * 1.01:
        found.append(at)
        at *= step
    return found


if __name__ == "__main__":
    for name in PICTURES:
        draw(name)
