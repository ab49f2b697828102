# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench nodes` on emulated GPUs, where its times mean nothing."""

from __future__ import annotations

import json

import pytest

from drvfuse.__main__ import main

pytestmark = pytest.mark.emulated


def test_a_call_over_nodes_is_timed_beside_one_node_and_its_exchange(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    out = tmp_path / "bench.json"
    options = ["--driver", "emu", "--op", "allreduce", "all-to-all", "--shape", "2x64", "--out", str(out)]
    assert main(["bench", "nodes", *options]) == 0
    result, moved = json.loads(out.read_text())
    assert moved["op"] == "all_to_all" and moved["over_nodes"]["exchange"]["us"] > 0
    assert (result["op"], result["gpus"], result["nodes"], result["exchange"]) == ("allreduce", 2, 2, "in_process")
    assert result["one_node"]["algo"] == "push_one_shot"
    over = result["over_nodes"]
    assert over["off"]["us"] > over["exchange"]["us"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert "mean nothing" in printed[0] and printed[2].split()[:2] == ["allreduce", "2x64"]
    assert "2 GPUs as one node, and as 2 nodes" in printed[4]


@pytest.mark.parametrize(("count", "message"), [("1", "at least 2"), ("3", "a number that divides the 2 GPUs")])
def test_a_number_of_nodes_that_does_not_divide_the_gpus_is_refused(count, message, capsys):
    assert main(["bench", "nodes", "--driver", "emu", "--nodes", count]) == 2
    assert f"--nodes is {count}; it must be {message}" in capsys.readouterr().err
