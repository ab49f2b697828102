# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench broadcast` and its siblings on emulated GPUs, where their times mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drvfuse.__main__ import main
from drvfuse.bench import moves, peers

pytestmark = pytest.mark.emulated


def test_every_algorithm_is_timed_beside_the_wire_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    out = tmp_path / "bench.json"
    options = ("--driver", "emu", "--max-blocks", "4", "--gpus", "3", "--kib", "1", "3", "--out", str(out))
    assert main(["bench", "broadcast", *options]) == 0
    results = json.loads(out.read_text())
    assert [result["kib"] for result in results] == [1.125, 3.09375]  # rounded up to whole packs per pair of ranks
    for result in results:
        assert set(result["ours"]) == {"push", "relay", "put", "pull", "auto"} and not result["peers"]
        assert all(found[level]["us"] > 0 for found in result["ours"].values() for level in moves.LEVELS)
        assert result["wire_us"] == pytest.approx(1024 * result["kib"] / result["run"]["link_bytes_per_us"])
    printed = capsys.readouterr().out.splitlines()
    assert "mean nothing" in printed[0]
    assert [line.split()[:2] for line in printed[2:6]] == [
        [kib, p] for kib in ("1.125", "3.09375") for p in moves.LEVELS
    ]


def test_the_wire_time_counts_the_bytes_that_a_rank_must_receive() -> None:
    assert moves.wire_bytes("all_gather", 4, 4096) == moves.wire_bytes("all_to_all", 4, 4096) == 3072
    assert moves.wire_bytes("broadcast", 4, 4096) == 4096


def test_a_library_without_times_of_chained_calls_has_no_figures_for_them() -> None:
    records = [{"us": [3.0, 9.0, 5.0]}, {"us": [4.0, 8.0, 5.0]}]
    assert peers._figures(records, "") == {"us": 5.0, "spread": 5.0}
