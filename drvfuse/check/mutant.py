# SPDX-License-Identifier: Apache-2.0
"""Mutants, which are faults planted in drvfuse, and the search for them.

A fault of a kernel is the code under `FAULT("name")` (cu/common/faults.cuh). A fault of the host is a method that
replaces a method of drvfuse (substitutions.py). Each fault has a case. The case must have a finding with the fault, and
none without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ops.call import faults
from .run import Case, Finding, explore
from .substitutions import Substitution

WRONG = ("race", "mismatch", "uninitialised")


@dataclass(frozen=True)
class Mutant:
    """A planted fault. `what` describes it, and `seen` names the kind of system in which it occurred. The case `case`
    must have a finding of one of the kinds `expected`. With `in_kernels` the fault is compiled into kernels under its
    name; `host` replaces a method of the host, or is None.
    """

    name: str
    what: str
    seen: str
    case: Case
    expected: tuple[str, ...] = WRONG
    host: Substitution | None = None
    in_kernels: bool = True

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """A `with` block in which all calls have the fault."""
        with (
            faults.in_kernels(self.name if self.in_kernels else ""),
            contextlib.nullcontext() if self.host is None else self.host.made(),
        ):
            yield


@dataclass(frozen=True)
class Verdict:
    """The result of the search for a mutant. `seed` is the first seed under which it was found, None if there is none,
    and `by` are the kinds of findings under that seed.

    `unexpected` are the findings of the case without the fault under the same seed.
    """

    name: str
    seed: int | None
    by: tuple[str, ...]
    unexpected: tuple[Finding, ...]

    @property
    def caught(self) -> bool:
        return self.seed is not None


def hunt(mutant: Mutant, seeds: Sequence[int]) -> Verdict:
    """Run the case of a mutant under one seed after another until a finding is one of the expected kinds. Then run the
    case without the fault under the same seed."""
    name = mutant.name
    for seed in seeds:
        with mutant.planted():
            kinds = {finding.kind for finding in explore(name, mutant.case, seed)}
        if kinds & set(mutant.expected):
            return Verdict(name, seed, tuple(sorted(kinds)), tuple(explore(name, mutant.case, seed)))
    return Verdict(name, None, (), tuple(explore(name, mutant.case, seeds[-1])))
