# SPDX-License-Identifier: Apache-2.0
"""The README's chart, from the tables of docs/performance.md: `python -m tools.speed_plot` (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "speed_2_h200.png"
CHARTS = {
    "All-reduce on 2 GPUs": ("all-reduce, 2 x H200, bfloat16", {}),
    "All-reduce + RMSNorm + FP8 on 2 GPUs": (
        "residual add + all-reduce + RMSNorm + FP8",
        {"residual": "yes", "columns": "8192"},
    ),
}
"""Heading of a section -> the chart's title, and which rows of the table it shows."""
LINES = {
    "auto": ("drvfuse", "#1f6fb4", "-", 2.5),
    "NCCL": ("NCCL", "#b4501f", "--", 1.2),
    "torch one-shot": ("torch symmetric memory, one-shot", "#8a8a8a", "--", 1.2),
    "torch two-shot": ("torch symmetric memory, two-shot", "#b9a51e", "--", 1.2),
    "stored": ("fastest other peer, measured once", "black", ":", 1.2),
    "wire": ("the bytes alone, at link speed", "#3c8c3c", "-.", 1.2),
}
"""Column -> label, colour, style and width of its line."""


def rows(heading: str) -> list[dict[str, str]]:
    """The first table of a section, a dict of the columns for each row."""
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    found = [dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]]
    for row in found:
        row["rows"], row["columns"] = row["rows x cols"].split("x")
    return found


def points(heading: str, column: str, shown: dict[str, str]) -> list[tuple[float, float]]:
    """(KiB per rank, microseconds) of a column, in the order of sizes; of several shapes of one size the first."""
    times: dict[float, float] = {}
    for row in rows(heading):
        if all(row[key] == value for key, value in shown.items()):
            times.setdefault(int(row["rows"]) * int(row["columns"]) * 2 / 1024, float(row[column]))
    return sorted(times.items())


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, charts = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axes, (heading, (title, shown)) in zip(charts, CHARTS.items(), strict=True):
        for column, (label, colour, style, width) in LINES.items():
            sizes, times = zip(*points(heading, column, shown), strict=True)
            axes.plot(sizes, times, label=label, color=colour, linestyle=style, linewidth=width)
        axes.set(xscale="log", yscale="log", ylim=(1, 250), title=title, xlabel="KiB per rank")
        ticks = [size for size in (8, 32, 128, 512, 2048, 8192, 32768) if size >= min(sizes)]
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        axes.grid(alpha=0.3)
    charts[0].set_ylabel("microseconds per call")
    charts[0].legend(fontsize=8, frameon=False)
    figure.savefig(IMAGE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    plot()
