# SPDX-License-Identifier: Apache-2.0
"""What the cases of collectives share: constants, `maybe_graph`, and calls of the reducing collectives (all-reduces and
reduce-scatters), each after kernels that write its inputs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .. import dtypes
from ..comm.group import Group
from ..comm.rank import Rank
from ..dtypes import DType
from ..ops.call.epilogue import Epilogue, float32
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives.rows.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.collectives.rows.reduce_scatter_rmsnorm_fp8 import reduce_scatter_rmsnorm_fp8
from ..ops.collectives.sums.allreduce import allreduce
from ..ops.collectives.sums.allreduce_many import allreduce_many
from ..ops.collectives.sums.reduce_scatter import reduce_scatter
from ..runtime.array import Array, view
from ..runtime.graph import Graph
from ..runtime.launch import Launch
from ..runtime.stream import Stream
from ..runtime.vmm import SymmetricBuffer
from .problems import EPSILON, Problem, solved
from .run import Run

AMPLE = 256 << 10  # bytes of a workspace in which every call has room for all of its data
PDL = (PDLLevel.OFF, PDLLevel.ON, PDLLevel.OVERLAP_AT_BEGINNING)
INPUTS, BOTH = "inputs", "both"


class Calls:
    """Calls of one collective, one for each of several problems. All calls read the same input arrays, to which a
    kernel before each call writes the inputs of its problem.
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
        lie in multicast memory. Results that are in place (`in_place`), or lie in multicast memory, are copied after
        the call, since the next call overwrites them."""
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
        """Queue kernels that write the inputs of call `number`, and the call: on all ranks together, or rank by rank in
        the order `alone`.

        Rank `late` writes its inputs three times, so that it usually begins the call after its peers.
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
        """Compare the results of all calls with the references. The group must be synchronised."""
        for problem, call, written in zip(self._problems, self._calls, self._written, strict=True):
            for name, arrays in written.items():
                for rank, array in enumerate(arrays):
                    what = f"{problem.op} {call.algo} {problem.shape} {problem.dtype}, call {problem.number}"
                    expected = solved(problem).results[rank][name]
                    self._run.compare(f"{what}, {name} of rank {rank}", array.numpy(), expected)


def _dtype(problem: Problem, result: str) -> DType:
    """Return the dtype of the array for the result `result`: that of the reference's result, except for FP4 codes,
    which the reference gives as bytes."""
    if result == "outputs" and problem.quantisation.dtype == dtypes.get(dtypes.FP4):
        return dtypes.get(dtypes.FP4)
    return dtypes.get(solved(problem).results[0][result].dtype)


def _cut(arrays: Sequence[Array]) -> list[list[Array]]:
    """Return the rows of each array, divided into three tensors."""
    return [[array[:1], array[1:4], array[4:]] for array in arrays]


def _private(rank: Rank, shape: Sequence[int], dtype: DType) -> Array:
    """Make an array that no other device can read."""
    memory = SymmetricBuffer([rank.device], math.prod(shape) * dtype.itemsize)
    return view(memory.ptrs[0], shape, dtype, rank.device, owner=memory)


def _multicast(group: Group, shape: Sequence[int], dtype: DType) -> list[Array]:
    """Make an array on each rank in multicast memory of the group."""
    memory = group.symmetric(math.prod(shape) * dtype.itemsize, multicast=True)
    return memory.arrays(shape, dtype)


@contextlib.contextmanager
def maybe_graph(group: Group, streams: Sequence[Stream], graph: bool, replays: int = 2) -> Iterator[None]:
    """A `with` block whose work is captured and then launched `replays` times; without `graph` it runs directly."""
    if not graph:
        yield
        return
    with Graph.capture(streams) as captured:
        yield
    for _ in range(replays):
        captured.launch(streams[0])
    group.synchronize()
    captured.close()
