# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench nodes` on emulated GPUs, where its times mean nothing."""

from __future__ import annotations

import json

import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.bench import nodes
from drvfuse.bench.settings import EMULATED
from drvfuse.errors import Unsupported
from drvfuse.runtime.driver import get_driver

pytestmark = pytest.mark.emulated


def test_a_call_over_nodes_is_timed_beside_one_node_and_its_exchange(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    out = tmp_path / "bench.json"
    assert main(["bench", "nodes", "--driver", "emu", "--op", "allreduce", "--shape", "2x64", "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())
    assert (result["op"], result["gpus"], result["nodes"], result["exchange"]) == ("allreduce", 2, 2, "in_process")
    assert result["one_node"]["algo"] == "push_one_shot"
    over = result["over_nodes"]
    assert over["off"]["us"] > over["exchange"]["us"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert "mean nothing" in printed[0] and printed[2].split()[:2] == ["allreduce", "2x64"]
    assert "2 GPUs as one node, and as 2 nodes" in printed[3]


def test_an_op_that_several_nodes_lack_has_the_reason_below_the_table(monkeypatch):
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    every = nodes.calls_of

    def refused(group, *given):
        if group.nodes > 1:
            raise Unsupported("not between nodes")
        return every(group, *given)

    monkeypatch.setattr(nodes, "calls_of", refused)
    with df.emu.Machine(devices=2, sm_count=2) as machine:
        found = nodes.measure(get_driver(machine), 2, 2, "in_process", ["allreduce"], [(2, 64)], EMULATED)
        (result,) = found
    assert nodes.lines(result)[0][4] == "unsupported"
    assert nodes.notes([result])[-1] == "unsupported: not between nodes"


@pytest.mark.parametrize(("count", "message"), [("1", "at least 2"), ("3", "a number that divides the 2 GPUs")])
def test_nodes_divide_the_gpus(count, message, capsys):
    assert main(["bench", "nodes", "--driver", "emu", "--nodes", count]) == 2
    assert f"--nodes is {count}; it must be {message}" in capsys.readouterr().err
