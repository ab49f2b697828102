# SPDX-License-Identifier: Apache-2.0
"""Prepared calls of a collective over several sets of random inputs, whose results are checked before they are timed.

A shape is rows x columns of bfloat16: those of a rank's input, and of all_gather those of its output. An op that only
moves bytes takes as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..comm.group import Group
from ..errors import DrvfuseError
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives import multimem
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..runtime.array import Array
from ..trace.buffer import Trace
from .timing import Timing, microseconds_per_call, together

BANK = 131  # rows: a prime, so that rows of one owner, chunk or tile differ
LEVELS = {"off": PDLLevel.OFF, "early": PDLLevel.OVERLAP_AT_BEGINNING}

Host = npt.NDArray[Any]
Calls = list[Callable[[], object]]


def bank(seed: int, rows: int, columns: int, dtype: str = "bfloat16") -> Host:
    """Random rows that a tensor of so many rows repeats, at most `BANK`: so large tensors, and what comes of them, are
    made quickly."""
    random = np.random.default_rng([seed, rows, columns])
    return random.standard_normal((min(rows, BANK), columns), np.float32).astype(dtypes.get(dtype).numpy)


def repeated(values: Host, rows: int) -> Host:
    """The tensor of so many rows that repeats the rows of a bank."""
    return values if len(values) == rows else np.resize(values, (rows, *values.shape[1:]))


@dataclass
class Result:
    """An array of each local rank that a call writes, and what a call on the first set of inputs must leave there.

    `before`: what the arrays hold before the call; zeros if None.
    """

    name: str
    arrays: Sequence[Array]
    expected: Callable[[], Sequence[Host]]
    before: Sequence[Host] | None = None

    def clear(self) -> None:
        """Remove what earlier calls have left."""
        before = self.before or [np.zeros(array.shape, array.dtype.numpy) for array in self.arrays]
        for array, host in zip(self.arrays, before, strict=True):
            array.copy_from(host)


@dataclass
class CollectiveCalls:
    """`sets` are inputs as `prepare` takes them; the results are shared by all calls."""

    group: Group
    prepare: Callable[..., Prepared[Any]]
    sets: Sequence[Any]
    results: Sequence[Result]

    def prepared(
        self, algo: str, pdl_level: PDLLevel = PDLLevel.OFF, trace: Trace | None = None, sets: int | None = None
    ) -> list[Prepared[Any]]:
        """A call on each of the first `sets` sets of inputs, by an algorithm whose name may be one of multimem's."""
        forms = {name: form for form, name in multimem.NAMES.items()}
        options: dict[str, Any] = {"algo": forms.get(algo, algo), "pdl_level": pdl_level, "trace": trace}
        if algo in forms:
            options["use_multimem"] = True
        return [self.prepare(inputs, **options) for inputs in self.sets[:sets]]

    def check(self, algo: str) -> None:
        """Make a call on the first set of inputs. DrvfuseError unless its results are those of `drvfuse.reference`, bit
        for bit on every local rank. Sums whose order is not specified, by multimem or an engine, are not compared."""
        (call,) = self.prepared(algo, sets=1)
        for result in self.results:
            result.clear()
        self.group.synchronize()
        call.launch()
        self.group.synchronize()
        link = self.group.link
        if algo in multimem.NAMES.values() or (link is not None and link.order != "fixed"):
            return
        for result in self.results:
            for rank, array, expected in zip(self.group, result.arrays, result.expected(), strict=True):
                if array.numpy().tobytes() != expected.tobytes():
                    raise DrvfuseError(f"{call.describe()}: {result.name} of rank {rank.index} are wrong")

    def times(self, algo: str, calls: int) -> dict[str, Any]:
        """The time of a call by level of PDL, in graphs of at least so many calls, and the algorithm that "auto" chose.
        The results have been checked before."""
        self.check(algo)
        found: dict[str, Any] = {}
        for name, level in LEVELS.items():
            prepared = self.prepared(algo, level)
            found[name] = figure(microseconds_per_call(self.group, launches(prepared), calls))
            found["algo"] = prepared[0].algo
        return found

    def gemvs(self, weights: Sequence[Sequence[Array]], acts: Sequence[Array]) -> Calls:
        """For each set a GEMV on every rank that writes the first row of its input, with PDL.

        `weights` are, for each rank, one or more [columns, K] that take turns, and `acts` a [K] for each rank.
        """
        return [
            together(
                gemv_partial_norm.prepare(
                    act,
                    of_rank[number % len(of_rank)],
                    None,
                    n_normed=0,
                    eps=0.0,
                    unnormed_output=x[0],
                    pdl_level=PDLLevel.OVERLAP_AT_BEGINNING,
                ).launch
                for act, of_rank, x in zip(acts, weights, members, strict=True)
            )
            for number, members in enumerate(self.sets)
        ]


def figure(timing: Timing) -> dict[str, float]:
    return {"us": timing.median, "spread": timing.spread}


def launches(prepared: Sequence[Prepared[Any]]) -> Calls:
    return [one.launch for one in prepared]


def chained(gemvs: Calls, calls: Calls) -> Calls:
    """Each GEMV with the call behind it."""
    return [together(pair) for pair in zip(gemvs, calls, strict=True)]


def inputs_of(
    group: Group, banks: Sequence[Host], rows: int, sets: int, arrays: Callable[[], list[Array]]
) -> list[list[Array]]:
    """Sets of inputs that repeat the banks of the ranks, in arrays that `arrays` makes. The first has them as they are,
    each other one by a column further."""
    found = []
    for turn in range(sets):
        found.append(arrays())
        for rank, array in zip(group, found[-1], strict=True):
            array.copy_from(repeated(np.roll(banks[rank.index], turn, axis=1), rows))
    return found
