# SPDX-License-Identifier: Apache-2.0
"""Cases in which kernels compare the calls of the ranks, as in a group of several processes. Some calls are equal on
all ranks, others differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import config
from ..comm import workspace
from ..comm.calls import ComparedCalls
from ..comm.group import Group
from ..emu import Machine
from ..errors import CallMismatch
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives.rows.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.collectives.sums.allreduce import allreduce
from ..plans.quantisation import Quantisation
from ..runtime.array import Array, view
from .calls import AMPLE, PDL, Calls, maybe_graph
from .problems import EPSILON, Problem
from .run import Finding, Run
from .shared import FUSED, TIGHT_SLOTS
from .substitutions import ANY_ORDER

KINDS = (
    ("allreduce", "push_one_shot"),
    (FUSED, "push_one_shot"),
    ("allreduce", "two_stage"),
    ("allreduce", "push_two_shot"),
    (FUSED, "two_stage"),
    ("allreduce", "one_stage"),
    (FUSED, "push_two_shot"),
)
"""Kinds of calls in an order in which each call differs from the two before it."""

FEW = tuple(kind for kind in KINDS if kind[0] == FUSED)

NUMBERS = (0, 2**16 - 9, 2**31 - 9)
"""How many calls the group has counted before the first call of a case: none, a number near the overflow of the 16 bits
that a word has for the call number, or a number near the overflow of the 31 bits in a workspace."""

SHAPE, LARGE = (5, 72), (32, 264)


def compared(
    run: Run,
    *,
    kinds: Sequence[tuple[str, str]] = KINDS,
    shape: tuple[int, int] = (9, 520),
    first: bool | None = None,
    timeout: float = 10.0,
    pdl: PDLLevel | None = None,
) -> None:
    """Check that equal calls on 2, 3 or 4 ranks pass the comparison and give right results. There is one call of each
    of `kinds`; all are launched in the order of `kinds` and then in random order."""
    ranks = (2, 3, 4)[run.seed % 3]
    tight = run.chance(0.3)
    with run.group(ranks, workspace_bytes=TIGHT_SLOTS if tight else AMPLE, max_blocks=4) as group:
        group.calls = ComparedCalls.of_one_process(first=run.chance(0.2) if first is None else first)
        _set_numbers(group, run.choice(NUMBERS))
        with config.override(spin_timeout=timeout):
            calls = [
                Calls(
                    run,
                    group,
                    [Problem(op, ranks, shape, number=number)],
                    algo,
                    pdl=run.choice(PDL) if pdl is None else pdl,
                    max_num_blocks=int(run.choice((1, 3, 4))),
                )
                for number, (op, algo) in enumerate(kinds)
            ]
        streams = [rank.stream for rank in group]
        group.synchronize()
        with maybe_graph(group, streams, run.chance(0.3)):
            for call in (*calls, *run.shuffled(calls)):
                order = run.shuffled(range(ranks)) if run.chance() else ()
                call.launch(0, streams, order, run.choice((None, *range(ranks))))
        group.synchronize()
        for done in calls:
            done.compare()


def _set_numbers(group: Group, before: int) -> None:
    if not before:
        return
    group.synchronize()
    for pointer, rank in zip(group.workspace.pointers, group, strict=True):
        words = view(pointer + workspace.NUMBERS_OFFSET, workspace.MAX_RANKS, "uint32", rank.device)
        words.copy_from(np.full(workspace.MAX_RANKS, before, np.uint32))


def differing(run: Run, *, kind: str = "", timeout: float = 10.0) -> None:
    """Check that kernels detect a different call of one rank. DIFFERENCES[kind] makes the calls of that rank and those
    of the other ranks. If `kind` is "", the seed selects it. The group must work after a reset."""
    ranks = (2, 3, 4)[run.seed % 3]
    kind = kind or run.choice(list(DIFFERENCES))
    odd = int(run.random.integers(ranks))
    with run.machine(ranks) as machine, _group(machine, ranks) as group:
        problems = [Problem("allreduce", ranks, SHAPE, number=number) for number in range(2)]
        streams = [rank.stream for rank in group]
        with config.override(spin_timeout=timeout):
            equal = Calls(run, group, problems, run.choice(("two_stage", "push_one_shot")), pdl=run.choice(PDL))
            usual, other = DIFFERENCES[kind](Differing(group))
        equal.launch(0, streams)
        group.synchronize()
        with ANY_ORDER.made(), run.ignored(machine, "race"):
            for position in run.shuffled(range(ranks)):
                for call in other if position == odd else usual:
                    call.launch(rank=position)
            try:
                group.synchronize()
            except CallMismatch as error:
                if (error.rank == odd) == (error.peer == odd):
                    run.findings.append(Finding("mismatch", f"rank {odd} made another call, and not: {error}"))
            else:
                run.findings.append(Finding("mismatch", f"no kernel detected the other call of rank {odd}: {kind}"))
        group.reset()
        for number in range(2):
            equal.launch(number, streams)
        group.synchronize()
        equal.compare()


def _group(machine: Machine, ranks: int) -> Group:
    group = Group.local(ranks, driver=machine, workspace_bytes=AMPLE, max_blocks=4)
    group.calls = ComparedCalls.of_one_process(first=False)
    return group


class Differing:
    """Makes calls of a group, on new arrays."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def _arrays(self, shape: tuple[int, ...], dtype: str) -> list[Array]:
        return [rank.zeros(shape, dtype) for rank in self._group]

    def sum(self, algo: str, shape: tuple[int, ...] = SHAPE, dtype: str = "bfloat16", **options: Any) -> Prepared[Any]:
        arrays = self._arrays(shape, dtype)
        return allreduce.prepare(self._group, arrays, self._arrays(shape, dtype), algo=algo, **options)

    def norm(self, algo: str, shape: tuple[int, ...] = SHAPE, residual: bool = False, **options: Any) -> Prepared[Any]:
        inputs, gammas = self._arrays(shape, "bfloat16"), self._arrays(shape[-1:], "bfloat16")
        options = {"epsilon": EPSILON, "residuals": self._arrays(shape, "bfloat16") if residual else None, **options}
        return allreduce_rmsnorm_fp8.prepare(self._group, inputs, gammas, algo=algo, **options)


