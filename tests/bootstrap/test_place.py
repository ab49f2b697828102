# SPDX-License-Identifier: Apache-2.0
"""Rank, size, host and job from arguments and from the variables of launchers."""

from __future__ import annotations

import os
import socket

import pytest

from drvfuse.bootstrap.place import find_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node0-29630@1",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_PORT": "node0:4711"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
ALL = {"torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "PMI": MPICH, "Slurm": SLURM}


@pytest.mark.parametrize("name", ALL)
def test_rank_and_size_are_read_from_the_variables_of_each_launcher(name):
    place = find_place(environment=ALL[name])
    assert (place.rank, place.size, place.local_rank, place.local_size, place.launcher) == (3, 8, 1, 2, name)
    assert place.one_host is False and place.job


@pytest.mark.parametrize("name", ALL)
def test_jobs_and_restarts_have_different_names(name):
    job = find_place(environment=ALL[name]).job
    for variable, value in job:
        assert find_place(environment={**ALL[name], variable: value + "1"}).job != job
    assert find_place(environment={**ALL[name], "HOME": "/elsewhere"}).job == job


def test_a_restart_of_torchrun_without_a_run_id_is_another_job():
    again = find_place(environment={**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.job != find_place(environment=TORCHRUN).job


def test_the_innermost_launcher_decides():
    assert find_place(environment={**SLURM, **OPEN_MPI, "SLURM_PROCID": "0"}).launcher == "Open MPI"
    assert find_place(environment={**SLURM, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"


def test_a_slurm_allocation_without_a_step_is_not_a_launcher(refused):
    refused(lambda: find_place(environment={"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}), "rank", "not given")


def test_arguments_override_the_variables_of_a_launcher():
    place = find_place(1, 2, environment={"MASTER_PORT": "5"})
    assert (place.rank, place.size, place.local_rank, place.one_host) == (1, 2, None, None)
    assert place.job == (("MASTER_PORT", "5"),) and place.launcher == ""
    place = find_place(1, 2, environment=TORCHRUN)
    assert (place.rank, place.size, place.local_size, place.launcher) == (1, 2, None, "")
    assert find_place(3, 8, environment=TORCHRUN) == find_place(environment=TORCHRUN)
    assert find_place(rank=5, environment=TORCHRUN).rank == 5
    assert find_place(size=4, environment=TORCHRUN).size == 4


def test_ranks_on_one_host_are_known_from_the_local_world_size():
    assert find_place(environment={**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}).one_host is True
    assert find_place(environment={key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE")}).one_host is None


def test_a_job_without_identifying_variables_has_no_name():
    assert find_place(environment={"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}).job == ()
    assert find_place(0, 2, environment={}).job == ()
    # many jobs may have the same address, so it does not identify this one
    assert find_place(0, 2, environment={"MASTER_ADDR": "host"}).job == ()
    assert find_place(environment={"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "host"}).job == ()


def test_a_job_of_mpich_is_named_by_the_process_behind_its_socket():
    ours, theirs = socket.socketpair()
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(ours.fileno())}
    assert find_place(environment=variables).job == (("PMI_FD", f"process {os.getpid()}"),)
    named = find_place(environment={**variables, "MASTER_ADDR": "host"}).job
    assert named == (("MASTER_ADDR", "host"), ("PMI_FD", f"process {os.getpid()}"))
    ours.getsockname()  # fails if find_place has closed the socket
    ours.close()
    theirs.close()
    assert find_place(environment={**variables, "PMI_FD": "100000"}).job == ()


@pytest.mark.parametrize(
    "change,argument,text",
    [
        ({"WORLD_SIZE": None}, "environment variable WORLD_SIZE", "not set"),
        ({"RANK": None}, "environment variable RANK", "not set"),
        ({"RANK": "first"}, "environment variable RANK", "'first'"),
        ({"RANK": "-1"}, "environment variable RANK", "'-1'"),
        ({"RANK": "8"}, "RANK", "0 to 7"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE", "at least 1"),
        ({"WORLD_SIZE": "1" * 12}, "environment variable WORLD_SIZE", "1111"),
        ({"LOCAL_RANK": "2"}, "environment variable LOCAL_RANK", "0 to 1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "environment variable LOCAL_WORLD_SIZE", "at most the number of ranks, 8"),
        ({"LOCAL_WORLD_SIZE": "few"}, "environment variable LOCAL_WORLD_SIZE", "'few'"),
    ],
)
def test_missing_and_contradictory_variables_are_named_in_the_error(refused, change, argument, text):
    variables = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    refused(lambda: find_place(environment=variables), argument, text)


def test_bad_arguments_are_argument_errors(refused):
    refused(lambda: find_place(environment={}), "rank", "OMPI_COMM_WORLD_RANK")
    refused(lambda: find_place(0, environment={}), "size", "not given")
    refused(lambda: find_place(2, 2, environment={}), "rank", "0 to 1")
    refused(lambda: find_place("0", 2, environment={}), "rank", "'0'")
    refused(lambda: find_place(0, True, environment={}), "size", "True")
    refused(lambda: find_place(8, environment=TORCHRUN), "rank", "0 to 7")
