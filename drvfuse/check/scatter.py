# SPDX-License-Identifier: Apache-2.0
"""Cases of the reduce-scatter: parts of any size, in several rounds, and between calls of other kinds."""

from __future__ import annotations

from ..ops.collectives.shared.kernel import PUSH
from .calls import AMPLE, PDL, Calls
from .collectives import TIGHT
from .problems import Problem
from .run import Run

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
