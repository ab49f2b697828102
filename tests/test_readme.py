# SPDX-License-Identifier: Apache-2.0
"""The code and commands of the README, and of the pages that show output, work as written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
INTERRUPTIBLE = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""The first lines of a program that make Ctrl-C interrupt it even if the test suite runs in the background of a shell,
where SIGINT is ignored."""
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=110)


@pytest.mark.emulated
def test_python_code_of_the_readme_runs(tmp_path: Path) -> None:
    assert PYTHON_BLOCKS
    for number, block in enumerate(PYTHON_BLOCKS):
        script = tmp_path / f"block{number}.py"
        script.write_text(block)
        result = run(str(script))
        assert result.returncode == 0, result.stderr


def plain(text: str) -> str:
    """Output without the addresses, which differ between runs."""
    return re.sub(r"0x[0-9a-f]{5,}", "0x...", text).strip()


PAGES = {
    "algorithms": 1,
    "arrays": 2,
    "checking": 4,
    "collectives": 3,
    "embedding": 1,
    "emulated-graphs": 1,
    "findings": 30,
    "first-program": 1,
    "fp8": 2,
    "gemv": 1,
    "multicast": 2,
    "nodes": 1,
    "own-kernels": 2,
    "quantisation": 1,
    "settings": 1,
}
"""Pages whose examples print something, and how many of them do."""


@pytest.mark.emulated
@pytest.mark.parametrize("name,outputs", PAGES.items(), ids=PAGES)
def test_a_page_shows_what_its_code_prints(tmp_path: Path, name: str, outputs: int) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page, re.DOTALL)
    assert sum(bool(shown) for _, shown in blocks) >= outputs
    script = tmp_path / f"{name}.py"
    script.write_text(INTERRUPTIBLE + "\nprint(chr(0))\n".join(code for code, _ in blocks))
    result = run(str(script))
    assert result.returncode == 0, result.stderr
    printed = result.stdout.split("\0\n")
    assert [plain(text) for text in printed] == [plain(shown) for _, shown in blocks]


@pytest.mark.emulated
def test_demo_on_the_emulated_driver_finds_no_mismatch() -> None:
    result = run("-m", "drvfuse", "demo", "--driver", "emu", "--json", "--rows", "24", "--cols", "512")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["driver"], report["gpus"], report["rows"], report["cols"]) == ("emu", 4, 24, 512)
    assert report["ok"] is True
    checks = {(check["op"], check["algo"]): check["mismatches"] for check in report["checks"]}
    ops, algos = ("allreduce", "allreduce_rmsnorm_fp8"), ("push_one_shot", "one_stage", "two_stage", "naive")
    assert checks == {(op, algo): 0 for op in ops for algo in algos}


def test_figures_of_the_readme_are_those_of_the_measurements() -> None:
    measured = set(re.findall(r"[\d.]+", (ROOT / "docs" / "performance.md").read_text()))
    (section,) = re.findall(r"## How fast it is\n(.*?)\n## ", README.read_text(), re.DOTALL)
    figures = re.findall(r"([\d.]+) us", section)
    assert figures and not set(figures) - measured, "not in docs/performance.md"


@pytest.mark.emulated
def test_the_demo_prints_what_the_readme_shows() -> None:
    (shown,) = re.findall(r"drvfuse demo\n```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    result = run("-m", "drvfuse", "demo", "--driver", "emu")
    assert result.returncode == 0, result.stderr
    # On a machine without a GPU the demo adds a note, which the README shows and `--driver emu` leaves out.
    differs = r"[\d.]+ s$| \(no usable NVIDIA GPU: see `drvfuse doctor`\)$"
    texts = (re.sub(differs, "", text.strip(), flags=re.MULTILINE) for text in (result.stdout, shown))
    assert next(texts) == next(texts)


@pytest.mark.emulated
def test_doctor_moves_data_between_every_pair() -> None:
    result = run("-m", "drvfuse", "doctor", "--driver", "emu", "--json")
    report = json.loads(result.stdout)
    peers = report["driver"]["peers"]
    assert len(peers) == 8
    assert all(cell == ("self" if i == j else "ok") for i, row in enumerate(peers) for j, cell in enumerate(row))
    assert report["driver"]["multicast"] == {"state": "supported", "why": ""}  # vetoes bind the CUDA driver only
    assert report["findings"] == [] and result.returncode == 0


@pytest.mark.parametrize("options", [("--gpus", "9"), ("--gpus", "0"), ("--gpus", "-1"), ("--rows", "x")])
def test_bad_demo_options_end_with_a_message_and_status_2(options: tuple[str, str]) -> None:
    result = run("-m", "drvfuse", "demo", "--driver", "emu", *options)
    assert result.returncode == 2
    assert options[0] in result.stderr
