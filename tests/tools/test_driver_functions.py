# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/emulated-driver.md are those of the code."""

from __future__ import annotations

from tools import driver_functions as made


def test_the_page_has_the_current_tables() -> None:
    page = made.PAGE.read_text()
    assert made.page_with_tables(page) == page, "run python -m tools.driver_functions"
