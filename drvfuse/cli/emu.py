# SPDX-License-Identifier: Apache-2.0
"""`drvfuse emu`: run a program on emulated GPUs, or serve them to other processes."""

from __future__ import annotations

import argparse
import os
import signal
import threading

from .. import config, emu
from ..errors import ArgumentError, shown
from .options import program_of


def run_emu(arguments: argparse.Namespace) -> int:
    """Execute `drvfuse emu serve` or `drvfuse emu run`. Returns the exit status."""
    return _serve(arguments) if arguments.emu_command == "serve" else _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Run a program on the default machine. The options become settings of that machine, also in processes that the
    program starts."""
    behind = arguments.program[0] if arguments.race and arguments.program else ""
    if behind in ("strict", "hardware") and not os.path.exists(behind):
        must = f"a Python script that exists; to choose the detector's profile, write --race={behind}"
        raise ArgumentError("the program", shown(behind), must)
    program = program_of(arguments)
    for name in ("devices", "arch", "seed", "race", "delay_stores"):
        value = getattr(arguments, name)
        if value not in (None, False):
            if config.get("emu_machine"):
                option = f"--{name.replace('_', '-')}"
                raise ArgumentError(option, "given", "left out, as DRVFUSE_EMU_MACHINE names a running machine")
            os.environ[f"DRVFUSE_EMU_{name.upper()}"] = str(int(value)) if value is True else str(value)
    return emu.program.run(program, module=bool(arguments.module), report=arguments.report, share=arguments.share)


def _serve(arguments: argparse.Namespace) -> int:
    """Serve a machine until SIGINT or SIGTERM. The last word of the first line is its address. Findings are printed at
    the end; the status is 1 if there are any, else 0.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        machine = emu.Machine(
            arguments.devices,
            arguments.arch,
            arguments.seed,
            arguments.race,
            delay_stores=arguments.delay_stores,
            record=arguments.record,
            replay=arguments.replay,
            served=True,
        )
        with machine, emu.Server(machine, arguments.address) as server:
            print(f"{machine!r} is served at {server.address}", flush=True)
            stop.wait()
    # The error names an argument of Machine or Server. The option has the same name; name it instead.
    except ArgumentError as error:
        raise ArgumentError(f"--{error.argument}", error.got, error.expected) from None
    for report in machine.reports:
        print(f"{report}\n", flush=True)
    return 1 if machine.reports else 0
