# SPDX-License-Identifier: Apache-2.0
"""The Python processes that a program starts. They too use the emulated driver, and the program reports their findings.

They inherit the environment, in which PYTHONPATH has a folder with a `sitecustomize` for them. If the environment has
`DRVFUSE_EMU_MACHINE`, the address of a machine, they use that machine, which keeps the findings. If not, each has a
default machine of its own, and writes its findings to the folder `DRVFUSE_EMU_PROGRAM` when it exits. A forked process
has no machine, as CUDA cannot be used after a fork.
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
_PARENT = "parent"  # the file with the id of the process that runs the program
_SITE = str(Path(__file__).with_name("in_children"))


class Switched:
    """Makes processes that are started inside the `with` block use the emulated driver.

    `machine` is the default machine of this process. With `share`, or if another process serves that machine, the
    processes started inside the block use it too. After the block, `reports` are the findings of these processes.
    """

    def __init__(self, machine: Any, share: bool) -> None:
        self.reports: list[dict[str, Any]] = []
        self._pid, self._folder = os.getpid(), ""
        self._server: Server | None = None
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _SITE]
        os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, *others])
        if not isinstance(machine, Machine):
            return  # another process serves the machine, and DRVFUSE_EMU_MACHINE has its address already
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
            return  # the program has forked this process; the server and the folder belong to the parent
        if self._server is not None:
            self._server.close()
        if self._folder:
            os.environ.pop(_FOLDER, None)
            self.reports = _collected(Path(self._folder))


def _collected(folder: Path) -> list[dict[str, Any]]:
    """Read the findings of the processes that have exited, and delete the folder."""
    reports = [report for path in sorted(folder.glob("*.json")) for report in json.loads(path.read_text())]
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def switch() -> None:
    """Make this process use the emulated driver of its default machine. If the process that runs the program collects
    findings in a folder, those of this process are written there when it exits.
    """
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
    """Print the findings, if there are any, and exit. Called if the process that ran the program has replaced itself by
    another program (`os.exec`): no other process would print the findings then.
    """
    findings = found.findings(reports)
    if findings:
        found.show(findings, "drvfuse emu run")
        sys.stdout.flush()
        os._exit(1)  # the only way to set the exit status in an exit handler
