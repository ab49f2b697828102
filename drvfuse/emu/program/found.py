# SPDX-License-Identifier: Apache-2.0
"""Runs the work that a program has left queued when it ends, and prints the reports about the program."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..findings.reports import NO_FINDINGS, Report

SHOWN = 20
"""The maximum number of reports that are printed. Further reports are only counted."""


def finish(machine: Any) -> None:
    """Run the work that is still queued in the contexts of this process, so that its faults are found too. Does nothing
    for a machine that another process serves: that process cleans up when this one ends.
    """
    own = getattr(machine, "own", None)
    if own is None or own.closed:
        return
    for context in own.contexts():
        if own.driver.cuCtxPushCurrent(context.handle)[0] == 0:
            own.driver.cuCtxSynchronize()
            own.driver.cuCtxPopCurrent()


def as_json(report: Report, pid: int) -> dict[str, Any]:
    """A report as plain data: all its fields, its text and the id of the process that made it."""
    return {**dataclasses.asdict(report), "text": str(report), "pid": pid}


def findings(reports: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The reports that count against the program. Reports of calls that are not emulated do not."""
    return [report for report in reports if report["kind"] not in NO_FINDINGS]


def show(reports: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print findings on stderr, oldest first, each with its timeline."""
    out = sys.stderr
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(report["kind"] for report in reports).items())
    print(f"\n{title}: {len(reports)} finding{'s' if len(reports) > 1 else ''} ({kinds})", file=out)
    for report in reports[:SHOWN]:
        where = "" if report["pid"] == os.getpid() else f"process {report['pid']}: "
        print(f"\n{where}{report['text']}", file=out)
        if report["timeline"]:
            print(report["timeline"], file=out)
    if len(reports) > SHOWN:
        print(f"\nand {len(reports) - SHOWN} more; --report FILE.json writes all of them to a file", file=out)
    out.flush()
