# SPDX-License-Identifier: Apache-2.0
"""Further cases of the push algorithms: calls of different kinds that use the same slots, and calls that time out."""

from __future__ import annotations

from .. import config
from ..errors import BarrierTimeout
from ..ops.collectives.shared.kernel import PUSH
from .calls import AMPLE, PDL, Calls
from .problems import Problem
from .run import Finding, Run
from .shared import TIGHT_SLOTS
from .substitutions import ANY_ORDER

ROWS, SHORTER = (9, 520), (9, 264)
"""Two shapes: the last word that a rank sends for the second shape lies inside a row of the first shape."""


def changing(run: Run, algo: str = "push_two_shot") -> None:
    """Check a sequence of calls that differ in op, shape and dtype. Each call uses the slots of the call two before it.
    Some calls have fewer rows than ranks."""
    norm, plain = "allreduce_rmsnorm_fp8", "allreduce"
    kinds = (
        (norm, (9, 520), "bfloat16"),
        (norm, (1, 520), "bfloat16"),
        (plain, (9, 520), "float32"),
        (norm, (1, 520), "bfloat16"),
        (norm, (9, 520), "bfloat16"),
        (plain, (9, 520), "bfloat16"),
    )
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        problems = [Problem(op, 4, shape, dtype, number=number) for number, (op, shape, dtype) in enumerate(kinds)]
        calls = [Calls(run, group, [problem], algo) for problem in problems]
        group.synchronize()
        for call in calls:
            call.launch(0, [rank.stream for rank in group])
        group.synchronize()
        for done in calls:
            done.compare()


def several_rounds(run: Run) -> None:
    """Check calls of push_two_shot in several rounds on 3 or 4 ranks. After each of these calls comes a push call of
    another kind."""
    ranks, norm, plain = int(run.choice((3, 4))), "allreduce_rmsnorm_fp8", "allreduce"
    with run.group(ranks, workspace_bytes=TIGHT_SLOTS, max_blocks=4) as group:
        calls = []
        for op, other in run.shuffled([(plain, norm), (norm, plain)]):
            options = {"pdl": run.choice(PDL), "max_num_blocks": run.choice((1, 3, 4))}
            calls.append(Calls(run, group, [Problem(op, ranks, (9, 520), "float32")], "push_two_shot", **options))
            calls.append(Calls(run, group, [Problem(other, ranks, (9, 520))], run.choice(PUSH), **options))
        group.synchronize()
        for call in calls:
            call.launch(0, [rank.stream for rank in group], late=run.choice((None, *range(ranks))))
        group.synchronize()
        for done in calls:
            done.compare()


def given_up(run: Run, algo: str = "push_one_shot") -> None:
    """Check a call that times out while clusters of blocks share its rows. One rank sends some rows completely, one row
    in part and the other rows not at all, so some threads of a cluster give up waiting while others do not. The calls
    after a reset must work."""
    with run.group(2, workspace_bytes=AMPLE, max_blocks=4) as group:
        streams = [rank.stream for rank in group]
        norm, stops = "allreduce_rmsnorm_fp8", run.choice((0, 1))
        options = {"pdl": run.choice(PDL), "max_num_blocks": run.choice((1, 4))}
        with config.override(spin_timeout=0.002), ANY_ORDER.made():
            whole, part = (Calls(run, group, [Problem(norm, 2, shape)], algo, **options) for shape in (ROWS, SHORTER))
            part.launch(0, streams, [stops])
            whole.launch(0, streams, [1 - stops])
        try:
            group.synchronize()
        except BarrierTimeout:
            group.reset()
        else:
            run.findings.append(Finding("mismatch", "the call ended without an error, though words were never sent"))
        calls = Calls(run, group, [Problem(norm, 2, ROWS, number=number) for number in range(2)], algo, **options)
        for number in range(len(calls)):
            calls.launch(number, streams)
        group.synchronize()
        calls.compare()
