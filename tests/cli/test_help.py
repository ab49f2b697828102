# SPDX-License-Identifier: Apache-2.0
"""`drvfuse --help` lists every command once, in a group, with what it does."""

from __future__ import annotations

import argparse

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
