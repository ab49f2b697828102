# SPDX-License-Identifier: Apache-2.0
"""Cases of collectives: sequences of calls on one group, with a kernel directly before each call that writes its
inputs.

The host waits once, at the end. So a rank that has completed a call at once overwrites its input, and uses the
workspaces again. If a peer may still read these, a case fails. Results of all calls are compared with
`drvfuse.reference`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import config, dtypes
from ..comm import workspace
from ..comm.group import Group
from ..comm.rank import Rank
from ..dtypes import DType
from ..ops.call.epilogue import Epilogue, float32
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives.allreduce import allreduce
from ..ops.collectives.allreduce_many import allreduce_many
from ..ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.collectives.reduce_scatter import reduce_scatter
from ..ops.collectives.reduce_scatter_rmsnorm_fp8 import reduce_scatter_rmsnorm_fp8
from ..runtime.array import Array, view
from ..runtime.graph import Graph
from ..runtime.launch import Launch
from ..runtime.stream import Stream
from ..runtime.vmm import SymmetricBuffer
from .problems import EPSILON, MAIN, Problem, solved
from .run import Run

AMPLE, TIGHT = 256 << 10, 20 << 10
TIGHT_SLOTS = 26 << 10  # half of it has room for a row of every rank and its results
SIDE = (((5, 61), "float16"), ((13, 72), "float32"), ((3, 264), "bfloat16"))
PDL = (PDLLevel.OFF, PDLLevel.ON, PDLLevel.OVERLAP_AT_BEGINNING)
INPUTS, BOTH = "inputs", "both"
FUSED = "allreduce_rmsnorm_fp8"


class Calls:
    """Calls of one collective on one set of input arrays, to which kernels write the inputs of one problem after
    another.
    """

    def __init__(
        self,
        run: Run,
        group: Group,
        problems: Sequence[Problem],
        algo: str,
        *,
        private: bool = False,
        in_place: bool = False,
        multicast: str = "",
        pdl: PDLLevel = PDLLevel.OFF,
        max_num_blocks: int | None = None,
    ) -> None:
        """`private` inputs can be read by their own device only. `multicast` says which arrays of a call by multimem
        lie in multicast memory. Results that are `in_place`, or lie in multicast memory, are copied after the call."""
        self._run, self._group, self._problems = run, group, problems
        self._copy = run.kernel(group.driver, "copy")
        for rank in group:
            self._copy.load(rank.device)
        self._pdl = pdl is not PDLLevel.OFF
        self._after: list[list[Launch]] = [[] for _ in problems]
        first = solved(problems[0])
        shape, dtype = first.hosts[0].shape, dtypes.get(first.hosts[0].dtype)
        inputs = [_private(rank, shape, dtype) if private else rank.empty(shape, dtype) for rank in group]
        if multicast:
            inputs = _multicast(group, shape, dtype)
        shared = inputs if in_place else _multicast(group, shape, dtype) if multicast == BOTH else None
        vectors = [rank.array(first.vector) for rank in group]
        residuals: list[Array] | None = None
        if first.residual is not None:
            kind = dtypes.get(first.residual.dtype)
            residuals = [rank.empty(problems[0].own(first.residual, rank.index).shape, kind) for rank in group]
        options: dict[str, Any] = {"algo": algo, "pdl_level": pdl, "max_num_blocks": max_num_blocks}
        if problems[0].op.startswith("allreduce") and problems[0].op != "allreduce_many":
            options["use_multimem"] = problems[0].multimem
        if problems[0].epilogue:
            options["epilogue"] = Epilogue("x * half + bias[col]", half=float32(0.5), bias=vectors)
        self._produce, self._calls, self._written = [], [], []
        for number, problem in enumerate(problems):
            solution = solved(problem)
            sources = [rank.array(host) for rank, host in zip(group, solution.hosts, strict=True)]
            produce = [[self._copying(*pair)] for pair in zip(sources, inputs, strict=True)]
            if residuals is not None and solution.residual is not None:
                for rank, launches, target in zip(group, produce, residuals, strict=True):
                    launches.append(self._copying(rank.array(problem.own(solution.residual, rank.index)), target))
            written = {
                name: [rank.empty(solution.results[rank.index][name].shape, _dtype(problem, name)) for rank in group]
                for name in solution.results[0]
            }
            outputs = written["outputs"]
            call: Prepared[Any]
            if problem.op == "reduce_scatter":
                call = reduce_scatter.prepare(group, inputs, outputs, splits=problem.splits, **options)
            elif problem.op == "allreduce_many":
                call = allreduce_many.prepare(group, _cut(inputs), _cut(outputs), **options)
            elif problem.op == "allreduce":
                call = allreduce.prepare(group, inputs, shared or outputs, **options)
                if shared:
                    self._after[number] = [self._copying(*pair) for pair in zip(shared, outputs, strict=True)]
            else:
                more: dict[str, Any] = options | problem.options | written | {"residuals": residuals}
                if problem.form == "layer":
                    more["betas"] = vectors
                if problem.op == "allreduce_rmsnorm_fp8":
                    call = allreduce_rmsnorm_fp8.prepare(group, inputs, vectors, epsilon=EPSILON, **more)
                else:
                    more["splits"] = problem.splits
                    call = reduce_scatter_rmsnorm_fp8.prepare(group, inputs, vectors, epsilon=EPSILON, **more)
            self._produce.append(produce)
            self._calls.append(call)
            self._written.append(written)

    def __len__(self) -> int:
        return len(self._calls)

    def _copying(self, source: Array, target: Array) -> Launch:
        blocks = 2 if source.nbytes > 4096 else 1
        return self._copy.prepare(blocks, 128, source, target, source.nbytes, device=target.device, pdl=self._pdl)

    def launch(
        self, number: int, streams: Sequence[Stream], alone: Sequence[int] = (), late: int | None = None
    ) -> None:
        """Queue call `number` after kernels that write its inputs: on all ranks together, or in the order `alone`.

        Rank `late` writes its inputs three times.
        """
        call, produce, after = self._calls[number], self._produce[number], self._after[number]
        for position in alone or range(len(streams)):
            for launch in produce[position] * (3 if position == late else 1):
                launch(streams[position])
            if alone:
                call.launch(rank=position, stream=streams[position])
        if not alone:
            call.launch(streams)
        for position, launch in enumerate(after):
            launch(streams[position])

    def compare(self) -> None:
        """Compare the results of all calls. The group must be synchronised."""
        for problem, call, written in zip(self._problems, self._calls, self._written, strict=True):
            for name, arrays in written.items():
                for rank, array in enumerate(arrays):
                    what = f"{problem.op} {call.algo} {problem.shape} {problem.dtype}, call {problem.number}"
                    expected = solved(problem).results[rank][name]
                    self._run.compare(f"{what}, {name} of rank {rank}", array.numpy(), expected)


def _dtype(problem: Problem, result: str) -> DType:
    """The dtype of one of the results. FP4 codes are bytes in the reference."""
    if result == "outputs" and problem.quantisation.dtype == dtypes.get(dtypes.FP4):
        return dtypes.get(dtypes.FP4)
    return dtypes.get(solved(problem).results[0][result].dtype)


def _cut(arrays: Sequence[Array]) -> list[list[Array]]:
    """The rows of each array as three tensors."""
    return [[array[:1], array[1:4], array[4:]] for array in arrays]


def _private(rank: Rank, shape: Sequence[int], dtype: DType) -> Array:
    """Make an array that no other device can read."""
    memory = SymmetricBuffer([rank.device], math.prod(shape) * dtype.itemsize)
    return view(memory.ptrs[0], shape, dtype, rank.device, owner=memory)


def _multicast(group: Group, shape: Sequence[int], dtype: DType) -> list[Array]:
    """An array on each rank in multicast memory of the group."""
    memory = group.symmetric(math.prod(shape) * dtype.itemsize, multicast=True)
    return memory.arrays(shape, dtype)


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
    """Two calls on 4 GPUs, by default with 64 KiB per rank. The seed selects the options that are None.

    With `side` a call of another shape and dtype comes between the two. `private` inputs are staged. With `tight` the
    workspace holds only a fraction of them. With `graph` the sequence is replayed twice from a graph. With `alone` the
    ranks are launched one by one, in another order. With `multimem`, `multicast` says which arrays lie in multicast
    memory: "" (none), INPUTS, or BOTH inputs and outputs. The GPUs form `nodes` nodes. `form` is the form of both
    calls.
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


