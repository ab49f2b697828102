# SPDX-License-Identifier: Apache-2.0
"""The table of docs/settings.md: every setting of `drvfuse.config`.

    python -m tools.settings_table

writes it into the page; a test compares the page with it.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from drvfuse.config import SETTINGS, Setting

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
START, END = "<!-- table: python -m tools.settings_table -->", "<!-- end of the table -->"


def _default(setting: Setting) -> str:
    if callable(setting.default):
        return inspect.getdoc(setting.default) or ""
    value = int(setting.default) if isinstance(setting.default, bool) else setting.default
    if value and isinstance(value, int) and value % (1 << 30) == 0:
        return f"`{value >> 30} GiB`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else ""


def table() -> str:
    lines = [START, "", "| variable | default | values | meaning |", "|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        cells = f"`DRVFUSE_{name.upper()}`", _default(setting), setting.expected, setting.doc
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((*lines, "", END))


def page_with_table(page: str) -> str:
    """The text of the page, with the current table in place of the one that it has."""
    before, _, rest = page.partition(START)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
