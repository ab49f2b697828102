# SPDX-License-Identifier: Apache-2.0
"""`drvfuse emu`: emulated GPUs by themselves."""

from __future__ import annotations

import argparse
import signal
import threading

from .. import emu


def run_emu(arguments: argparse.Namespace) -> int:
    """Serve a machine until SIGINT or SIGTERM; the last word of the first line is its address. What was found is
    printed at the end, and the status is 1 then, else 0.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
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
    for report in machine.reports:
        print(f"{report}\n", flush=True)
    return 1 if machine.reports else 0
