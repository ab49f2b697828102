# SPDX-License-Identifier: Apache-2.0
"""The program of docs/emulated-programs.md, and what the commands there print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "emulated-programs.md").read_text()
PROGRAM = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
COMMANDS = re.findall(r"```sh\ndrvfuse (emu run .*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def plain(text, folder):
    """Output without addresses and the folder, which differ between runs."""
    return re.sub(r"0x[0-9a-f]{5,}", "0x...", text.replace(str(folder), "/home/me")).strip()


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(tmp_path, command, shown):
    (tmp_path / "histogram.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "drvfuse", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert plain(done.stdout, tmp_path) == plain(shown, tmp_path)
    assert done.returncode == ("finding" in shown)


def test_the_page_has_every_key_of_the_report(tmp_path, capsys, monkeypatch):
    from drvfuse.emu.findings.reports import Report
    from drvfuse.emu.program import found

    section = PAGE[PAGE.index("## The JSON report") : PAGE.index("## Public suites")]
    named = set(re.findall(r"`(\w+)`", section))
    assert set(json.loads(json.dumps(found.as_json(Report("trap", "words"), 1)))) <= named
