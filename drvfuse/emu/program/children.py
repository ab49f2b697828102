# SPDX-License-Identifier: Apache-2.0
"""The processes that a program starts: Python processes are switched as the program is, and say what they found.

They inherit the environment. PYTHONPATH has a `sitecustomize` for them, and `DRVFUSE_EMU_PROGRAM` names a folder into
which each writes its findings when it exits. A process has a default machine of its own, which the settings of the
environment describe, or uses the one that `DRVFUSE_EMU_MACHINE` names. A forked process has no machine, as after a fork
CUDA has none.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..machine.machine import default_machine
from . import found
from .switch import switch_for_good

VARIABLE = "DRVFUSE_EMU_PROGRAM"
_SITE = str(Path(__file__).with_name("in_children"))


def environment(folder: str) -> Mapping[str, str]:
    """The variables that processes need whose findings are to come into `folder`."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _SITE]
    return {VARIABLE: folder, "PYTHONPATH": os.pathsep.join([_SITE, *others])}


def switch() -> None:
    """Switch this process to its default machine; its findings are written at its exit."""
    machine = default_machine()
    switch_for_good(machine)
    atexit.register(_leave, machine, len(machine.reports), os.getpid())


def _leave(machine: Any, known: int, pid: int) -> None:
    folder = os.environ.get(VARIABLE, "")
    if os.getpid() != pid or not os.path.isdir(folder):
        return
    found.finish(machine)
    reports = [found.as_json(report, pid) for report in machine.reports[known:]]
    if reports:
        path = Path(folder, f"{pid}.part")
        path.write_text(json.dumps(reports))
        path.rename(path.with_suffix(".json"))


def collect(folder: str) -> list[dict[str, Any]]:
    """What the processes have found that have exited."""
    return [report for path in sorted(Path(folder).glob("*.json")) for report in json.loads(path.read_text())]
