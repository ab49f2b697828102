# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench processes`: calls in one process and in several processes, alternately, on the same devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from drvfuse.__main__ import main
from drvfuse.emu import Machine
from drvfuse.emu.serve.server import Server

pytestmark = pytest.mark.emulated


def test_the_table_has_a_row_for_each_op_and_algorithm(tmp_path):
    out = tmp_path / "out.json"
    options = ["--driver", "emu", "--op", "reduce-scatter", "all-gather", "--shape", "2x64", "--algos", "push"]
    options += ["--out", str(out)]
    command = [sys.executable, "-m", "drvfuse", "bench", "processes", *options]
    with Machine(devices=2, served=True) as machine:
        server = Server(machine)
        environment = {**os.environ, "DRVFUSE_EMU_MACHINE": server.address}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
        server.close()
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [(result["op"], result["algo"]) for result in results] == [
        ("reduce_scatter", "push"),
        ("all_gather", "push"),
    ]
    assert all(result["ratio"] > 0 and result["processes"]["us"] > 0 for result in results)
    assert "ratio of the times with processes to those in one: median" in done.stdout


def test_without_a_shared_emulated_machine_the_benchmark_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("DRVFUSE_EMU_MACHINE", raising=False)
    assert main(["bench", "processes", "--driver", "emu"]) == 2
    assert "DRVFUSE_EMU_MACHINE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "fast"], "--op is 'fast'; it must be one of 'allreduce', 'allreduce-rmsnorm-fp8'"),
        (["--op", "broadcast", "--algos", "one_stage"], "--algos is 'one_stage'; it must be one of 'push', 'relay'"),
        (["--nodes", "2"], "--nodes needs NCCL, which has no emulated form"),
    ],
)
def test_options_are_checked_before_any_work(options, message, monkeypatch, capsys):
    monkeypatch.setenv("DRVFUSE_EMU_MACHINE", "unix:@nobody")
    monkeypatch.setattr("drvfuse.cli.bench_groups._driver_of", None)
    assert main(["bench", "processes", "--driver", "emu", *options]) == 2
    assert message in capsys.readouterr().err
