# SPDX-License-Identifier: Apache-2.0
"""Bytes that a call reads and writes in device memory, by algorithm, summed over all ranks.

Counts of the algorithms, not measurements: tensors and their copies in workspaces, without barrier words, gamma and
epilogue parameters. `local` is on the rank's own device, `remote` crosses to another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes (local, remote), summed over all ranks."""

    local: int
    remote: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.local + other.local, self.remote + other.remote)


NONE = Traffic(0, 0)


def reading_sources(algo: str, ranks: int, nbytes: int, staged: bool) -> Traffic:
    """The sums of `nbytes` of input per rank: reading every source, and filling the staging area where there is one."""
    if algo == "naive":
        return Traffic(ranks * (2 * ranks - 1) * nbytes, ranks * (ranks - 1) * nbytes)
    staging = Traffic(2 * ranks * nbytes if staged else 0, 0)
    times = ranks if algo == "one_stage" else 1
    return staging + Traffic(times * nbytes, times * (ranks - 1) * nbytes)


def writing_results(algo: str, ranks: int, nbytes: int) -> Traffic:
    """`nbytes` of output on every rank; by two stages each part is gathered from its owner's payload."""
    output = Traffic(ranks * nbytes, 0)
    return output + Traffic(nbytes, (ranks - 1) * nbytes) if algo == "two_stage" else output


def adding_residual(algo: str, ranks: int, nbytes: int) -> Traffic:
    """Reading the residual and writing its sum; by two stages all ranks take every row from its owner's payload."""
    if algo == "two_stage":
        return Traffic((3 + ranks) * nbytes, (ranks - 1) * nbytes)
    return Traffic(2 * ranks * nbytes, 0)
