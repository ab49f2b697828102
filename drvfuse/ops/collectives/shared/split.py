# SPDX-License-Identifier: Apache-2.0
"""Functions for the reduce-scatters with and without norm: the rows of each rank, the choice of the algorithm, and
in-place calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import ArgumentError, counted, kind_of, require_integer
from ....plans.sums import pulls, split_rows
from ...call.operands import VECTOR, Operand
from . import plan
from .tuned import Tuned

if TYPE_CHECKING:
    from ....comm.group import Group


ALGORITHMS = ("auto", "push", "pull", "naive")
FORMS = {"push": "push_one_shot", "pull": "one_stage", "naive": "one_stage"}
"""For each algorithm of a reduce-scatter, the algorithm of an all-reduce that sums the whole tensor in the same way as
the reduce-scatter sums a part."""
ROW_FORMS = FORMS | {"naive": "naive"}
"""The same for the fused ops, in which "naive" keeps its name."""


def lengths(argument: str, value: Any, ranks: int) -> tuple[int, ...]:
    """Return the number of rows of each rank: the caller's list `value`, checked. Raises ArgumentError, which names
    `argument`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(argument, kind_of(value), f"a list of {ranks} numbers of rows, one for each rank")
    if len(value) != ranks:
        got, expected = (f"a list of {counted(count, 'entry', 'entries')}" for count in (len(value), ranks))
        raise ArgumentError(argument, got, f"{expected}, one for each rank of the group")
    for position, rows in enumerate(value):
        require_integer(f"{argument}[{position}]", rows, "an integer of at least 0: a number of rows", 0)
    return tuple(map(int, value))


def owned_rows(group: Group, rows: int, splits: Any) -> tuple[int, ...]:
    """Return the number of rows of each rank: `splits`, or numbers as equal as possible if that is None.

    Raises ArgumentError for splits whose sum is not `rows`."""
    if splits is None:
        return split_rows(rows, group.size)
    found = lengths("splits", splits, group.size)
    if sum(found) != rows:
        raise ArgumentError(
            "splits", f"{list(found)}, with the sum {sum(found)}", f"numbers of rows with the sum {rows}"
        )
    return found


def algorithms(op: str, group: Group, algo: str, received: int, sources: Sequence[Operand]) -> list[str]:
    """Return the algorithms that `op` tries one after another: the workspace may be too small for the first one. The
    rank with the largest part receives `received` bytes from the inputs `sources` of the other ranks of its node.

    Raises Unsupported for an algorithm that the group's devices cannot run, and over several nodes the errors of
    `plan.require_moves`.
    """
    if group.link is not None:
        plan.require_moves(group, op, algo)
        if algo == "auto" and not plan.readable_by_peers(group, sources):
            return ["push"]
    if algo != "auto":
        plan.require_peers(group, "naive" if algo == "naive" else FORMS[algo])
        return [algo]
    if not group.peers_readable:
        return ["naive"]
    pulled = pulls(group.part(Tuned).costs, received, group.workspace.half_bytes) and plan.readable_by_peers(
        group, sources
    )
    return ["pull", "push"] if pulled else ["push", "pull"]


def in_place(
    sources: Sequence[Operand], targets: Sequence[Operand], starts: Sequence[int]
) -> list[tuple[Operand, Operand]]:
    """Return the argument `in_place` of `no_overlap`: pairs of an input and an output that is the rank's own rows of
    this input. These rows begin `starts[i]` bytes after the beginning of `sources[i]`.

    Raises ArgumentError for any other output that is not aligned to 16 bytes.
    """
    pairs = []
    for source, target, start in zip(sources, targets, starts, strict=True):
        if target.ptr == source.ptr + start:
            pairs.append((Operand(source.name, target.array, target.shape, 1, None, False), target))
        elif target.array.size and target.ptr % VECTOR:
            where = f"aligned to {VECTOR} bytes, or its rank's rows of {source.name}"
            raise ArgumentError(target.name, f"at address {target.ptr:#x}", where)
    return pairs