@contextlib.contextmanager
def maybe_graph(group: Group, streams: Sequence[Stream], graph: bool, replays: int = 2) -> Iterator[None]:
    """A block whose work is captured and then launched `replays` times; without `graph` it runs directly."""
    if not graph:
        yield
        return
    with Graph.capture(streams) as captured:
        yield
    for _ in range(replays):
        captured.launch(streams[0])
    group.synchronize()
    captured.close()


def mixed(run: Run, multimem: bool = False) -> None:
    """Both ops by all algorithms in random order on one group of 2, 3 or 8 ranks, with changing grids and streams."""
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
        _on_two_streams(run, group, calls)


def in_place(run: Run) -> None:
    """All-reduces whose outputs are their inputs, by every algorithm."""
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        problems = [Problem("allreduce", 4, (9, 520), number=number) for number in range(2)]
        calls = [
            Calls(run, group, problems, algo, in_place=True, pdl=run.choice(PDL))
            for algo in ("one_stage", "two_stage", "naive")
        ]
        _on_two_streams(run, group, calls)


def multimem_in_place(run: Run) -> None:
    """All-reduces by multimem whose outputs are their inputs, in multicast memory and elsewhere, with and without an
    epilogue. Between these calls there are calls without multicast.
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
        _on_two_streams(run, group, calls)


def epilogue(run: Run) -> None:
    """All-reduces with an epilogue that reads an array of each rank."""
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        problems = [Problem("allreduce", 4, (9, 520), epilogue=True, number=number) for number in range(2)]
        calls = [Calls(run, group, problems, algo, pdl=run.choice(PDL)) for algo in ("one_stage", "naive")]
        _on_two_streams(run, group, calls)


def two_streams(run: Run, algo: str = "two_stage") -> None:
    """Two all-reduces with separate arrays, on two streams of each rank."""
    with run.group(4, workspace_bytes=AMPLE, max_blocks=4) as group:
        calls = [
            Calls(run, group, [Problem("allreduce", 4, (9, 520), number=10 * i + n) for n in range(2)], algo)
            for i in range(2)
        ]
        _on_two_streams(run, group, calls, shuffle=False)


def _on_two_streams(run: Run, group: Group, calls: Sequence[Calls], shuffle: bool = True) -> None:
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
    """Calls during which the barriers' ordinals, or the epochs of push calls, pass 2**32.

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
