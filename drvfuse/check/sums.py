# SPDX-License-Identifier: Apache-2.0
"""Cases of all-reduces and reduce-scatters alone: calls in place, epilogues, several tensors, parts of any size."""

from __future__ import annotations

from typing import Any

from ..ops.collectives.shared.kernel import PUSH
from .calls import AMPLE, INPUTS, PDL, Calls
from .problems import Problem
from .run import Run
from .shared import TIGHT, on_two_streams, repeated

SHAPE = (24, 104)
UNEVEN = ((24, 0, 0), (0, 23, 1), (8, 8, 8), (0, 0, 24), (3, 1, 20))
"""Rows of each of three ranks. Some ranks have none, but still exchange words with the others."""


def changing_parts(run: Run, op: str = "reduce_scatter", tight: bool | None = None, side: bool | None = None) -> None:
    """Check push calls, each of which divides its rows among the ranks in another way than the call before it. They
    take one round or, with a `tight` workspace, several. With `side` there is an all-reduce by push between any two of
    them."""
    tight = run.chance() if tight is None else tight
    with run.group(3, workspace_bytes=TIGHT // 4 if tight else AMPLE, max_blocks=4) as group:
        options = {"pdl": run.choice(PDL), "max_num_blocks": run.choice((1, 3, 4))}
        calls = []
        for number, splits in enumerate((*UNEVEN, *run.shuffled(UNEVEN))):
            problem = Problem(op, 3, SHAPE, splits=splits, number=number % 3)
            calls.append(Calls(run, group, [problem], "push", **options))
            if run.chance() if side is None else side:
                calls.append(Calls(run, group, [Problem("allreduce", 3, (9, 61))], run.choice(PUSH[:1]), **options))
        group.synchronize()
        for call in calls:
            call.launch(0, [rank.stream for rank in group], late=run.choice((None, 0, 1, 2)))
        group.synchronize()
        for done in calls:
            done.compare()


def in_place(run: Run) -> None:
    """Check all-reduces whose outputs are their inputs, by pull algorithms and "naive"."""
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        problems = [Problem("allreduce", 4, (9, 520), number=number) for number in range(2)]
        calls = [
            Calls(run, group, problems, algo, in_place=True, pdl=run.choice(PDL))
            for algo in ("one_stage", "two_stage", "naive")
        ]
        on_two_streams(run, group, calls)


def multimem_in_place(run: Run) -> None:
    """Check all-reduces by multimem whose outputs are their inputs, in multicast memory and elsewhere, with and without
    an epilogue. Between these calls there are calls without multicast.
    """
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        calls = []
        for number, algo in enumerate(("one_stage", "two_stage")):
            for multicast in ("", INPUTS):
                problems = [
                    Problem(
                        "allreduce", 4, (9, 520), epilogue=algo == "one_stage", number=2 * number + i, multimem=True
                    )
                    for i in range(2)
                ]
                options: dict[str, Any] = {"in_place": True, "multicast": multicast, "pdl": run.choice(PDL)}
                calls.append(Calls(run, group, problems, algo, **options))
        others = [Problem("allreduce", 4, (9, 520), number=number) for number in range(2)]
        calls.append(Calls(run, group, others, "two_stage", in_place=True))
        on_two_streams(run, group, calls)


def epilogue(run: Run) -> None:
    """Check all-reduces with an epilogue that reads an array of each rank."""
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        problems = [Problem("allreduce", 4, (9, 520), epilogue=True, number=number) for number in range(2)]
        calls = [Calls(run, group, problems, algo, pdl=run.choice(PDL)) for algo in ("one_stage", "naive")]
        on_two_streams(run, group, calls)


def many(run: Run) -> None:
    """Check all-reduces of several tensors, by the push algorithm that the seed selects."""
    repeated(run, "allreduce_many", PUSH[run.seed % len(PUSH)], side=False)
