# SPDX-License-Identifier: Apache-2.0
"""The program of docs/processes.md works as it is shown, under each launcher that is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drvfuse.emu import Machine
from drvfuse.emu.serve.server import Server

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "processes.md").read_text()
PROGRAM, STORE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def lines(ranks, command, **environment):
    """Run a command that starts `ranks` ranks. Return the sorted lines of its output, each without the prefix that the
    launcher adds."""
    every = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(command, env=every, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"rank \d of \d has the sum [\d.]+", result.stdout)
    assert sorted(found) == [
        f"rank {rank} of {ranks} has the sum {ranks * (ranks + 1) / 2}" for rank in range(ranks)
    ], result.stdout


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def served():
    """Environment variables for ranks that another launcher starts."""
    with Machine(devices=2, served=True) as machine, Server(machine) as server:
        yield {"DRVFUSE_DRIVER": "emu", "DRVFUSE_EMU_MACHINE": server.address}
        assert not machine.reports


@pytest.mark.emulated
def test_the_program_of_the_page_works_under_drvfuse_run(program):
    assert "drvfuse run -n 4 --driver emu rank.py" in PAGE
    lines(4, [sys.executable, "-m", "drvfuse", "run", "-n", "4", "--driver", "emu", program])


@pytest.mark.emulated
@pytest.mark.skipif(not MPIEXEC.exists(), reason="needs mpiexec (pip install mpich)")
def test_the_program_of_the_page_works_under_mpiexec(program, served):
    lines(2, [MPIEXEC, "-n", "2", sys.executable, program], **served)


@pytest.mark.emulated
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_program_of_the_page_works_under_torchrun(program, served):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines(2, [*torchrun, program], **served)


def test_the_store_protocol_of_the_page_is_the_type_that_mypy_checks():
    from drvfuse.bootstrap.stores import Store

    names: dict[str, type] = {}
    exec(STORE, names)
    assert isinstance(names["Store"](), Store)
