# SPDX-License-Identifier: Apache-2.0
"""The rank of this process, the size of its job and the job's identity, from arguments or from a launcher's variables.

    launcher                rank                   size                   local rank                   local size
    torchrun, drvfuse run   RANK                   WORLD_SIZE             LOCAL_RANK                   LOCAL_WORLD_SIZE
    Open MPI                OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_RANK   OMPI_COMM_WORLD_LOCAL_SIZE
    PMI (MPICH, Intel MPI)  PMI_RANK               PMI_SIZE               MPI_LOCALRANKID              MPI_LOCALNRANKS
    Slurm                   SLURM_PROCID           SLURM_STEP_NUM_TASKS   SLURM_LOCALID                SLURM_STEP_TASKS_PER_NODE


The first launcher of this table that has set a rank is taken. For example, mpirun inside a Slurm job sets Open MPI's
variables, while Slurm's variables stay those of the job script. PMIx has no variable for the size, so a PMIx launcher
is recognised by the variables of Open MPI or Slurm.
"""  # noqa: E501

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ArgumentError, require_integer, shown
from . import handshake


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets. Those of `job` differ between its jobs, and between restarts of a job."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_size: str
    job: tuple[str, ...]


LAUNCHERS = (
    Launcher(
        "torchrun",
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        # These do not identify a job, since the run id is "none" by default: `find_place` needs MASTER_PORT too.
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("PMI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID", "PMI_PORT")),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process in its job. `local_rank` and `local_size` count the ranks on this host; None if they are not known.

    `job` identifies the job: names and values of the launcher's variables that all of its ranks share, and that no
    other job of this user on these hosts has. It is empty if there are no such variables, for example under MPICH if a
    wrapper has closed the connection to the launcher. `launcher` is the launcher's name, "" if rank and size are
    arguments.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job: tuple[tuple[str, str], ...]
    launcher: str

    @property
    def one_host(self) -> bool | None:
        """Whether all ranks are on this host; None if it is not known."""
        return True if self.size == 1 else None if self.local_size is None else self.local_size == self.size


def find_place(rank: int | None = None, size: int | None = None, environment: Mapping[str, str] | None = None) -> Place:
    """The place of this process. `rank` and `size` replace variables of the launcher; one of them may be given alone.

    Raises ArgumentError, naming the argument or variable, if rank or size is missing or is not a number, if the rank
    is not below the size, or if the variables about this host contradict one another.
    """
    variables = os.environ if environment is None else environment
    given = rank is not None and size is not None
    launcher = next((one for one in LAUNCHERS if one.rank in variables), None)
    if launcher is None and not given:
        if "WORLD_SIZE" in variables:
            launcher = LAUNCHERS[0]
        else:
            names = ", ".join(f"{one.rank} and {one.sizes[0]} ({one.name})" for one in LAUNCHERS)
            missing = "rank" if rank is None else "size"
            raise ArgumentError(missing, "not given", f"given, or set by the launcher of the processes: {names}")
    size_name, rank_name = "size", "rank"
    if size is None and launcher:
        size_name = next((name for name in launcher.sizes if name in variables), launcher.sizes[0])
        size = _number(variables, size_name, "the number of ranks, at least 1", 1)
    size = require_integer(size_name, size, "the number of ranks, at least 1", 1)
    if rank is None and launcher:
        rank_name = launcher.rank
        rank = _number(variables, rank_name, f"a rank, 0 to {size - 1}", 0)
    rank = require_integer(rank_name, rank, f"a rank, 0 to {size - 1}", 0, size - 1)
    if given and launcher and _of(variables, launcher) != (rank, size):
        launcher = None  # a job inside the launcher's job: the launcher's variables describe only the outer job
    local_rank, local_size = _on_this_host(variables, launcher, size) if launcher else (None, None)
    of_job = (*launcher.job, *_MASTER) if launcher else _MASTER
    job = {name: variables[name] for name in of_job if variables.get(name)}
    if launcher and launcher.name == "PMI" and not job.keys() - {"MASTER_ADDR"} and (served := _pmi_server(variables)):
        job["PMI_FD"] = served
    of_many = {"MASTER_ADDR"}  # variables that several jobs may share, so that they alone do not identify a job
    if launcher and launcher.name == "torchrun":
        of_many |= {*launcher.job}
    if not job.keys() - of_many:
        job = {}
    name = launcher.name if launcher else ""
    return Place(rank, size, local_rank, local_size, tuple(sorted(job.items())), name)


def _number(variables: Mapping[str, str], name: str, expected: str, least: int) -> int:
    text = variables.get(name)
    if text is None:
        raise ArgumentError(f"environment variable {name}", "not set", expected)
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise ArgumentError(f"environment variable {name}", shown(text), expected)
    return int(text)


def _of(variables: Mapping[str, str], launcher: Launcher) -> tuple[int, int] | None:
    """The rank and the size in the launcher's variables; None if they cannot be read."""
    size = next((variables[name] for name in launcher.sizes if name in variables), "")
    rank = variables.get(launcher.rank, "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else None


def _on_this_host(variables: Mapping[str, str], launcher: Launcher, size: int) -> tuple[int | None, int | None]:
    local_rank = local_size = None
    name = launcher.local_size
    if launcher.name == "Slurm":
        local_size = _slurm_local_size(variables)
    elif name in variables:
        local_size = _number(variables, name, "the number of ranks on this host, at least 1", 1)
    if local_size is not None and local_size > size:
        raise ArgumentError(f"environment variable {name}", str(local_size), f"at most the number of ranks, {size}")
    if launcher.local_rank in variables:
        bound = size if local_size is None else local_size
        expected = f"a rank on this host, 0 to {bound - 1}"
        local_rank = _number(variables, launcher.local_rank, expected, 0)
        if local_rank >= bound:
            raise ArgumentError(f"environment variable {launcher.local_rank}", str(local_rank), expected)
    return local_rank, local_size


def _slurm_local_size(variables: Mapping[str, str]) -> int | None:
    """The number of tasks on this node: entry SLURM_NODEID of a list such as "2(x3),1", which means 2, 2, 2, 1."""
    counts: list[int] = []
    for part in variables.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = variables.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _pmi_server(variables: Mapping[str, str]) -> str | None:
    """The process that serves PMI to the ranks of this host, in words; None if it is unknown. It identifies a job of
    MPICH, which sets no variable that differs between jobs.

    The process is found without sending it a message: the kernel tells which process made the socket that the launcher
    has passed to this rank.
    """
    copy = -1
    try:
        copy = os.dup(int(variables.get("PMI_FD", "")))
        served = socket.socket(fileno=copy)
    except (ValueError, OSError):
        if copy >= 0:
            os.close(copy)
        return None
    with served:
        known = handshake.credentials(served)
    return f"process {known[0]}" if known and known[0] else None
