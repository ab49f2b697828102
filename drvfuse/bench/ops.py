# SPDX-License-Identifier: Apache-2.0
"""The collectives of benchmarks, traces and tuning, by name."""

from __future__ import annotations

from ..comm.group import Group
from . import moves_calls, rows_calls
from .collective_calls import CollectiveCalls
from .forms import FORMS, PLAIN, Form
from .moves_calls import moves
from .rows_calls import norms
from .sums_calls import sums

_OF_SUMS = ("one_stage", "two_stage", "push_one_shot", "push_two_shot", "auto")
_OF_SCATTERS = ("push", "pull", "auto")
_OF_MOVES = ("push", "put", "pull", "auto")

ALGORITHMS = {
    "allreduce": _OF_SUMS,
    "allreduce_rmsnorm_fp8": _OF_SUMS,
    "allreduce_many": ("push_one_shot", "push_two_shot", "auto"),
    "reduce_scatter": _OF_SCATTERS,
    "reduce_scatter_rmsnorm_fp8": _OF_SCATTERS,
    "all_gather": _OF_MOVES,
    "broadcast": ("push", "relay", "put", "pull", "auto"),
    "all_to_all": _OF_MOVES,
}
"""For each op the algorithms that move no more bytes than necessary."""


def calls_of(
    group: Group, op: str, rows: int, columns: int, sets: int, form: Form = FORMS[PLAIN], multicast: bool = False
) -> CollectiveCalls:
    """Calls of an op. `form` applies to the fused norms only, and `multicast` to "allreduce", as in `sums`."""
    if op in rows_calls.OPS:
        return norms(group, op, rows, columns, sets, form)
    if op in moves_calls.OPS:
        return moves(group, op, 2 * rows * columns, sets)
    return sums(group, op, rows, columns, sets, multicast)
