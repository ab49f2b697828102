# SPDX-License-Identifier: Apache-2.0
"""Runs a program, which is a script or a module, on the default machine in this process, and reports the result.

The program runs as `__main__`, with its own arguments and its folder in `sys.path`, as Python would run it.
cuda-python's modules stay switched after it has ended, so that its exit handlers use the same driver. Work that it left
queued is run, as faults of that work are faults of the program.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ... import __version__, config
from ...errors import ArgumentError, Unsupported, shown
from ..machine.machine import default_machine
from . import children, found
from .switch import switch_for_good

_INTERRUPTED = 130
_NOT_INITIALISED = 3
_BELOW = ("cuda.core", "cupy", "torch", "triton", "numba_cuda", "jax")
"""Libraries that call the CUDA driver from C. Such calls cannot be redirected to the emulated driver."""
_BEFORE = (__file__, runpy.__file__, "<frozen runpy>")
"""The files whose frames come before the program's own frames in a traceback."""


def run(program: Sequence[str], *, module: bool = False, report: str | None = None, share: bool = False) -> int:
    """Run a script, or a module as `python -m` does, on the default machine of this process, with its arguments.

    `program` is the path or name, and the arguments. Findings are printed on stderr; they are written, with other data
    of the run, to the JSON file `report`. With `share`, the processes that the program starts use this machine too;
    otherwise each has a machine of its own. Returns 1 if there were findings, else the program's exit status. This
    function can be called once per process. It raises, before the program runs, ArgumentError if the program does not
    exist, and Unsupported if cuda-python cannot be switched.
    """
    name = _existing(program, module)
    _refuse_used_driver()
    machine = default_machine(served=share)
    facts = {"drvfuse": __version__, "program": list(program), "machine": _described(machine), "pid": os.getpid()}
    known, pid = len(machine.reports), os.getpid()
    switch_for_good(machine)
    os.environ["DRVFUSE_DRIVER"] = "emu"
    with children.Switched(machine, share) as started:
        status = _run(program, module)
        if os.getpid() != pid:
            return status  # this process was forked by the program, and the machine belongs to its parent
        _join_threads()
        found.finish(machine)
    reports = [found.as_json(one, pid) for one in machine.reports[known:]] + started.reports
    findings = found.findings(reports)
    if findings:
        found.show(findings, f"drvfuse emu run: {name} on {machine!r}")
    result = 1 if findings else status
    if report is not None:
        facts |= {"program_status": status, "status": result, "findings": len(findings), "reports": reports}
        Path(report).write_text(json.dumps(facts, indent=1) + "\n")
    return result


def _described(machine: Any) -> dict[str, Any]:
    facts = {name: config.get(f"emu_{name}") for name in ("devices", "arch", "seed", "race", "delay_stores")}
    address = config.get("emu_machine")
    return {"address": address, "text": repr(machine)} if address else facts | {"text": repr(machine)}


def _existing(program: Sequence[str], module: bool) -> str:
    """The name of the program. ArgumentError if it does not exist. Sets `sys.path` as Python does for a program."""
    name = program[0]
    if not module and not os.access(name, os.R_OK):
        raise ArgumentError("the program", shown(name), "a Python script that exists and can be read")
    if not sys.flags.safe_path:
        sys.path[0] = "" if module else str(Path(name).resolve().parent)
    # Only the package is looked up: a search for its submodule would import the package before the switch.
    if module and _is_missing(name.partition(".")[0]):
        raise ArgumentError("-m", shown(name), "the name of a module that can be imported")
    return name


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ValueError:
        return True


def _refuse_used_driver() -> None:
    """Raise Unsupported if this process has initialised the real CUDA driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return  # the driver library is not loaded
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALISED:
        raise Unsupported(
            "this process has initialised the real CUDA driver already, and its handles and pointers mean nothing to "
            "the emulated one: start the program by `drvfuse emu run`, in a process of its own"
        )


def _run(program: Sequence[str], module: bool) -> int:
    """Run the program, and return the exit status that Python would have. ArgumentError if runpy finds no module."""
    sys.argv[:] = program
    try:
        if module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        return _status(error.code)
    except BaseException as error:
        frames = traceback.walk_tb(error.__traceback__)
        if module and isinstance(error, ImportError) and all(f.f_code.co_filename in _BEFORE for f, _ in frames):
            raise ArgumentError("-m", shown(program[0]), f"the name of a module that can be run: {error}") from None
        visible = error.with_traceback(_of_program(error.__traceback__))
        sys.excepthook(type(visible), visible, visible.__traceback__)
        below = [library for library in _BELOW if library in sys.modules]
        if below:
            names = ", ".join(below)
            print(
                f"drvfuse emu run: the program has imported {names}: what such a library calls from C is the real CUDA "
                "driver, not the emulated one (docs/emulated-programs.md#what-is-switched)",
                file=sys.stderr,
            )
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _status(code: Any) -> int:
    """The exit status of `sys.exit(code)`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """A traceback that begins with the program's own first frame."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _BEFORE:
        trace = trace.tb_next
    return trace


def _join_threads() -> None:
    """Wait for the program's threads, as the interpreter does before it exits."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
