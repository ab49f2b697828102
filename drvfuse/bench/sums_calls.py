# SPDX-License-Identifier: Apache-2.0
"""Calls of all-reduce, of all-reduce of many tensors and of reduce-scatter, for benchmarks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import reference
from ..comm.group import Group
from ..ops.collectives.sums.allreduce import allreduce
from ..ops.collectives.sums.allreduce_many import allreduce_many
from ..ops.collectives.sums.reduce_scatter import reduce_scatter
from ..plans.sums import split_rows
from ..runtime.array import Array
from .collective_calls import CollectiveCalls, Host, Result, bank, inputs_of, repeated
from .sizes import tensors_of


def sums(group: Group, op: str, rows: int, columns: int, sets: int, multicast: bool = False) -> CollectiveCalls:
    """Calls of one of the ops that add. If `multicast` is true, inputs and outputs lie in multicast memory of the
    group; the arrays keep that memory alive."""
    banks = [bank(rank, rows, columns) for rank in range(group.size)]
    counts = split_rows(rows, group.size) if op == "reduce_scatter" else (rows,) * group.size
    starts = np.cumsum((0, *counts)) if op == "reduce_scatter" else [0] * group.size

    def arrays() -> list[Array]:
        if multicast:
            return group.symmetric(2 * rows * columns, multicast=True).arrays((rows, columns), "bfloat16")
        return [rank.empty((rows, columns), "bfloat16") for rank in group]

    def expected() -> list[Host]:
        total = repeated(reference.allreduce(banks, nodes=group.nodes), rows)
        return [total[starts[rank.index] : starts[rank.index] + counts[rank.index]] for rank in group]

    inputs: list[Any] = inputs_of(group, banks, rows, sets, arrays)
    if op == "reduce_scatter":
        outputs = [rank.empty((counts[rank.index], columns), "bfloat16") for rank in group]
        prepare: Any = partial(reduce_scatter.prepare, group, outputs=outputs)
    else:
        outputs = arrays()
        prepare = partial(allreduce.prepare, group, outputs=outputs)
    if op == "allreduce_many":
        inputs = [_cut(members) for members in inputs]
        prepare = partial(allreduce_many.prepare, group, outputs=_cut(outputs))
    return CollectiveCalls(group, prepare, inputs, [Result("the sums", outputs, expected)])


def _cut(arrays: list[Array]) -> list[list[Array]]:
    """Divide each array into several tensors of equal size."""
    count = tensors_of(arrays[0].nbytes)
    return [[rows[i] for i in range(count)] for rows in (array.reshape((count, -1)) for array in arrays)]
