# SPDX-License-Identifier: Apache-2.0
"""No call of the driver crashes the interpreter, whatever its arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz_calls.py"
LEAST = 900


@pytest.mark.parametrize(("mode", "rounds"), [("here", 10), ("served", 4)])
def test_every_function_survives_every_argument(mode: str, rounds: int, tmp_path: Path) -> None:
    """Arguments are null, negative, huge or wrong-typed numbers, freed handles, handles of another kind, unmapped
    addresses, and structures with random contents. A call returns a CUresult, or raises the error of an argument that
    cannot be read; it never crashes.
    """
    log = tmp_path / "calls"
    command = [sys.executable, str(SCRIPT), mode, "16", str(rounds), str(log)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    last = log.read_text().splitlines()[-1:] if log.exists() else []
    assert run.returncode == 0, f"the last call was {last}\n{run.stdout[-4000:]}\n{run.stderr[-2000:]}"
    assert int(run.stdout.split()[0]) > LEAST
