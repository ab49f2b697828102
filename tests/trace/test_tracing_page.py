# SPDX-License-Identifier: Apache-2.0
"""docs/tracing.md and `drvfuse trace` work as written."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.trace import layout
from drvfuse.trace.decode import RECORD

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tracing.md").read_text()

pytestmark = pytest.mark.emulated


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=110, cwd=folder)


def test_the_code_prints_what_the_page_shows(tmp_path):
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.S)
    (tmp_path / "page.py").write_text(code)
    result = run(tmp_path, "page.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == shown
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_the_page_names_all_roles_and_fields():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.M)
    assert {role for row in rows for role in re.findall(r"`(\w+)`", row)} == {"block", *layout.ROLES} - {"wait"}
    for name in RECORD.names:
        assert re.search(rf"\b{name}\b", PAGE)


def test_the_command_shows_tables_and_writes_files(tmp_path):
    (command,) = re.findall(r"^    drvfuse (trace .*)", PAGE, re.M)
    result = run(tmp_path, "-m", "drvfuse", *command.split(), "--driver", "emu")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("allreduce, 8 x 4096 bfloat16 per rank, 2 devices, driver emu\n")
    for text in (
        "allreduce_two_stage: 1 launch,",
        "gather",
        "slowest block",
        "who waited for whom",
        "wrote t.json",
        "wrote t.png",
    ):
        assert text in result.stdout
    assert {event["pid"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {1, 2}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("op", "algo", "kernel"),
    [
        ("allreduce_rmsnorm_fp8", "naive", "allreduce_rmsnorm_fp8_naive"),
        ("reduce-scatter", "auto", "reduce_scatter_push_one_shot"),
        ("rmsnorm_fp8", "auto", "rmsnorm_fp8"),
    ],
)
def test_a_collective_or_norm_is_traced_with_the_requested_algorithm(op, algo, kernel, capsys):
    """An op may be named with hyphens, as its benchmark is."""
    devices = () if op == "rmsnorm_fp8" else ("--devices", "2")
    assert main(["trace", op, "--driver", "emu", *devices, "--shape", "3x264", "--warm", "0", "--algo", algo]) == 0
    assert f"{kernel}: 1 launch" in capsys.readouterr().out


def test_every_op_that_takes_a_trace_can_be_traced_by_the_command(capsys):
    """The help of the command lists the ops. The ops of COAT cannot be traced."""
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    listed = re.sub(
        r"\s", "", re.search(r"one of (.*?), also with hyphens", capsys.readouterr().out, re.S).group(1)
    ).split(",")
    public = [getattr(df, name) for name in dir(df)]
    ops = {op.__name__ for op in public if hasattr(op, "prepare") and "trace" in inspect.signature(op).parameters}
    assert set(listed) == ops - {"gemv_partial_norm"} | {"gemv"}


def test_the_gemv_is_traced_on_one_device(tmp_path):
    options = ("--driver", "emu", "--shape", "40x256x10", "--warm", "1")
    result = run(tmp_path, "-m", "drvfuse", "trace", "gemv", *options, "--out", "t.json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gemv_partial_norm, N 40, K 256, n_normed 10, bfloat16, driver emu\n")
    assert "gemv_partial_norm: 1 launch," in result.stdout
    slices = [event for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for role in ("multiply", "apply_reduce", "apply_store"):
        assert any(event["name"] == role for event in slices)
    result = run(tmp_path, "-m", "drvfuse", "trace", "gemv", *options, "--devices", "2")
    assert result.returncode == 2 and "--devices" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--devices", "9"),
        ("--shape", "8"),
        ("--shape", "0x8"),
        ("--warm", "-1"),
        ("--algo", "best"),
        ("--devices", "0"),
    ],
)
def test_bad_options_end_with_a_message_and_status_2(options, tmp_path):
    result = run(tmp_path, "-m", "drvfuse", "trace", "allreduce", "--driver", "emu", *options)
    assert result.returncode == 2
    assert options[0] in result.stderr and not list(tmp_path.iterdir())
