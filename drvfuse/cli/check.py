# SPDX-License-Identifier: Apache-2.0
"""`drvfuse check`: every kernel under many schedules of the emulated driver, and known faults that must be found."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import json
import os
import time
from collections import Counter
from typing import Any

from ..check.cases import CASES
from ..check.explorer import MUTANT_SEEDS, Outcome, run, tasks
from ..check.mutant import Verdict
from ..check.mutants import MUTANTS
from ..check.run import HANGS
from ..errors import ArgumentError, counted, shown
from ..tables import table
from .terminal import counting

DEFAULT_SEEDS = 20
_SHOWN = 3  # the most findings that the terminal shows of a case that failed


def _selected(patterns: list[str] | None) -> list[str]:
    names = [*CASES, *MUTANTS]
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            wider = f"*{pattern}*"
            near = [repr(name) for name in difflib.get_close_matches(pattern, names)]
            if fnmatch.filter(names, wider):
                near.insert(0, f"'{wider}' for a part of a name")
            meant = f"{', '.join(near)}, or another" if near else "a"
            every = "" if near else ": " + ", ".join(names)
            raise ArgumentError(
                "--only", shown(pattern), f"{meant} name of a case or planted fault, or a pattern{every}"
            )
    return [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _failure(name: str, seed: int | None, kind: str, text: str) -> dict[str, Any]:
    replay = f"drvfuse check --only {name}" + ("" if seed is None else f" --seed {seed}")
    return {"case": name, "seed": seed, "kind": kind, "text": text, "replay": replay}


def _failures(outcomes: list[Outcome], verdicts: list[Verdict]) -> list[dict[str, Any]]:
    found = [_failure(o.name, o.seed, f.kind, f.text) for o in outcomes for f in o.findings]
    for verdict in verdicts:
        if not verdict.caught:
            found.append(_failure(verdict.name, None, "escaped", f"not found: {MUTANTS[verdict.name].what}"))
        found += [
            _failure(verdict.name, verdict.seed, f.kind, f"without the fault: {f.text}") for f in verdict.unexpected
        ]
    return found


def _print(outcomes: list[Outcome], verdicts: list[Verdict], failures: list[dict[str, Any]]) -> None:
    if outcomes:
        rows = []
        for name in dict.fromkeys(outcome.name for outcome in outcomes):
            of_case = [outcome for outcome in outcomes if outcome.name == name]
            kinds = Counter(finding.kind for outcome in of_case for finding in outcome.findings)
            hangs = sum(kinds.pop(kind, 0) for kind in HANGS)
            counts = (len(of_case), kinds.pop("race", 0), hangs, kinds.pop("mismatch", 0), kinds.total())
            rows.append([name, *map(str, counts)])
        print(table(["case", "schedules", "races", "deadlocks", "mismatches", "other"], rows, text_columns=1))
    if verdicts:
        rows = [
            [v.name, ", ".join(v.by) if v.caught else "ESCAPED", "" if v.seed is None else str(v.seed)]
            for v in verdicts
        ]
        print(table(["planted fault", "found by", "seed"], rows, text_columns=2))
    for case in dict.fromkeys((failure["case"], failure["seed"], failure["replay"]) for failure in failures):
        texts = [f["text"] for f in failures if (f["case"], f["seed"], f["replay"]) == case]
        print(f"\nFAILED {case[0]}; to repeat: {case[2]}")
        print("\n".join(texts[:_SHOWN]) + (f"\n... and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""))


def run_check(arguments: argparse.Namespace) -> int:
    """Run the check. Returns 0 if no case has findings and every planted fault was found, else 1."""
    start = time.perf_counter()
    names = _selected(arguments.only)
    first = arguments.seed or 0
    seeds = range(first, first + (arguments.seeds or (DEFAULT_SEEDS if arguments.seed is None else 1)))
    todo = tasks(names, seeds, range(first, first + MUTANT_SEEDS))
    jobs = min(arguments.jobs or os.cpu_count() or 1, len(todo))
    outcomes: list[Outcome] = []
    verdicts: list[Verdict] = []
    with (
        counting("schedules of the emulated driver", len(todo), show=not arguments.json and jobs > 1) as done,
        contextlib.closing(run(todo, jobs)) as results,
    ):
        for result in results:
            if isinstance(result, Verdict):
                verdicts.append(result)
            else:
                outcomes.append(result)
            done()
    outcomes.sort(key=lambda outcome: (names.index(outcome.name), outcome.seed))
    verdicts.sort(key=lambda verdict: names.index(verdict.name))
    failures = _failures(outcomes, verdicts)
    kinds = Counter(finding.kind for outcome in outcomes for finding in outcome.findings)
    seconds = time.perf_counter() - start
    if arguments.json:
        report = {
            "ok": not failures,
            "runs": len(outcomes),
            "seeds": len(seeds),
            "races": kinds["race"],
            "deadlocks": sum(kinds[kind] for kind in HANGS),
            "mismatches": kinds["mismatch"],
            "mutants": [_mutant(verdict) for verdict in verdicts],
            "failures": failures,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(report))
    else:
        _print(outcomes, verdicts, failures)
        caught = f"{sum(verdict.caught for verdict in verdicts)} of {len(verdicts)} planted faults found"
        print(
            f"\n{'FAILED' if failures else 'nothing found'} in {counted(len(outcomes), 'schedule')}; "
            f"{caught if verdicts else '--only names no planted fault'}; {seconds:.1f} s"
        )
    return 1 if failures else 0


def _mutant(verdict: Verdict) -> dict[str, Any]:
    mutant = MUTANTS[verdict.name]
    return {
        "name": verdict.name,
        "caught": verdict.caught,
        "by": list(verdict.by),
        "seed": verdict.seed,
        "what": mutant.what,
        "seen": mutant.seen,
    }
