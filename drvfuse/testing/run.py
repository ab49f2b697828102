# SPDX-License-Identifier: Apache-2.0
"""One run of a test on its own machine: the reports of the machine, and the command that repeats the run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from .. import emu
from ..emu import Machine, Report

SHOWN = 20
"""The number of reports that are shown with a failure; further ones are only counted."""


class Reports:
    """The reports of a machine during a test."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._expected: list[Report] = []

    @property
    def all(self) -> list[Report]:
        """All reports, oldest first, once the work that is queued has run."""
        emu.program.finish(self._machine)
        return list(self._machine.reports)

    @property
    def unexpected(self) -> list[Report]:
        """The reports for which the test will fail: those that the test has not expected. Refused calls do not count,
        since the program got their error codes.
        """
        return [r for r in self.all if r.finding and not any(r is e for e in self._expected)]

    def expect(self, kind: str | None = None, match: str | None = None) -> Report:
        """Return the oldest report that is not expected yet, is of this kind, and has a match of the regular expression
        `match` in its text. From now on this report is expected: the test does not fail for it. The test fails if there
        is no such report.
        """
        __tracebackhide__ = True
        there = [r for r in self.all if not any(r is e for e in self._expected)]
        for report in there:
            if kind in (None, report.kind) and (match is None or re.search(match, str(report))):
                self._expected.append(report)
                return report
        what = "report" if kind is None else f"report of kind {kind!r}"
        what += "" if match is None else f" that matches {match!r}"
        found = "".join(f"\n  {report.brief()}" for report in there) or " nothing"
        pytest.fail(f"expected a {what} of the emulated driver; there is{found}")


class Run:
    """A test's machine, with the options of its mark. `race` is the detector's profile if the mark names none."""

    def __init__(self, item: pytest.Item, seed: int, options: Mapping[str, Any], race: str | None) -> None:
        self._replay = _replay(item)
        if race is not None:
            options = {"race": race, **options}
        self.machine = Machine(seed=seed, **options)
        self.reports = Reports(self.machine)
        self.failed = False

    def check(self) -> None:
        """Fail the test if the machine has reports that the test has not expected."""
        unexpected = self.reports.unexpected
        if unexpected:
            self.failed = True
            lines = "".join(f"\n  {report.brief()}" for report in unexpected[:SHOWN])
            count = f"{len(unexpected)} unexpected report{'s' if len(unexpected) > 1 else ''}"
            pytest.fail(f"{count} of the emulated driver:{lines}", pytrace=False)

    def close(self) -> None:
        """Close the machine. Fail the test for reports since `check`, unless it has failed already."""
        try:
            if not self.failed:
                self.check()
        finally:
            self.machine.close()

    def section(self) -> str:
        """The text for a failed test: the command that repeats the run, and all reports with their timelines."""
        unexpected = self.reports.unexpected
        lines = [f"{self.machine!r}", f"replay: {self._replay}"]
        reports = self.reports.all
        for report in reports[:SHOWN]:
            note = "" if any(report is u for u in unexpected) or not report.finding else "expected: "
            lines += ["", f"{note}{report}", *([report.timeline] if report.timeline else [])]
        if len(reports) > SHOWN:
            lines += ["", f"and {len(reports) - SHOWN} more"]
        return "\n".join(lines)


def _replay(item: pytest.Item) -> str:
    """The command that runs only this test, with this seed, in the folder where pytest was started."""
    config: Any = item.config
    path = os.path.relpath(item.path, config.invocation_params.dir)
    words = ["pytest", "::".join([path, *item.nodeid.split("::")[1:]])]
    race, seeds = config.getoption("emu_race"), config.getoption("emu_seeds")
    words += [] if race is None else ["--emu-race" if race == "hardware" else f"--emu-race={race}"]
    words += [] if seeds is None else [f"--emu-seeds={seeds}"]
    return shlex.join(words)
