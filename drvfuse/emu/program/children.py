# SPDX-License-Identifier: Apache-2.0
"""The processes that a program starts: Python processes are switched as the program is, and return their findings.

They inherit the environment, in which PYTHONPATH has a `sitecustomize` for them. A process has a default machine of its
own, which the settings of the environment describe, and `DRVFUSE_EMU_PROGRAM` names a folder into which it writes its
findings when it exits; or it uses the machine that `DRVFUSE_EMU_MACHINE` names, which keeps them. A forked process has
no machine, as after a fork CUDA has none.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..machine.machine import Machine, default_machine
from ..serve.server import Server
from . import found
from .switch import switch_for_good

_FOLDER = "DRVFUSE_EMU_PROGRAM"
_PARENT = "parent"  # the file that holds the id of the process that runs the program
_SITE = str(Path(__file__).with_name("in_children"))


class Switched:
    """Processes that are started inside the `with` block are switched; `reports` is what they found, after it.

    `machine` is the default machine of this process. With `share`, or if it is another process's, they use it too.
    """

    def __init__(self, machine: Any, share: bool) -> None:
        self.reports: list[dict[str, Any]] = []
        self._pid, self._folder = os.getpid(), ""
        self._server: Server | None = None
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _SITE]
        os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, *others])
        if not isinstance(machine, Machine):
            return  # DRVFUSE_EMU_MACHINE names it
        if share:
            self._server = Server(machine)
            os.environ["DRVFUSE_EMU_MACHINE"] = self._server.address
        else:
            self._folder = tempfile.mkdtemp(prefix="drvfuse-emu-")
            Path(self._folder, _PARENT).write_text(str(self._pid))
            os.environ[_FOLDER] = self._folder

    def __enter__(self) -> Switched:
        return self

    def __exit__(self, *exc: object) -> None:
        if os.getpid() != self._pid:
            return  # a process that the program has forked
        if self._server is not None:
            self._server.close()
        if self._folder:
            os.environ.pop(_FOLDER, None)
            self.reports = _collected(Path(self._folder))


def _collected(folder: Path) -> list[dict[str, Any]]:
    """The findings of the processes that have exited. Deletes the folder."""
    reports = [report for path in sorted(folder.glob("*.json")) for report in json.loads(path.read_text())]
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def switch() -> None:
    """Switch this process to its default machine; its findings are written at its exit."""
    machine = default_machine()
    switch_for_good(machine)
    if _FOLDER in os.environ:
        atexit.register(_leave, machine, len(machine.reports), os.getpid(), Path(os.environ[_FOLDER]))


def _leave(machine: Any, known: int, pid: int, folder: Path) -> None:
    if os.getpid() != pid or not folder.is_dir():
        return
    found.finish(machine)
    reports = [found.as_json(report, pid) for report in machine.reports[known:]]
    if (folder / _PARENT).read_text() == str(pid):
        _end(reports + _collected(folder))
    elif reports:
        path = folder / f"{pid}.part"
        path.write_text(json.dumps(reports))
        path.rename(path.with_suffix(".json"))


def _end(reports: list[dict[str, Any]]) -> None:
    """Print the findings of this process, which has taken the place of the one that ran the program (`os.exec`): no
    other process does.
    """
    findings = found.findings(reports)
    if findings:
        found.show(findings, "drvfuse emu run")
        sys.stdout.flush()
        os._exit(1)  # the only way to set the exit status in an exit handler
