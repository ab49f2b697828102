# SPDX-License-Identifier: Apache-2.0
"""The command line: `drvfuse` or `python -m drvfuse`.

The exit status is 0 for success, 1 if a check failed, 2 for wrong usage or a missing driver, and 130 if interrupted.
`drvfuse run` exits with the status of the first process that failed. `drvfuse emu run` exits with 1 if there is a
finding, otherwise with the status of the program.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from . import errors
from .cli.commands import command_line
from .cli.options import check_files


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments. Returns the exit status."""
    _open_standard_files()
    parser = command_line()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: this call answers, and ends the process
        importlib.import_module("argcomplete").autocomplete(parser)
    arguments = parser.parse_args(argv)
    try:
        check_files(arguments)
        # only the module of this command is imported
        module = importlib.import_module(f".cli.{arguments.command}", __package__)
        status: int = getattr(module, f"run_{arguments.command}")(arguments)
        return status
    except (errors.DrvfuseError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.stdout = None  # the reader of stdout has gone, and the interpreter would flush stdout at exit
        print(f"{arguments.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{arguments.prog}: interrupted", file=sys.stderr)
        return 130


def _open_standard_files() -> None:
    """Open /dev/null for those of stdin, stdout and stderr that the caller has closed. Otherwise Python has no objects
    for them, and the next file or socket that is opened would get the number of one of them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - for the process


if __name__ == "__main__":
    raise SystemExit(main())
