# SPDX-License-Identifier: Apache-2.0
"""The races of running kernels and their notices (findings that stop no launch), each of which is reported once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...findings import timeline

if TYPE_CHECKING:
    from ...findings.race import Detector
    from ..machine import Machine


class NewFindings:
    """Reports to a machine the new races and notices of its kernels. A notice is a finding that stops no launch.
    Without a detector, there are no races.

    Two notices are the same if their sites are the same, and two races if their pairs of sites are the same, whichever
    access of the pair came first.
    """

    def __init__(self, machine: Machine, detector: Detector | None) -> None:
        self._machine, self._detector = machine, detector
        self._races: set[Any] = set()  # the pairs of sites of reported races
        self._notices: set[Any] = set()  # the sites of reported notices (findings that stop no launch)

    def report_notices(self) -> None:
        for report in self._machine.engine.notices():
            site = (report.kind, report.kernel, report.file, report.line, report.callers)
            if site not in self._notices:
                self._notices.add(site)
                self._machine.report(report)

    def report_races(self) -> None:
        if self._detector is None:
            return
        engine = self._machine.engine
        for report, events in self._detector.drain(engine.identities):
            other = report.other
            sites = other and frozenset((p.kernel, p.file, p.line, p.callers) for p in (other, report))
            if sites not in self._races:
                self._races.add(sites)
                if other is not None:
                    text = timeline.of_race(report, engine.history(events), engine.identities, self._machine.window)
                    report = replace(report, timeline=text)
                self._machine.report(report)
