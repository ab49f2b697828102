# SPDX-License-Identifier: Apache-2.0
"""`drvfuse --help` lists every command once, in a group, with what it does."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drvfuse import __main__ as program


def test_help_lists_every_command_once() -> None:
    parser = program._parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    lines = parser.format_help().splitlines()
    for name, command in commands.choices.items():
        assert command.description and command.prog == f"drvfuse {name}"
        assert lines.count(f"  {name:8}{command.description}") == 1
    assert {name for names in program._GROUPS.values() for name in names} == set(commands.choices)


def test_an_unknown_command_is_refused_with_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["benchmark"])
    error = capsys.readouterr().err
    assert error.startswith("usage: drvfuse [--help] [--version] COMMAND ...\n") and "tune" in error


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("drvfuse be", ["bench"]),
        ("drvfuse bench fp8-", ["fp8-rmsnorm", "fp8-siblings"]),
        ("drvfuse demo --driver ", ["cuda", "emu"]),
        ("drvfuse tune --r", ["--remove"]),
    ],
)
def test_a_shell_is_told_what_may_follow(line: str, offered: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_IFS": "\n", "COMP_TYPE": "9"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([sys.executable, "-m", "drvfuse"], env=os.environ | asked, check=True, capture_output=True)
    assert [word.strip() for word in answer.read_text().splitlines()] == offered
