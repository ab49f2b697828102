# SPDX-License-Identifier: Apache-2.0
"""The options of `drvfuse emu`."""

from __future__ import annotations

import argparse
from typing import Any

from .parsing import at_least, command, natural


def add_emu(commands: Any) -> None:
    """Add `drvfuse emu` with its commands."""
    emu = command(
        commands,
        "emu",
        "run programs that were written for cuda-python on emulated GPUs, or serve such GPUs to processes",
    )
    emulated = emu.add_subparsers(dest="emu_command", metavar="COMMAND", required=True)
    serve = command(
        emulated,
        "serve",
        "hold a machine of emulated GPUs that several processes use",
        "The first line of output names its address, which the processes have in DRVFUSE_EMU_MACHINE. The machine ends "
        "with Ctrl-C or SIGTERM; what was found is printed then, and the status is 1 if there is anything.",
    )
    serve.add_argument("--devices", type=at_least(1, 8), default=8, help="emulated GPUs, up to 8 (default: 8)")
    serve.add_argument("--arch", default="sm_90a", help="their architecture (default: sm_90a)")
    serve.add_argument("--seed", type=natural, default=0, help="seed of the order in which work runs (default: 0)")
    serve.add_argument(
        "--race", nargs="?", choices=("hardware", "strict"), const="hardware", default=False, help="report data races"
    )
    serve.add_argument("--delay-stores", action="store_true", help="show stores late where nothing orders them")
    serve.add_argument("--record", metavar="FILE", default=None, help="write the order of calls to a file")
    serve.add_argument("--replay", metavar="FILE", default=None, help="repeat the order of such a file")
    serve.add_argument(
        "--address", metavar="ADDRESS", default=None, help='"unix:@NAME" or "unix:/PATH" (default: a new name)'
    )
    run = command(
        emulated,
        "run",
        "run a Python program that was written for cuda-python on emulated GPUs, as it is",
        "cuda-python's modules are switched in its process. What is found is printed when it ends, and the status is 1 "
        "then, else the program's own.",
        usage="drvfuse emu run [--race[=strict]] [--devices N] [--seed N] [other options] SCRIPT ... | -m MODULE ...",
        allow_abbrev=False,
    )
    run.add_argument("--devices", type=at_least(1, 8), help="emulated GPUs, up to 8 (default: 8)")
    run.add_argument("--arch", help="their architecture (default: sm_90a)")
    run.add_argument("--seed", type=natural, help="seed of the order in which work runs (default: 0)")
    for option, profile, text in (  # separate options, so that the word after --race is never taken for its value
        ("--race", "hardware", "report data races"),
        ("--race=hardware", "hardware", "the same"),
        ("--race=strict", "strict", "report also what hardware orders beyond the PTX memory model"),
    ):
        run.add_argument(option, dest="race", action="store_const", const=profile, help=text)
    run.add_argument("--delay-stores", action="store_true", help="show stores late where nothing orders them")
    run.add_argument("--share", action="store_true", help="processes that the program starts use its machine")
    run.add_argument("--report", metavar="FILE.json", help="write what was found, and on what machine, as JSON")
    run.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module in place of a script"
    )
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a script and its arguments")
