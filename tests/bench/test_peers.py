# SPDX-License-Identifier: Apache-2.0
"""Benchmark processes of other libraries, replaced by small scripts: their times are merged, and their failures are
contained."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from drvfuse.bench import peer_worker, peers
from drvfuse.bench.settings import Settings
from drvfuse.runtime.multicast_support import VETOES

SHAPES = [(2, 64), (3, 64)]
_HEAD = """
import json, os, sys, time
rank, plan = int(sys.argv[1]), json.loads(sys.argv[2])
sink = open(os.path.join(plan["folder"], str(rank)), "w", buffering=1)
def write(**record):
    sink.write(json.dumps(record) + "\\n")
def times(rows, scale=1.0):
    us = [scale * value for value in (3.0 + rank, 9.0 - rank, 5.0)]
    write(rows=rows, cols=64, residual=False, us=us, gemv=[2.0] * 3, chain=[6.0 + rank] * 3)
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`play(script)`: the records of two processes that run `_HEAD` and then the script."""
    monkeypatch.setattr(peers, "_GRACE", 0.3)

    def run(script: str, seconds: float = 60.0) -> dict[peers.Key, peers.Figures]:
        path = tmp_path / "worker.py"
        path.write_text(_HEAD + script)
        monkeypatch.setattr(peers, "_COMMAND", [sys.executable, str(path)])
        settings = Settings(calls=4, sets=2, weight_bytes=1 << 12, peer_seconds=seconds)
        return peers.measure("NCCL", "allreduce", [False], 2, SHAPES, settings)

    return run


def test_the_time_of_a_replay_is_that_of_its_slowest_rank(play) -> None:
    found = play("for rows, _ in plan['shapes']: times(rows)")
    # `us` of ranks 0 and 1 is 3, 9, 5 and 4, 8, 5: the slowest ranks take 4, 9 and 5
    assert found == {(rows, 64, False): {"us": 5.0, "spread": 5.0, "adds_us": 5.0} for rows in (2, 3)}


def test_a_peer_process_gets_the_settings_and_may_not_use_multicast(play) -> None:
    script = """
vetoes = {name: os.environ.get(name) for name in %r}
write(failed=json.dumps([plan["peer"], plan["calls"], plan["sets"], plan["weight_columns"], vetoes]))
"""
    found = play(script % sorted(VETOES))
    expected = peer_worker.json.dumps(["NCCL", 4, 2, [32, 32], dict(sorted(VETOES.items()))])
    assert found[2, 64, False] == found[3, 64, False] == {"failed": expected}


def test_a_shape_that_fails_leaves_the_times_of_the_others(play) -> None:
    found = play("times(2); write(rows=3, cols=64, residual=False, failed='ValueError: no')")
    assert found[2, 64, False]["us"] == 5.0 and found[3, 64, False] == {"failed": "ValueError: no"}


def test_a_failing_rank_ends_the_other_ranks_soon(play) -> None:
    start = time.monotonic()
    found = play("times(2)\nif rank: raise ValueError('lost')\ntime.sleep(100)")
    assert time.monotonic() - start < 30
    assert found[2, 64, False]["us"] == 5.0
    assert found[3, 64, False] == {"failed": "a process ended with status 1: ValueError: lost"}


def test_a_peer_that_hangs_is_killed_at_its_time_limit(play, tmp_path: Path) -> None:
    script = f"open({str(tmp_path)!r} + '/pid' + str(rank), 'w').write(str(os.getpid()))\ntimes(2)\ntime.sleep(100)"
    start = time.monotonic()
    found = play(script, seconds=1.0)
    assert time.monotonic() - start < 30
    assert found[3, 64, False] == {"failed": "not done after 1 seconds"}
    for rank in range(2):
        if (pid := tmp_path / f"pid{rank}").exists():
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid.read_text()), 0)


def test_a_truncated_line_is_not_read_as_times(play) -> None:
    found = play("times(2); sink.write('{\"rows\": 3')")
    assert found[3, 64, False] == {"failed": "a process gave no times"}


def test_a_failing_worker_reports_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the first line\nand more")

    monkeypatch.setattr(peer_worker, "_measure", fail)
    assert peer_worker.main(1, {"folder": str(tmp_path)}) == 1
    assert (tmp_path / "1").read_text() == '{"failed": "RuntimeError: the first line"}\n'
    assert peer_worker.first_line(ValueError()) == "ValueError: without a message"
    assert peer_worker.first_line(ValueError("it raised:\nthis\nthere")) == "ValueError: it raised: this"
