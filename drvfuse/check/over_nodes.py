# SPDX-License-Identifier: Apache-2.0
"""Cases of groups of 4 GPUs that form two nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .calls import AMPLE, PDL, Calls, maybe_graph
from .collectives import FUSED, repeated
from .forms import ROWS
from .moves import OPS, Memory, MovingCall, moves
from .problems import Problem
from .run import Run

_REDUCING = (
    ("allreduce_many", ("auto",)),
    ("reduce_scatter", ("push", "pull")),
    ("reduce_scatter_rmsnorm_fp8", ("push", "pull")),
)
_SUMS = (("allreduce", ("two_stage",)), (FUSED, ("two_stage",)), *_REDUCING)
_INSIDE = ("auto", "push", "pull")
_REPLAYS = 3


def moving(run: Run) -> None:
    """All-gather, broadcast and all-to-all."""
    moves(run, algos=_INSIDE, ranks=4, nodes=2)


def reducing(run: Run) -> None:
    """The ops that add and are not plain all-reduces."""
    op, algos = run.choice(_REDUCING)
    repeated(run, op, run.choice(algos), shape=ROWS, side=False, nodes=2)


def mixed(run: Run) -> None:
    """Three collectives that add and three that move bytes, in random order in one graph, which is replayed.

    The replays follow one another without a wait of the host between the kernels of two calls. So each call uses the
    payloads, the slots and the words of the exchanges directly after a call of another kind, of the same replay or of
    the replay before it.
    """
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4, nodes=2) as group:
        assert group.link is not None
        group.link.engine.watched = run.chance()
        launches: list[Callable[..., None]] = []
        compared: list[Callable[[], None]] = []
        for op, algos in run.shuffled(_SUMS)[:3]:
            problem = Problem(op, 4, ROWS, residual="rmsnorm" in op and run.chance(), nodes=2)
            calls = Calls(run, group, [problem], run.choice(algos), pdl=run.choice(PDL))
            launches.append(partial(calls.launch, 0))
            compared.append(calls.compare)
        memory = Memory(run, group)
        for op in run.shuffled(OPS)[:3]:
            call = MovingCall(memory, op, run.choice(_INSIDE), run.choice(PDL), int(run.choice((1, 3, 4))))
            launches.append(partial(call.launch, alone=()))
            compared.append(partial(call.compare, run))
        streams = [rank.stream for rank in group]
        group.synchronize()
        with maybe_graph(group, streams, graph=True, replays=_REPLAYS):
            for launch in run.shuffled(launches):
                launch(streams, late=run.choice((None, 0, 1, 2, 3)))
        group.synchronize()
        for compare in compared:
            compare()
