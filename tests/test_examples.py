# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ run, and print what their headers say."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GPUS = {"decode_step": 2, "sequence_parallel": 4, "fp8_training_step": 1, "multicast_kernel": 0, "test_own_program": 0}
"""Examples without a framework, and the number of devices of the driver under test that each needs; 0: emulated devices
only."""
FRAMEWORKS = {"torch_decode": "torch", "jax_arrays": "jax", "cupy_arrays": "cupy"}


def shown(path: Path) -> str:
    """The expected output of a program: the last part of its header."""
    return textwrap.dedent(
        (ast.get_docstring(ast.parse(path.read_text())) or "").split("\nOutput", 1)[1].split("\n\n", 1)[1]
    )


def printed(path: Path, driver: str, *command: str, **variables: str) -> str:
    environment = os.environ | {"DRVFUSE_DRIVER": driver} | variables
    result = subprocess.run(
        [sys.executable, *command, str(path)], capture_output=True, text=True, env=environment, cwd=EXAMPLES.parent
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == GPUS.keys() | FRAMEWORKS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpus(n) if n else pytest.mark.emulated) for name, n in GPUS.items()]
)
def test_an_example_prints_what_its_header_says(name: str, driver: str) -> None:
    path = EXAMPLES / f"{name}.py"
    command = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider") if name.startswith("test_") else ()
    text = re.sub(r"(\d+ passed).* in .*", r"\1", printed(path, driver, *command))
    assert text.strip() == shown(path).strip()


@pytest.mark.emulated
@pytest.mark.parametrize("devices", [1, 2])
def test_sequence_parallelism_takes_as_many_ranks_as_there_are_devices(devices: int) -> None:
    text = printed(EXAMPLES / "sequence_parallel.py", "emu", DRVFUSE_EMU_DEVICES=str(devices))
    assert text.count("rank ") == devices and text.count("True") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [1, *[pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)]])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_of_a_framework_prints_what_its_header_says(name: str, gpus: int, driver: str) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"needs {FRAMEWORKS[name]}")
    path = EXAMPLES / f"{name}.py"
    command = ("-m", "torch.distributed.run", "--nproc-per-node", str(gpus)) if name.startswith("torch") else ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[:gpus]
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(visible), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    text = printed(path, driver, *command, **variables)
    assert text.strip() == shown(path).strip()
