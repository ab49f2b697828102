# SPDX-License-Identifier: Apache-2.0
"""Prepared calls of a collective on several sets of random inputs. Results are checked before the calls are timed.

A shape is (rows, columns) of a rank's bfloat16 input, or for all_gather of a rank's output. An op that only moves bytes
gets arrays with as many bytes.
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
from ..ops.collectives.shared import multimem
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..runtime.array import Array
from ..trace.buffer import Trace
from .timing import Timing, microseconds_per_call, together

BANK = 131  # the number of rows of a bank: a prime, so that owners, chunks and tiles begin with different rows
LEVELS = {"off": PDLLevel.OFF, "early": PDLLevel.OVERLAP_AT_BEGINNING}

Host = npt.NDArray[Any]
Calls = list[Callable[[], object]]


def bank(seed: int, rows: int, columns: int, dtype: str = "bfloat16") -> Host:
    """At most `BANK` random rows, to be repeated in a tensor with `rows` rows. With them large tensors, and their
    expected results, are computed quickly."""
    random = np.random.default_rng([seed, rows, columns])
    return random.standard_normal((min(rows, BANK), columns), np.float32).astype(dtypes.get(dtype).numpy)


def repeated(values: Host, rows: int) -> Host:
    """A tensor with `rows` rows, made by repeating the rows `values`."""
    return values if len(values) == rows else np.resize(values, (rows, *values.shape[1:]))


@dataclass
class Result:
    """The arrays, one for each local rank, that a call writes as one of its results.

    `expected` returns their contents after a call on the first set of inputs. `before` is their contents before the
    call; None means zeros.
    """

    name: str
    arrays: Sequence[Array]
    expected: Callable[[], Sequence[Host]]
    before: Sequence[Host] | None = None

    def clear(self) -> None:
        """Restore the contents that the arrays must have before the call."""
        before = self.before or [np.zeros(array.shape, array.dtype.numpy) for array in self.arrays]
        for array, host in zip(self.arrays, before, strict=True):
            array.copy_from(host)


@dataclass
class CollectiveCalls:
    """Calls of one collective, one for each set of inputs. `prepare` takes an entry of `sets` as its argument `inputs`.
    All calls write the same `results`."""

    group: Group
    prepare: Callable[..., Prepared[Any]]
    sets: Sequence[Any]
    results: Sequence[Result]

    def prepared(
        self, algo: str, pdl_level: PDLLevel = PDLLevel.OFF, trace: Trace | None = None, sets: int | None = None
    ) -> list[Prepared[Any]]:
        """A prepared call for each of the first `sets` sets of inputs. `algo` may also be one of the names in
        `multimem.NAMES`."""
        forms = {name: form for form, name in multimem.NAMES.items()}
        options: dict[str, Any] = {"algo": forms.get(algo, algo), "pdl_level": pdl_level, "trace": trace}
        if algo in forms:
            options["use_multimem"] = True
        return [self.prepare(inputs, **options) for inputs in self.sets[:sets]]

    def check(self, algo: str) -> None:
        """Make a call on the first set of inputs. Raises DrvfuseError unless its results on every local rank equal
        those of `drvfuse.reference` bit for bit. Results are not compared if the order of their additions is
        unspecified, as with multimem or some exchange engines.
        """
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
        """Check the results of the algorithm, then return by name: the time of a call for each level of PDL, in graphs
        of at least `calls` calls, and, as "algo", the algorithm that ran, which "auto" may have chosen.
        """
        self.check(algo)
        found: dict[str, Any] = {}
        for name, level in LEVELS.items():
            prepared = self.prepared(algo, level)
            found[name] = figure(microseconds_per_call(self.group, launches(prepared), calls))
            found["algo"] = prepared[0].algo
        return found

    def gemvs(self, weights: Sequence[Sequence[Array]], acts: Sequence[Array]) -> Calls:
        """For each set of inputs, a GEMV on every rank that writes the first row of the rank's input. The GEMVs are
        launched with PDL.

        `weights` has one or more arrays [columns, K] for each rank, which the sets use in turn. `acts` has an array [K]
        for each rank.
        """
        return [
            together(
                gemv_partial_norm.prepare(
                    act,
                    of_rank[number % len(of_rank)],
                    None,
                    n_normed=0,
                    epsilon=0.0,
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
    """Each GEMV together with the call that follows it."""
    return [together(pair) for pair in zip(gemvs, calls, strict=True)]


def inputs_of(
    group: Group, banks: Sequence[Host], rows: int, sets: int, arrays: Callable[[], list[Array]]
) -> list[list[Array]]:
    """Make `sets` sets of inputs. The input of a rank repeats the rows of its bank, `banks[rank]`; in set i, from 0,
    the columns are rotated by i places. `arrays` allocates the arrays of a set.
    """
    found = []
    for turn in range(sets):
        found.append(arrays())
        for rank, array in zip(group, found[-1], strict=True):
            array.copy_from(repeated(np.roll(banks[rank.index], turn, axis=1), rows))
    return found
