# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/emulated-driver.md: every function of the driver, emulated or refused.

    python -m tools.driver_functions

writes them into the page. They follow from the table of prototypes and from the list of refused functions, whatever
bindings are installed; a test compares the page with them.
"""

from __future__ import annotations

import re
from pathlib import Path

from drvfuse.emu.driver.refused import BY_REASON, REFUSED
from drvfuse.emu.wire.signatures import ALL
from drvfuse.emu.wire.table import TABLE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "emulated-driver.md"
START, END = "<!-- tables: python -m tools.driver_functions -->", "<!-- end of the tables -->"


def _subjects() -> dict[str, list[str]]:
    """The names of the emulated functions by subject, in the order of the table of prototypes."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in TABLE.splitlines():
        if line.startswith("// "):
            names = found.setdefault(line.removeprefix("// "), [])
        elif match := re.match(r"(?:\d+: )?(cu\w+)\(", line):
            names.append(match[1])
    return found


def _marked(name: str) -> str:
    """A name, with the major version of cuda.bindings if only one has it."""
    majors = {major for signature in ALL if signature.name == name for major in signature.majors}
    return f"`{name}`" if len(majors) == 2 else f"`{name}` ({majors.pop()})"


def tables() -> str:
    subjects = _subjects()
    emulated = {name for names in subjects.values() for name in names}
    lines = [START, "", f"Emulated ({len(emulated)}):", "", "| subject | functions |", "|---|---|"]
    for subject, names in subjects.items():
        lines.append(f"| {subject.lower()} | {', '.join(_marked(name) for name in dict.fromkeys(names))} |")
    lines += ["", f"Refused ({len(REFUSED)}):", "", "| why | functions |", "|---|---|"]
    for reason, text in BY_REASON.items():
        lines.append(f"| {reason} | {', '.join(f'`{name}`' for name in text.split())} |")
    return "\n".join((*lines, "", END))


def page_with_tables(page: str) -> str:
    """The text of the page, with current tables in place of those that it has."""
    before, _, rest = page.partition(START)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
