# SPDX-License-Identifier: Apache-2.0
"""Every command `drvfuse bench ...` on emulated GPUs: its rows, fields and file. The times have no meaning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.bench import coat, coat_siblings, gemv, norm, trace_cost
from drvfuse.cli import bench
from drvfuse.runtime.multicast_support import VETOES

pytestmark = pytest.mark.emulated

Command = Callable[..., tuple[list[dict[str, Any]], str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command(*arguments)`: the results in the file of `drvfuse bench` on emulated GPUs, and what it printed."""
    for name in VETOES:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that monkeypatch restores what the command sets
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    monkeypatch.setattr(trace_cost, "_SETS", 1)
    monkeypatch.setattr(trace_cost, "_calls_per_graph", lambda rows, cols: 1)
    monkeypatch.setattr(trace_cost, "_ROUNDS", 2)
    monkeypatch.setattr(gemv, "CALLS", 1)
    monkeypatch.setattr(gemv, "_ROTATED_BYTES", 1 << 12)
    monkeypatch.setattr(gemv, "_READERS", gemv._READERS[:1])
    for module in (coat, coat_siblings, norm):
        monkeypatch.setattr(module, "_ROTATED_BYTES", 4)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda gpu: 2.0)

    def run(*arguments: str) -> tuple[list[dict[str, Any]], str]:
        out = tmp_path / "bench.json"
        with df.emu.Machine(devices=2, sm_count=8) as machine, monkeypatch.context() as patched:
            patched.setattr(bench, "device", lambda index, driver: df.device(index, driver=machine))
            local = partial(df.Group.local, max_blocks=4)
            patched.setattr(df.Group, "local", lambda gpus, driver: local(gpus, driver=machine))
            assert main(["bench", *arguments, "--out", str(out)]) == 0
            assert not machine.reports
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


def test_multicast_stays_forbidden_after_a_run(command: Command) -> None:
    command("gemv", "--shape", "8x64")
    assert {name: os.environ.get(name) for name in VETOES} == VETOES


def test_trace_cost_compares_each_op_and_algorithm(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cost, "SHAPES", ((2, 64), (3, 128)))
    monkeypatch.setattr(trace_cost, "_ALGORITHMS", ("two_stage",))
    monkeypatch.setattr(gemv, "MODEL", (8, 64, 6))
    results, printed = command("trace-cost")
    expected = [(op, "two_stage", *shape) for shape in trace_cost.SHAPES for op in trace_cost.OPS]
    assert [(r["op"], r["algo"], r["rows"], r["cols"]) for r in results] == [*expected, ("gemv", "", 8, 64)]
    for result in results:
        assert result["events"] > 0 and result["off_us"] > 0 and result["on_us"] > 0 and result["spread_us"] >= 0
        assert result["overhead"] == pytest.approx(result["on_us"] / result["off_us"] - 1)
        assert len(result["clocks"]) == (1 if result["op"] == "gemv" else 2)
        assert set(result["clocks"][0]) == {"resolution_ns", "cycles_per_ns", "offset_ns", "error_ns"}
    assert len(printed.splitlines()) == 2 + len(results)


def test_the_emulator_is_timed_with_and_without_the_detector(command: Command) -> None:
    results, printed = command("emulator", "--gpus", "2", "--shape", "2x64", "--calls", "2", "--seeds", "3")
    assert [(r["algo"], r["race"]) for r in results] == [
        (algo, race) for algo in ("one_stage", "two_stage", "naive") for race in (False, True)
    ]
    for result in results:
        assert (result["gpus"], result["rows"], result["cols"]) == (2, 2, 64)
        assert [len(seconds) for seconds in result["seconds"]] == [2, 2, 2]
        assert all(second > 0 for seconds in result["seconds"] for second in seconds)
    assert "2 GPUs, fused op, 2 x 64" in printed.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("fp8-rmsnorm", "--shape", "2x64"), {"rows": 2, "columns": 64}),
        (("gemv", "--shape", "8x64x6"), {"n": 8, "k": 64, "n_normed": 6}),
    ],
    ids=["fp8-rmsnorm", "gemv"],
)
def test_an_op_on_one_device_is_measured(
    command: Command, arguments: tuple[str, ...], fields: dict[str, object]
) -> None:
    results, printed = command(*arguments)
    assert len(results) == 1 and {name: results[0][name] for name in fields} == fields
    assert len(printed.splitlines()) == 3


def test_the_other_fp8_ops_are_measured(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    every = coat_siblings._calls
    monkeypatch.setattr(coat_siblings, "OPS", coat_siblings.OPS[:1])
    monkeypatch.setattr(coat_siblings, "_calls", lambda *shape: list(every(*shape))[:1])
    results, printed = command("fp8-siblings", "--shape", "2x64")
    assert results[0]["division"]["us"] > 0 and len(printed.splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("host", "--torch"),
        ("gemv", "--devices=2"),
        ("emulator", "--torch"),
        ("fp8-siblings", "--torch"),
        ("trace-cost", "--shape=2x64"),
        ("allreduce", "--residual"),
        ("trace-cost", "--plot=p"),
    ],
)
def test_an_option_that_a_benchmark_does_not_have_is_wrong_usage(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, option])
    assert ended.value.code == 2 and f"unrecognized arguments: {option}" in capsys.readouterr().err
