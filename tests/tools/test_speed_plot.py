# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/performance.md show the figures of their tables, in colours that are readable on any page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import performance_tables, speed_plot

DARKEST, LIGHTEST = "#0d1117", "#ffffff"


def luminance(colour: str) -> float:
    """The relative luminance of an sRGB colour, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_pictures_show_their_tables() -> None:
    assert not speed_plot.outdated(), "draw them again by python -m tools.speed_plot"


def test_a_changed_figure_makes_a_picture_outdated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "performance.md"
    page.write_text(performance_tables.PAGE.read_text().replace("| 128x4096 | 36.4 |", "| 128x4096 | 36.5 |"))
    monkeypatch.setattr(performance_tables, "PAGE", page)
    assert speed_plot.outdated() == ["nodes"]


def test_every_picture_stands_on_its_page() -> None:
    on_page = re.findall(r"!\[[^]]+\]\(images/(\w+)\.svg\)", performance_tables.PAGE.read_text())
    assert sorted(on_page) == sorted(set(speed_plot.PICTURES) - {"speed"})
    assert "(docs/images/speed.svg)" in (speed_plot.ROOT / "README.md").read_text()
    assert {path.stem for path in speed_plot.IMAGES.iterdir()} == set(speed_plot.PICTURES)


@pytest.mark.parametrize("colour", [speed_plot.GREY, *speed_plot.COLOURS])
def test_colours_are_seen_on_light_and_dark_pages(colour: str) -> None:
    assert contrast(colour, LIGHTEST) >= 3 and contrast(colour, DARKEST) >= 3


def test_a_picture_is_drawn_without_a_background_or_a_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(speed_plot, "IMAGES", tmp_path)
    speed_plot.draw("nodes")
    first = (tmp_path / "nodes.svg").read_text()
    speed_plot.draw("nodes")
    assert (tmp_path / "nodes.svg").read_text() == first
    assert "dc:date" not in first and "#ffffff" not in first and "nodes" not in speed_plot.outdated()


@pytest.mark.parametrize(
    ("cell", "first", "in_brackets"),
    [("15.56 (25.63)", 15.56, 25.63), ("2.13", 2.13, None), ("", None, None), ("11.3 (3.63) *", 11.3, 3.63)],
)
def test_the_number_and_the_number_in_brackets_of_a_table_cell_are_read(
    cell: str, first: float | None, in_brackets: float | None
) -> None:
    assert (performance_tables.number(cell), performance_tables.number(cell, True)) == (first, in_brackets)


def test_columns_of_the_same_name_are_numbered() -> None:
    (row, *_) = performance_tables.table("FP8 RMSNorm", "forward us")
    assert (row["COAT"], row["COAT (2)"]) == ("6.1", "6.6")
