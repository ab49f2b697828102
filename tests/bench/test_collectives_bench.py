# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench allreduce` and `allreduce-rmsnorm-fp8` on emulated GPUs, where their times mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.bench import collectives, collectives_report, peers, stored_peers
from drvfuse.bench.floors import Links, least_wire_bytes
from drvfuse.bench.peer_worker import NORM, PEERS
from drvfuse.bench.settings import EMULATED
from drvfuse.cli import bench_groups
from drvfuse.runtime.driver import get_driver
from drvfuse.runtime.multicast_support import VETOES

pytestmark = pytest.mark.emulated

Command = Callable[..., tuple[list[dict[str, Any]], list[str]]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command(*arguments)`: the results in the file, and the lines that were printed."""
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)

    def run(*arguments: str) -> tuple[list[dict[str, Any]], list[str]]:
        out = tmp_path / "bench.json"
        assert main(["bench", *arguments, "--driver", "emu", "--max-blocks", "4", "--out", str(out)]) == 0
        return json.loads(out.read_text()), capsys.readouterr().out.splitlines()

    return run


def test_every_algorithm_is_timed_beside_the_floors_of_the_run(command: Command, tmp_path: Path) -> None:
    results, printed = command("allreduce", "--shapes", "2x64", "3x72", "--plot", str(tmp_path / "bench.svg"))
    assert [(r["rows"], r["cols"], r["residual"], r["stored"]) for r in results] == [
        (2, 64, False, None),
        (3, 72, False, None),
    ]
    for result in results:
        assert tuple(result["ours"]) == collectives_report.ALGORITHMS and not result["peers"]
        for algo, figures in result["ours"].items():
            assert all(figures[level]["us"] > 0 and figures[level]["spread"] == 0 for level in collectives.LEVELS)
            assert figures["algo"] == algo or algo == "auto"
            assert "adds_us" in figures
        run = result["run"]
        assert (run["op"], run["gpus"], run["max_blocks"], run["replays"]) == ("allreduce", 2, 4, 1)
        assert run["settings"]["calls"] == EMULATED.calls and run["spin_timeout"] == df.config.get("spin_timeout")
        assert all(run["launch_us"][level]["us"] > 0 for level in collectives.LEVELS)
        nbytes = 2 * result["rows"] * result["cols"]
        assert result["wire_us"] == pytest.approx(nbytes / run["link_bytes_per_us"]) and result["push_us"]["us"] > 0
    assert "mean nothing" in printed[0]
    heads = printed[1]
    assert all(name in heads for name in collectives_report.ALGORITHMS) and "NCCL" not in heads
    assert [line.split()[:2] for line in printed[2:6]] == [
        [shape, level] for shape in ("2x64", "3x72") for level in ("off", "early")
    ]
    settings = " ".join(printed[6:])
    for text in ("1 replays", "2 calls per graph", "2 sets", "OVERLAP_AT_BEGINNING", "max_blocks 4", "spin_timeout"):
        assert text in settings
    assert (tmp_path / "bench.svg").read_text().startswith("<?xml")


def test_multimem_is_timed_on_multicast_memory_where_it_is_asked_for(command: Command) -> None:
    results, printed = command("allreduce", "--shapes", "2x64", "3x72", "--multimem")
    names = (*collectives_report.ALGORITHMS, *collectives_report.MULTIMEM)
    for result in results:
        assert tuple(result["ours"]) == names
        assert all(result["ours"][name]["algo"] == name for name in collectives_report.MULTIMEM)
        assert all(result["ours"][name]["off"]["us"] > 0 for name in names)
    assert all(name in printed[1] for name in names)
    assert any("(1 + 1/n) S each way" in line for line in printed)
    results, _ = command("allreduce", "--shapes", "2x64", "--multimem", "--algos", "multimem_two_stage")
    assert tuple(results[0]["ours"]) == ("multimem_two_stage",)


def test_multimem_algorithms_need_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "allreduce", "--driver", "emu", "--algos", "multimem_two_stage"]) != 0
    assert "--algos" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [*VETOES.items(), ("DRVFUSE_MULTICAST", "0")])
def test_multimem_is_refused_with_the_name_of_the_veto_before_a_driver_is_loaded(name: str, value: str) -> None:
    value = os.environ.get(name) or value  # a veto that is set already is kept
    # All GPUs are hidden in case the veto does not work.
    environment = {**os.environ, name: value, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-X", "importtime", "-m", "drvfuse", "bench", "allreduce", "--multimem"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode != 0 and f"{name}={value}" in result.stderr
    assert "no multicast object was created" in result.stderr
    assert not any(line.endswith("| cuda.bindings.driver") for line in result.stderr.splitlines())


def test_the_fused_op_is_timed_without_and_with_a_residual(command: Command) -> None:
    results, printed = command("allreduce-rmsnorm-fp8", "--shapes", "2x64", "--algos", "one_stage")
    assert [(r["residual"], tuple(r["ours"])) for r in results] == [(False, ("one_stage",)), (True, ("one_stage",))]
    assert results[0]["wire_us"] == pytest.approx(0.75 * results[1]["wire_us"])
    assert [line.split()[1:3] for line in printed[2:6]] == [
        [residual, level] for residual in ("no", "yes") for level in ("off", "early")
    ]


@pytest.mark.parametrize("option", ["--residual", "--no-residual"])
def test_an_option_restricts_the_fused_op_to_one_kind(command: Command, option: str) -> None:
    results, _ = command("allreduce-rmsnorm-fp8", "--shapes", "2x64", "--algos", "one_stage", option)
    assert [r["residual"] for r in results] == [option == "--residual"]


def test_the_push_floor_copies_the_bytes_to_the_next_rank() -> None:
    with df.emu.Machine(devices=3, sm_count=2) as machine, df.Group.local(3, driver=machine, max_blocks=2) as group:
        links = Links(group, 200)
        for index, source in enumerate(links._sources):
            source.copy_from(bytearray([index + 1]) * 208)
        links._pushed(208, 1, 1)
        assert [set(target.numpy().tolist()) for target in links._targets] == [{3}, {1}, {2}]
        assert links.bytes_per_us(1) > 0
        assert not machine.reports


def test_each_op_has_a_least_number_of_bytes_on_the_wire() -> None:
    assert [least_wire_bytes("allreduce", False, ranks, 1024) for ranks in (2, 3, 4)] == [1024, 1365, 1536]
    fused = "allreduce_rmsnorm_fp8"
    assert [least_wire_bytes(fused, False, ranks, 1024) for ranks in (2, 3, 4)] == [768, 1024, 1152]
    assert least_wire_bytes(fused, True, 4, 1024) == 1536


def test_the_fastest_stored_peer_is_found_by_op_ranks_and_shape() -> None:
    shapes = stored_peers.shapes()
    assert len(shapes) == 24 and shapes[0] == (1, 4096) and shapes[-1] == (2048, 8192)
    assert stored_peers.fastest("allreduce", 2, 1, 4096, False) == ("FlashInfer one-shot", 2.51)
    fused = "allreduce_rmsnorm_fp8"
    assert stored_peers.fastest(fused, 4, 2048, 4096, True) == ("vLLM + compiled norm", 117.15)
    assert stored_peers.fastest(fused, 4, 2048, 4096, False) == stored_peers.fastest("allreduce", 4, 2048, 4096, False)
    assert stored_peers.fastest("allreduce", 3, 1, 4096, False) is None
    assert all(stored_peers.fastest(op, n, *s, True) for op in ("allreduce", fused) for n in (2, 4) for s in shapes)


def _result(op: str = "allreduce", residual: bool = False, **peer_figures: dict[str, Any]) -> dict[str, Any]:
    def figure(us: float) -> dict[str, float]:
        return {"us": us, "spread": 0.5}

    run = {
        **{"op": op, "gpus": 2, "device": "GPU", "max_blocks": 132, "spin_timeout": 10.0, "replays": 9},
        **{"settings": {"calls": 100, "sets": 8, "weight_bytes": 16 << 20}, "link_bytes_per_us": 364e3},
        "pdl": {"off": "OFF", "early": "OVERLAP_AT_BEGINNING"},
        "launch_us": {"off": figure(0.6), "early": figure(0.4)},
    }
    ours = {"auto": {"off": figure(40.0), "early": figure(30.0), "algo": "two_stage", "adds_us": 29.0}}
    return {
        **{"run": run, "rows": 512, "cols": 4096, "kib": 4096.0, "residual": residual, "ours": ours},
        **{"wire_us": 20.0, "push_us": figure(21.0), "stored": ["somebody", 50.0]},
        "peers": {name.replace("_", " "): found for name, found in peer_figures.items()},
    }


def _cells(result: dict[str, Any]) -> list[dict[str, str]]:
    return [dict(zip(collectives_report.HEAD, line, strict=True)) for line in collectives_report.lines(result)]


def test_a_table_has_ratios_to_the_wire_time_the_fastest_peer_and_the_stored_time() -> None:
    off, early = _cells(_result(NCCL={"us": 60.0, "spread": 1.0}, NCCL_windows={"failed": "RuntimeError: no windows"}))
    assert (off["NCCL"], off["NCCL windows"], off["stored"], off["push"]) == (
        "60.00±1.00",
        "failed",
        "50.00",
        "21.00±0.50",
    )
    assert (off["auto"], off["x wire"], off["x peer"], off["x stored"]) == ("40.00±0.50", "2.00", "0.67", "0.80")
    assert (early["auto"], early["x wire"], early["x peer"], early["x stored"]) == (
        "30.00±0.50",
        "1.50",
        "0.50",
        "0.60",
    )
    assert (off["adds"], early["adds"], early["NCCL"]) == ("", "29.00", "")


def test_failures_and_geometric_means_are_printed_below_the_table() -> None:
    results = [_result(NCCL={"us": 60.0, "spread": 1.0}), _result(NCCL={"us": 15.0, "spread": 1.0})]
    results[1]["peers"]["torch one-shot"] = results[0]["peers"]["torch one-shot"] = {"failed": "ValueError: what"}
    notes = collectives_report.notes(results)
    assert notes[-1] == "torch one-shot failed: ValueError: what" and notes[-2] != notes[-1]
    (line,) = [n for n in notes if n.startswith("auto / the fastest peer of the run, PDL early")]
    assert line.endswith("geometric mean 1.000, 0.50 to 2.00 over 2 shapes")


def test_the_origin_of_stored_times_is_printed_only_where_they_are_shown() -> None:
    without = [{**_result(), "stored": None}]
    assert not any(note.startswith("stored: ") for note in collectives_report.notes(without))
    assert any(note.startswith("stored: ") for note in collectives_report.notes([*without, _result()]))


def test_a_fused_op_without_residual_is_compared_with_the_stored_allreduce_and_the_compiled_norm() -> None:
    fused = "allreduce_rmsnorm_fp8"
    norm = {"us": 10.0, "spread": 0.1}
    assert collectives_report.stored_us(_result(fused, norm_alone=norm)) == 60.0
    assert collectives_report.stored_us(_result(fused)) is None
    assert collectives_report.stored_us(_result(fused, residual=True, norm_alone=norm)) == 50.0
    # The compiled norm alone is not compared with the fused op, as it sums nothing.
    assert collectives_report.peer_us(_result(fused, norm_alone=norm)) is None
    assert peers.names("allreduce") == PEERS and peers.names(fused) == (*PEERS, NORM)


def test_results_are_plotted_with_the_times_of_other_libraries(tmp_path: Path) -> None:
    results = [_result(NCCL={"us": 60.0, "spread": 1.0}, NCCL_windows={"failed": "no"}), _result(residual=True)]
    collectives_report.plot(results, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "2x64", "12"], "--shapes is '12'; it must be rows x columns, such as 8192x4096"),
        (["--shapes", "2x16392"], "--shapes is '2x16392'; it must be of at most 16384 columns"),
        (["--algos", "fast"], "--algos is 'fast'; it must be one of 'one_stage', 'two_stage', 'push_one_shot'"),
        (["--peers", "--driver", "emu"], "--peers needs real GPUs: on emulated ones only drvfuse runs"),
        (["--gpus", "1", "--driver", "emu"], "--gpus is 1; it must be from 2 to 8: the emu driver has 8 devices"),
        (["--max-blocks", "100000", "--driver", "emu"], "max_blocks is 100000; it must be at most"),
    ],
)
def test_arguments_are_checked_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the benchmark measures before it has checked its arguments")

    monkeypatch.setattr(collectives, "measure", refuse)
    assert main(["bench", "allreduce-rmsnorm-fp8", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_a_driver_with_too_few_devices_is_refused_with_both_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with df.emu.Machine(devices=1) as machine:
        monkeypatch.setattr(bench_groups, "get_driver", lambda name: get_driver(machine))
        assert main(["bench", "fused-forms", "--gpus", "1", "--driver", "emu"]) == 2
    error = capsys.readouterr().err
    assert "this benchmark needs at least 2 devices, and the emu driver has 1" in error


def test_peers_need_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "allreduce", "--peers"]) == 2
    assert "--peers needs the package torch, which is not installed" in capsys.readouterr().err


def test_peers_are_measured_at_the_shapes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    asked = []

    def measure(peer: str, op: str, residuals: list[bool], ranks: int, shapes: Any, settings: Any) -> dict[Any, Any]:
        asked.append((peer, op, residuals, ranks, settings))
        return {(*shape, residual): {"failed": f"{peer} {shape[0]}"} for shape in shapes for residual in residuals}

    monkeypatch.setattr(peers, "measure", measure)
    fused, shapes = "allreduce_rmsnorm_fp8", [(2, 64), (3, 64)]
    with df.emu.Machine(devices=2, sm_count=2) as machine, df.Group.local(2, driver=machine, max_blocks=2) as group:
        results = list(collectives.measure(group, fused, shapes, ["one_stage"], [True], EMULATED, with_peers=True))
        assert not machine.reports
    assert asked == [(name, fused, [True], 2, EMULATED) for name in (*PEERS, NORM)]
    assert [r["peers"]["NCCL"] for r in results] == [{"failed": "NCCL 2"}, {"failed": "NCCL 3"}]


def test_devices_without_peer_access_are_refused() -> None:
    with df.emu.Machine(devices=2, peers=False) as machine, df.Group.local(2, driver=machine) as group:
        measured = collectives.measure(group, "allreduce", [(2, 64)], ["auto"], [False], EMULATED, with_peers=False)
        with pytest.raises(df.errors.Unsupported, match="needs peer access between all GPUs"):
            next(measured)
