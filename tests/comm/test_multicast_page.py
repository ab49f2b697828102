# SPDX-License-Identifier: Apache-2.0
"""The example of docs/multicast.md is correct under many schedules, and needs each part of its memory order.

`tests/test_readme.py` runs the page as it is written.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.errors import DriverError

pytestmark = pytest.mark.emulated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "multicast.md"
EXAMPLE, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(seed: int, old: str = "", new: str = "") -> list[df.emu.Report]:
    """Run the page's example with `old` replaced by `new`, on a machine with seed `seed`. Returns its reports."""
    assert old in EXAMPLE
    found: dict[str, df.emu.Machine] = {}
    code = EXAMPLE.replace(old, new).replace("race=True", f"race=True, seed={seed}")
    with contextlib.suppress(DriverError):  # errors that a faulty example may raise
        exec(compile(code, PAGE.name, "exec"), found)
    with found["machine"] as machine:
        return list(machine.reports)


def test_the_example_of_the_page_is_clean_under_many_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        assert run(seed) == []
        assert capsys.readouterr().out == "[True, True, True, True] []\n"


@pytest.mark.parametrize(
    "old,new,why",
    [
        ('asm volatile("fence.proxy.alias;" ::: "memory");', "", "no fence.proxy.alias is between them"),
        ("red.release.sys", "red.relaxed.sys", ""),
        ("ld.acquire.sys", "ld.relaxed.sys", ""),
        ("seen < ranks", "seen < 1", ""),
    ],
    ids=["fence", "release", "acquire", "barrier"],
)
def test_leaving_out_any_part_of_its_memory_order_is_reported(old: str, new: str, why: str) -> None:
    reports = [report for seed in range(20) for report in run(seed, old, new)]
    assert reports and {report.kind for report in reports} <= {"race", "uninitialised"}
    assert all(why in report.message for report in reports)
