# SPDX-License-Identifier: Apache-2.0
"""Cases of collectives: sequences of calls on one group, with a kernel directly before each call that writes its
inputs.

The host waits once, at the end. So a rank that has completed a call overwrites its input at once, and uses the
workspaces again. If a peer still reads the old input or the old words of a workspace at that time, the case has a
finding. Results of all calls are compared with `drvfuse.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import config
from ..comm import workspace
from ..comm.group import Group
from ..ops.call.options import PDLLevel
from ..runtime.array import view
from ..runtime.stream import Stream
from .calls import AMPLE, BOTH, INPUTS, PDL, Calls, maybe_graph
from .problems import MAIN, Problem
from .run import Run

TIGHT = 20 << 10
TIGHT_SLOTS = 26 << 10  # bytes of the slots; one half of them holds one row of every rank and the results
SIDE = (((5, 61), "float16"), ((13, 72), "float32"), ((3, 264), "bfloat16"))
FUSED = "allreduce_rmsnorm_fp8"


def repeated(
    run: Run,
    op: str,
    algo: str,
    *,
    private: bool | None = None,
    residual: bool | None = None,
    tight: bool | None = None,
    graph: bool | None = None,
    pdl: PDLLevel | None = None,
    blocks: int | None = None,
    alone: bool | None = None,
    side: bool | None = None,
    multimem: bool = False,
    multicast: str | None = None,
    shape: tuple[int, int] = MAIN,
    nodes: int = 1,
    form: str = "",
) -> None:
    """Check two calls on 4 GPUs, by default with inputs of 64 KiB. The seed selects the options that are None.

    With `side` a call of another shape and dtype comes between the two calls. `private` inputs are staged. With `tight`
    the workspace holds only a fraction of the inputs. With `graph` the sequence is replayed twice from a graph. With
    `alone` the ranks are launched one by one, in a random order. With `multimem`, `multicast` says which arrays lie in
    multicast memory: "" (none), INPUTS, or BOTH (inputs and outputs). The GPUs form `nodes` nodes. `form` is the form
    of both calls.
    """
    naive = algo == "naive"
    if multimem:
        multicast = run.choice(("", INPUTS, BOTH)) if multicast is None else multicast
        private = False
    private = not naive and (run.chance(0.3) if private is None else private)
    residual = "rmsnorm" in op and (run.chance() if residual is None else residual)
    tight = run.chance(0.3) if tight is None else tight
    graph = run.chance(0.25) if graph is None else graph
    pdl = run.choice(PDL) if pdl is None else pdl
    blocks = int(run.choice((1, 3, 4))) if blocks is None else blocks
    small = TIGHT_SLOTS if algo == "push_two_shot" else TIGHT
    with run.group(4, workspace_bytes=small if tight else AMPLE, max_blocks=4, nodes=nodes) as group:
        kind: dict[str, Any] = {"residual": residual, "multimem": multimem, "nodes": nodes}
        problems = [Problem(op, 4, shape, number=number, form=form, **kind) for number in range(2)]
        options: dict[str, Any] = {"private": private, "multicast": multicast or ""}
        calls = [Calls(run, group, problems, algo, **options, pdl=pdl, max_num_blocks=blocks)]
        if run.chance() if side is None else side:
            other, dtype = run.choice(SIDE)
            problem = Problem(op, 4, other, dtype, **kind)
            calls.append(Calls(run, group, [problem], algo, pdl=run.choice(PDL)))
        alone = not naive and nodes == 1 and (run.chance() if alone is None else alone)
        order = run.shuffled(range(4)) if alone else ()
        late = run.choice((None, 0, 1, 2, 3))
        streams = [rank.stream for rank in group]
        with maybe_graph(group, streams, graph):
            calls[0].launch(0, streams, order, late)
            for more in calls[1:]:
                more.launch(0, streams, order, late)
            calls[0].launch(1, streams, order, late)
        group.synchronize()
        for done in calls:
            done.compare()


def mixed(run: Run, multimem: bool = False) -> None:
    """Check `allreduce` and `allreduce_rmsnorm_fp8` on one group of 2, 3 or 8 ranks, by pull algorithms and "naive" in
    random order, with changing grids and streams. With `multimem` all calls use multicast, and none is by "naive"."""
    ranks = (2, 3, 8)[run.seed % 3]
    kinds = [(op, algo) for op in ("allreduce", FUSED) for algo in ("one_stage", "two_stage", "naive")]
    if multimem:
        kinds = [("allreduce", "one_stage"), ("allreduce", "two_stage"), (FUSED, "two_stage")]
    with run.group(ranks, workspace_bytes=AMPLE, max_blocks=4) as group:
        calls = []
        for op, algo in kinds:
            problem = Problem(op, ranks, (7, 136), multimem=multimem)
            options: dict[str, Any] = {"max_num_blocks": int(run.random.integers(1, 5)), "pdl": run.choice(PDL)}
            if multimem:
                options["multicast"] = run.choice(("", INPUTS))
            calls.append(Calls(run, group, [problem], algo, **options))
        on_two_streams(run, group, calls)


def two_streams(run: Run, algo: str = "two_stage") -> None:
    """Check two sequences of all-reduces, each with its own arrays, on two streams of each rank."""
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        calls = [
            Calls(run, group, [Problem("allreduce", 4, (9, 520), number=10 * i + n) for n in range(2)], algo)
            for i in range(2)
        ]
        on_two_streams(run, group, calls, shuffle=False)


def on_two_streams(run: Run, group: Group, calls: Sequence[Calls], shuffle: bool = True) -> None:
    """Launch all calls, alternating between each rank's own stream and another one, and compare their results."""
    streams = [[rank.stream for rank in group], [Stream(rank.device) for rank in group]]
    group.synchronize()
    order = [(which, number) for number in range(len(calls[0])) for which in range(len(calls))]
    for which, number in run.shuffled(order) if shuffle else order:
        calls[which].launch(number, streams[which % 2])
    for members in streams:
        for stream in members:
            stream.synchronize()
    group.synchronize()
    for done in calls:
        done.compare()


def near_32_bits(
    run: Run,
    op: str = "allreduce",
    algo: str = "two_stage",
    shape: tuple[int, int] = (9, 520),
    form: str = "",
    timeout: float = 10.0,
    pdl: PDLLevel = PDLLevel.OFF,
) -> None:
    """Check calls during which the number of barriers, or the epoch of push calls, passes 2**32.

    Kernels stop waiting after `timeout` seconds.
    """
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        group.synchronize()
        for pointer, rank in zip(group.workspace.pointers, group, strict=True):
            word = view(pointer + workspace.EPOCH_OFFSET, 1, "uint64", rank.device)
            word.copy_from(np.array([(2**32 - 1 - int(run.seed % 4)) * workspace.EPOCH_UNIT], np.uint64))
        problems = [Problem(op, 4, shape, number=number, form=form) for number in range(3)]
        with config.override(spin_timeout=timeout):
            calls = Calls(run, group, problems, algo, pdl=pdl)
        streams = [rank.stream for rank in group]
        for number in range(len(calls)):
            calls.launch(number, streams)
        group.synchronize()
        calls.compare()
