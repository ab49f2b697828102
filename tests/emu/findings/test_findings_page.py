# SPDX-License-Identifier: Apache-2.0
"""docs/findings.md has a section for each kind of report, with an example that leads to a report of that kind.

`tests/test_readme.py` checks that the examples print what the page shows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from drvfuse.emu.abi import FaultKind
from drvfuse.emu.findings import notices, reports

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / reports.PAGE
WITHOUT_EXAMPLE = {"race_capacity"}  # this example takes gigabytes


def sections() -> dict[str, str]:
    """The text of each section, by the kind that its heading names."""
    parts = re.split(r"^### (.*)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], (re.split(r"^## ", text, flags=re.M)[0] for text in parts[2::2]), strict=True))


def kinds() -> Iterator[str]:
    """All kinds of reports of the emulator: faults, notices, and the kinds that its source passes to Report."""
    yield from (kind.name.lower() for kind in FaultKind if kind is not FaultKind.NONE)
    yield from notices.KINDS.values()
    for path in (ROOT / "drvfuse/emu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Report":
                named = node.args[0] if node.args else None
                if isinstance(named, ast.Constant):
                    yield str(named.value)


def test_each_kind_of_report_has_a_section() -> None:
    assert set(kinds()) <= set(sections())
    assert set(sections()) <= {*kinds(), "deadlock"}  # `standstill` reports deadlocks, but gets the kind as an argument


def test_each_section_shows_a_report_of_its_kind() -> None:
    for kind, text in sections().items():
        shown = re.findall(r"```python\n.*?```\n\n```text\n(.*?)```", text, re.DOTALL)
        found = any(re.search(rf"^{kind}(:| at )", output, re.M) for output in shown)
        assert found != (kind in WITHOUT_EXAMPLE), kind


def test_the_table_lists_each_kind_with_the_error_that_its_example_gets() -> None:
    rows = dict(re.findall(r"^\| \[(\w+)\]\(#\1\) \| .* \| (.*) \|$", PAGE.read_text(), re.M))
    assert list(rows) == list(sections())
    for kind, text in sections().items():
        shown = re.findall(r"```python\n.*?```\n\n```text\n(.*?)```", text, re.DOTALL)
        codes = re.findall(r"^CUDA_ERROR_(\w+)$", "".join(shown), re.M)  # refused calls print <CUresult...>
        assert not codes or rows[kind].split(";")[0] in codes, kind
        assert ("no finding" in rows[kind]) == (kind in reports.NO_FINDINGS), kind
