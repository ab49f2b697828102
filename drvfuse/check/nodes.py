# SPDX-License-Identifier: Apache-2.0
"""Cases of groups of 4 GPUs that form two nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..comm.group import Group
from ..comm.workspace import ABORT_OFFSET
from ..emu import Machine
from ..errors import NodeFailed
from ..runtime.array import view
from .calls import AMPLE, PDL, Calls, maybe_graph
from .moves import OPS, Memory, MovingCall, moves
from .problems import Problem
from .rows import ROWS
from .run import Finding, Run
from .shared import FUSED, repeated

_REDUCING = (
    ("allreduce_many", ("auto",)),
    ("reduce_scatter", ("push", "pull")),
    ("reduce_scatter_rmsnorm_fp8", ("push", "pull")),
)
# Ops that sum, with the algorithms to check. Between nodes the first three exchange partial sums together with their
# status; the two reduce-scatters exchange partial sums as bytes.
_SUMS = (("allreduce", ("two_stage",)), (FUSED, ("two_stage",)), *_REDUCING)
_INSIDE = ("auto", "push", "pull")
_REPLAYS = 3
_TO_ALL_NODES = ("all_gather", "scales", "arranged", "all_to_all")  # ops in which every node sends to all other nodes


def moving(run: Run) -> None:
    """Check all-gather, broadcast and all-to-all over two nodes."""
    moves(run, algos=_INSIDE, ranks=4, nodes=2)


def reducing(run: Run) -> None:
    """Check `allreduce_many` or a reduce-scatter over two nodes; the seed selects the op."""
    op, algos = run.choice(_REDUCING)
    repeated(run, op, run.choice(algos), shape=ROWS, side=False, nodes=2)


def mixed(run: Run) -> None:
    """Check three collectives that sum and three that move bytes, in random order in one graph, which is replayed.

    The replays follow one another without a wait of the host between the kernels of two calls. So each call uses the
    payloads, the slots, and the words that exchanges send (status and abort words) directly after another call has used
    them, in the same replay or in the one before.
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


def failing_sums(run: Run) -> None:
    """Check that a node learns when kernels of another node give up (`_failing`), in an op that exchanges partial sums
    together with their status."""
    nodes = run.choice((2, 4))
    with run.machine(4) as machine, _group(machine, nodes) as group:
        op, algos = run.choice(_SUMS[:3])
        problems = [Problem(op, 4, ROWS, number=number, nodes=nodes) for number in range(2)]
        calls = Calls(run, group, problems, algos[0], pdl=run.choice(PDL))
        streams = [rank.stream for rank in group]
        launches = [partial(calls.launch, number, streams) for number in range(2)]
        _failing(run, group, launches, calls.compare, contextlib.nullcontext())


def failing_bytes(run: Run) -> None:
    """Check that a node learns when kernels of another node give up (`_failing`), in an op whose exchanges of bytes
    also carry the abort words. Kernels that give up do not order their accesses, and an exchange may copy an abort word
    while a peer sets it. So races are ignored in the call that fails."""
    nodes = run.choice((2, 4))
    with run.machine(4) as machine, _group(machine, nodes) as group:
        call = MovingCall(Memory(run, group), run.choice(_TO_ALL_NODES), run.choice(_INSIDE), run.choice(PDL), 3)
        streams = [rank.stream for rank in group]
        launches = [partial(call.launch, streams, (), late) for late in (None, 1)]
        _failing(run, group, launches, partial(call.compare, run), run.ignored(machine, "race"))


def _group(machine: Machine, nodes: int) -> Group:
    return Group.local(4, driver=machine, workspace_bytes=AMPLE, max_blocks=4, nodes=nodes)


def _failing(
    run: Run,
    group: Group,
    launches: Sequence[Callable[[], None]],
    compare: Callable[[], None],
    during: contextlib.AbstractContextManager[None],
) -> None:
    """Call `launches[0]`, and then `launches[1]` in the `with` block `during`, in which the kernels of one node give
    up. A rank of another node must raise NodeFailed, and the group must work after a reset."""
    launches[0]()
    group.synchronize()
    failed = int(run.random.integers(group.nodes))
    with during:
        _give_up(group, failed)
        launches[1]()
        try:
            group.synchronize()
        except NodeFailed as error:
            if error.failed != failed or error.node == failed:
                run.findings.append(Finding("mismatch", f"node {failed} gave up, and not: {error}"))
        else:
            run.findings.append(Finding("mismatch", f"node {failed} gave up, and no other node learned of it"))
    group.reset()
    for launch in launches:
        launch()
    group.synchronize()
    compare()


def _give_up(group: Group, node: int) -> None:
    """Set the abort words of the ranks of `node`, as kernels do when they give up."""
    for rank in group:
        if group.layout.of[rank.index] == node:
            word = view(group.workspace.pointers[rank.index] + ABORT_OFFSET, 1, "uint64", rank.device)
            word.copy_from(np.ones(1, np.uint64))
