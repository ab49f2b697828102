# SPDX-License-Identifier: Apache-2.0
"""`drvfuse run`: N processes of one program on this host, one rank each."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Sequence

from .. import config
from ..bootstrap.supervisor import Supervisor
from ..errors import ArgumentError
from ..plans.limits import MAX_RANKS
from .options import program_of

_MORE_THAN_SPIN = 5.0
_MACHINE_SECONDS = 120.0  # time limit for the start of a machine, which may compile its native runtime


def run_run(arguments: argparse.Namespace) -> int:
    """Run the ranks. Returns 0 if all ranks have succeeded, else the exit status of the first that failed."""
    program = program_of(arguments)
    driver = arguments.driver or config.get("driver")
    if driver == "emu" and arguments.n > MAX_RANKS and not config.get("emu_machine"):
        raise ArgumentError("-n", arguments.n, f"from 1 to {MAX_RANKS}, the number of emulated devices")
    command = ["-m", *program] if arguments.module else program
    return run_ranks(command, arguments.n, driver)


def run_ranks(program: Sequence[str], size: int, driver: str) -> int:
    """Run `python PROGRAM` once for each of `size` ranks, with the environment variables that `Group.connect` reads.

    With the emulated driver all ranks use one machine of `size` devices in another process: the machine of
    DRVFUSE_EMU_MACHINE, or one that this function starts, and that ends with the ranks.
    """
    grace = config.get("spin_timeout") + _MORE_THAN_SPIN
    environment = _environment(size, driver)
    with Supervisor(grace, lambda text: print(f"drvfuse run: {text}", file=sys.stderr, flush=True)) as supervisor:
        if driver == "emu" and not environment.get("DRVFUSE_EMU_MACHINE"):
            serve = [sys.executable, "-m", "drvfuse", "emu", "serve", "--devices", str(size)]
            machine = supervisor.start("the emulated machine", "[emu] ", serve, environment, service=True)
            environment["DRVFUSE_EMU_MACHINE"] = supervisor.first_line(machine, _MACHINE_SECONDS).split()[-1]
        for rank in range(size):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            supervisor.start(f"rank {rank}", f"[{rank}] ", [sys.executable, *program], own)
        return supervisor.wait()


def _environment(size: int, driver: str) -> dict[str, str]:
    """The environment of all ranks. It lacks the variables of a launcher that may have started this process."""
    others = ("TORCHELASTIC_", "OMPI_COMM_", "PMI_", "PMIX_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    with socket.socket() as probe:  # a free port: torch may listen there, and its number tells jobs apart
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return environment | {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DRVFUSE_SECRET": secrets.token_hex(16),
        "DRVFUSE_DRIVER": driver,
        "PYTHONUNBUFFERED": "1",
    }
