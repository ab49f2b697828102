# SPDX-License-Identifier: Apache-2.0
"""Processes that exit in any way with open groups do not wait for one another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

PROGRAM = """
import os, signal, sys, time
import numpy as np
import drvfuse as df

group = df.Group.connect(workspace_bytes=1 << 16, max_blocks=2, timeout=30)
x = group[0].array(np.ones(64, np.float32))
for _ in range(3):
    y = df.allreduce(group, x)
assert (y.numpy() == group.size).all()
group.split(0, max_blocks=2)
print("ready", flush=True)
{end}
"""
ENDS = {
    "each in its own way": "[lambda: None, sys.exit, lambda: os._exit(0)][group[0].index]()",
    "within a call": "df.allreduce(group, x); group.transport.board.vote('launch', None)",
}


def run(program: str, tmp_path: Path, ranks: int = 3) -> subprocess.Popen[str]:
    file = tmp_path / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "drvfuse", "run", "-n", str(ranks), "--driver", "emu", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("end", ENDS)
def test_an_open_group_does_not_keep_a_process_from_exiting(tmp_path: Path, end: str) -> None:
    process = run(PROGRAM.format(end=ENDS[end]), tmp_path)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert out.count("ready") == 3


def test_ctrl_c_ends_all_ranks_within_a_call(tmp_path: Path) -> None:
    """Rank 0 waits in a call for the other ranks, which make none."""
    end = "if group[0].index == 0:\n    df.allreduce(group, x).numpy()\ntime.sleep(60)"
    process = run(PROGRAM.format(end=end), tmp_path)
    assert process.stdout is not None
    seen = ""
    while seen.count("ready") < 3:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, seen + out
    assert time.monotonic() - started < 40
