# SPDX-License-Identifier: Apache-2.0
"""`drvfuse --help` lists every command once, in a group, with what it does."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drvfuse import __main__ as program
from drvfuse.cli.commands import GROUPS, command_line


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The commands of a parser and their subcommands, each with its help text in the list of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            phrases = {listed.dest: listed.help or "" for listed in action._choices_actions}
            for name, command in action.choices.items():
                yield command, phrases[name]
                yield from commands_of(command)


def test_help_lists_every_command_once() -> None:
    parser = command_line()
    lines = parser.format_help().splitlines()
    commands = {command.prog.split(" ", 1)[1]: phrase for command, phrase in commands_of(parser)}
    own = {name: phrase for name, phrase in commands.items() if " " not in name}
    assert all(lines.count(f"  {name:8}{phrase}") == 1 for name, phrase in own.items())
    assert {name for names in GROUPS.values() for name in names} == set(own)


def test_help_of_a_command_begins_with_a_sentence_that_says_what_it_does() -> None:
    for command, phrase in commands_of(command_line()):
        first, *_ = (command.description or "").split(". ")
        assert first.rstrip(".") == phrase[0].upper() + phrase[1:] and (command.description or "").endswith(".")
        if command.prog.startswith("drvfuse bench "):
            assert phrase.startswith("time ") and " against " in phrase, command.prog


def test_an_unknown_command_is_refused_with_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["benchmark"])
    error = capsys.readouterr().err
    assert error.startswith("usage: drvfuse [--help] [--version] COMMAND ...\n") and "tune" in error


def test_a_shell_gets_the_completions_of_a_line(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line, answer = "drvfuse bench fp8-", tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_IFS": "\n", "COMP_TYPE": "9"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([sys.executable, "-m", "drvfuse"], env=os.environ | asked, check=True, capture_output=True)
    assert [word.strip() for word in answer.read_text().splitlines()] == ["fp8-rmsnorm", "fp8-siblings"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("drvfuse be", {"bench"}),
        ("drvfuse demo --driver ", {"cuda", "emu"}),
        ("drvfuse tune --r", {"--remove"}),
        ("drvfuse check --only grids", {"grids-differ"}),
        ("drvfuse trace broadcast --algo p", {"pull", "push", "put"}),
        ("drvfuse trace rmsnorm-fp8 --algo ", {"auto"}),
        ("drvfuse bench allreduce --algos auto push_t", {"push_two_shot"}),
        ("drvfuse bench allreduce --multimem --algos m", {"multimem_one_stage", "multimem_two_stage"}),
        ("drvfuse bench reduce-scatter --algos ", {"auto", "pull", "push"}),
        ("drvfuse bench processes --op reduce", {"reduce-scatter", "reduce-scatter-rmsnorm-fp8"}),
        ("drvfuse bench fused-forms --op a", {"allreduce-rmsnorm-fp8", "all-gather"}),
        ("drvfuse bench fused-forms --form mxfp8-t", {"mxfp8-tiles"}),
    ],
)
def test_a_shell_completes_names_of_commands_options_and_values(line: str, offered: set[str]) -> None:
    argcomplete = pytest.importorskip("argcomplete")
    finder = argcomplete.CompletionFinder(command_line())
    prequote, prefix, _, words, position = argcomplete.split_line(line)
    # A private method is called, because the public ones write to file descriptors of a shell or need readline.
    found = {word.strip() for word in finder._get_completions(words, prefix, prequote, position)}
    assert {word for word in found if not word.startswith("-") or prefix.startswith("-")} == offered
