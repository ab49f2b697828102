# SPDX-License-Identifier: Apache-2.0
"""Checks of options that several commands have, made before a command starts its work."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import ArgumentError, shown

_FILES = ("out", "plot", "png", "record", "report")


def check_files(arguments: argparse.Namespace) -> None:
    """Raise ArgumentError if an option names a file that cannot be written. Writes nothing."""
    for option in _FILES:
        path = getattr(arguments, option, None)
        if path is not None:
            _check_file(f"--{option}", path)


def program_of(arguments: argparse.Namespace) -> list[str]:
    """The script or module that a command is to run, and its arguments. Raises ArgumentError if there is none."""
    if arguments.module:
        if arguments.program:
            raise ArgumentError("-m", "given together with a script", "the last option, before the module's arguments")
        return list(arguments.module)
    program: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ArgumentError("the program", "missing", "a Python script, or -m and a module, and its arguments")
    if not os.path.exists(program[0]):
        raise ArgumentError("the program", shown(program[0]), "a Python script that exists, or -m and a module")
    if os.path.isdir(program[0]) and not os.path.exists(os.path.join(program[0], "__main__.py")):
        must = "a Python script, or a folder that has a file __main__.py"
        raise ArgumentError("the program", f"{program[0]!r}, a folder", must)
    return program


def _check_file(option: str, path: str) -> None:
    file = Path(path)
    if file.is_dir():
        raise ArgumentError(option, f"{path!r}, a folder", "the path of a file")
    if not file.parent.is_dir():
        raise ArgumentError(option, shown(path), f"in a folder that exists; there is no folder {str(file.parent)!r}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ArgumentError(option, shown(path), "the path of a file that can be written")
