# SPDX-License-Identifier: Apache-2.0
"""No call of the driver crashes the interpreter, whatever it gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz_calls.py"
ROUNDS, LEAST = 15, 2500


@pytest.mark.parametrize("mode", ["here", "served"])
def test_every_function_survives_every_argument(mode: str, tmp_path: Path) -> None:
    """Null, negative, huge and wrong-typed numbers, freed handles, handles of something else, addresses where nothing
    is, structures that hold anything: a CUresult, or what reading the arguments raises, and never a crash.
    """
    log = tmp_path / "calls"
    command = [sys.executable, str(SCRIPT), mode, "16", str(ROUNDS), str(log)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    last = log.read_text().splitlines()[-1:] if log.exists() else []
    assert run.returncode == 0, f"the last call was {last}\n{run.stdout[-4000:]}\n{run.stderr[-2000:]}"
    assert int(run.stdout.split()[0]) > LEAST
