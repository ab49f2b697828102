# SPDX-License-Identifier: Apache-2.0
"""docs/tracing.md and `drvfuse trace` work as written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_op_and_algorithm_can_be_traced(tmp_path):
    for algo in ("one_stage", "naive"):
        options = ("--driver", "emu", "--devices", "2", "--shape", "3x264", "--warm", "0", "--algo", algo)
        result = run(tmp_path, "-m", "drvfuse", "trace", "allreduce_rmsnorm_fp8", *options)
        assert result.returncode == 0, result.stderr
        assert f"allreduce_rmsnorm_fp8_{algo}: 1 launch" in result.stdout


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