def _one(usual: Callable[[Differing], Prepared[Any]], other: Callable[[Differing], Prepared[Any]]) -> _Pair:
    return lambda of: ([usual(of)], [other(of)])


def _two(first: Callable[[Differing], Prepared[Any]], second: Callable[[Differing], Prepared[Any]]) -> _Pair:
    def pair(of: Differing) -> tuple[list[Prepared[Any]], list[Prepared[Any]]]:
        calls = [first(of), second(of)]
        return calls, calls[::-1]

    return pair


_Pair = Callable[[Differing], tuple[list[Prepared[Any]], list[Prepared[Any]]]]

HANGING: dict[str, _Pair] = {
    "pull grid": _one(lambda of: of.sum("one_stage", LARGE), lambda of: of.sum("one_stage", LARGE, max_num_blocks=1)),
    "push algorithm": _one(lambda of: of.sum("push_one_shot"), lambda of: of.sum("push_two_shot")),
    "push and pull": _one(lambda of: of.sum("push_two_shot"), lambda of: of.sum("two_stage")),
    "rows": _one(lambda of: of.norm("push_two_shot"), lambda of: of.norm("push_two_shot", (6, 72))),
    "elements": _one(lambda of: of.sum("push_one_shot"), lambda of: of.sum("push_one_shot", (5, 64))),
    "fused push and pull": _one(lambda of: of.norm("push_one_shot"), lambda of: of.norm("two_stage")),
    "residuals": _one(lambda of: of.norm("push_two_shot"), lambda of: of.norm("push_two_shot", residual=True)),
}
"""Pairs of calls by their difference: the calls of all ranks but one, and the calls of the remaining rank. Without the
comparison a rank would wait for words that nobody sends."""

SILENT: dict[str, _Pair] = {
    "op": _one(lambda of: of.sum("push_one_shot"), lambda of: of.norm("push_one_shot")),
    "order": _two(lambda of: of.sum("push_one_shot"), lambda of: of.norm("push_one_shot")),
    "shape": _one(lambda of: of.sum("push_one_shot"), lambda of: of.sum("push_one_shot", (10, 36))),
    "dtype": _one(lambda of: of.sum("push_two_shot"), lambda of: of.sum("push_two_shot", dtype="float16")),
    "pull dtype": _one(lambda of: of.sum("two_stage"), lambda of: of.sum("two_stage", dtype="float16")),
    "epsilon": _one(lambda of: of.norm("push_two_shot"), lambda of: of.norm("push_two_shot", epsilon=1.0)),
    "pull epsilon": _one(lambda of: of.norm("two_stage"), lambda of: of.norm("two_stage", epsilon=1.0)),
    "quantisation": _one(
        lambda of: of.norm("two_stage"),
        lambda of: of.norm("two_stage", quantisation=Quantisation.per_row("float8_e5m2")),
    ),
}
"""Pairs as in HANGING. Without the comparison the calls would end with wrong results."""

GARBAGE: dict[str, _Pair] = {
    "pull algorithm": _one(lambda of: of.sum("one_stage", (1, 72)), lambda of: of.sum("two_stage", (1, 72))),
}
"""Pairs as in HANGING. Without the comparison a rank would read memory that nobody has written."""

DIFFERENCES = HANGING | SILENT | GARBAGE
