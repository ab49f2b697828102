# SPDX-License-Identifier: Apache-2.0
"""A fault that is planted in drvfuse, and the search for it.

In a kernel a fault is where FAULT has its name (cu/common/faults.cuh), on the host a method that is exchanged for
another (substitutions.py). It comes with a case in which it has its effect; without the fault that case must be clean.
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
    """`what` is wrong, the kind of system where it was `seen`, the case that shows it, and the kinds of findings that
    count as having found it. It is planted `in_kernels` by its name, on the `host`, or both."""

    name: str
    what: str
    seen: str
    case: Case
    expected: tuple[str, ...] = WRONG
    host: Substitution | None = None
    in_kernels: bool = True

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Calls that are made in the block have the fault."""
        with (
            faults.in_kernels(self.name if self.in_kernels else ""),
            contextlib.nullcontext() if self.host is None else self.host.made(),
        ):
            yield


@dataclass(frozen=True)
class Verdict:
    """The result of the search for a mutant: `seed` is the first under which it was found, `by` the kinds of findings
    there.

    `unexpected` is what was found without the fault, under the same seed.
    """

    name: str
    seed: int | None
    by: tuple[str, ...]
    unexpected: tuple[Finding, ...]

    @property
    def caught(self) -> bool:
        return self.seed is not None


def hunt(mutant: Mutant, seeds: Sequence[int]) -> Verdict:
    """Run a mutant under seed after seed until it is found; then its case without the fault under that seed."""
    name = mutant.name
    for seed in seeds:
        with mutant.planted():
            kinds = {finding.kind for finding in explore(name, mutant.case, seed)}
        if kinds & set(mutant.expected):
            return Verdict(name, seed, tuple(sorted(kinds)), tuple(explore(name, mutant.case, seed)))
    return Verdict(name, None, (), tuple(explore(name, mutant.case, seeds[-1])))
