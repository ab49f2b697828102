# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md as data."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
Row = dict[str, str]


def number(cell: str, in_brackets: bool = False) -> float | None:
    """The first number of a cell such as "15.56 (25.63)", or the one in brackets; None where there is none."""
    found = re.search(r"\(([\d.]+)\)" if in_brackets else r"^([\d.]+)", cell)
    return float(found.group(1)) if found else None


def table(section: str, where: str) -> list[Row]:
    """The first table with a column `where` in a section: for each row, a dict from column names to cells.

    An empty first cell gets the value of the cell above it. The second of two columns NAME is called "NAME (2)".
    """
    text = PAGE.read_text().partition(f"# {section}\n")[2]
    text = re.split(r"^##? ", text, maxsplit=1, flags=re.MULTILINE)[0]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rest = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        if where in head:
            head = [name if name not in head[:i] else f"{name} (2)" for i, name in enumerate(head)]
            rows = [dict(zip(head, cells, strict=True)) for cells in rest]
            for above, row in zip(rows, rows[1:], strict=False):
                row[head[0]] = row[head[0]] or above[head[0]]
            return rows
    raise LookupError(f"{PAGE.name} has no table with the column {where!r} in the section {section!r}")


def shape_of(text: str) -> tuple[int, int]:
    """The rows and columns of a cell that begins with a shape such as "2048x8192"."""
    rows, columns = re.match(r"(\d+)x(\d+)", text).groups()  # type: ignore[union-attr]
    return int(rows), int(columns)
