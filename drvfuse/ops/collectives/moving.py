# SPDX-License-Identifier: Apache-2.0
"""The common part of all-gather, broadcast and all-to-all: it makes a call from tables of moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ArgumentError, Unsupported, kind_of
from ...plans import moves
from ...plans.traffic import Traffic
from ..call import operands, results
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Ready
from ..call.prepared import Direct, Prepared, Schedule
from . import collective_call, plan
from .call_options import CallOptions
from .copies import Copies
from .move_kernels import ALGORITHMS, RELAY, MoveKernel, MoveParams, MovePushParams
from .tuned import Tuned

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.stream import Stream
    from ...trace.buffer import Trace

R = TypeVar("R")


@dataclass(frozen=True)
class MovePart:
    """The rows of a call, or their scales: an array for each local rank, and what is moved."""

    sources: Sequence[Operand]
    targets: Sequence[Operand]
    table: moves.Moves
    arrangement: moves.Arrangement | None = None
    """Of scales that do not arrive as they lie."""


def options(
    op: str,
    group: Group,
    algo: str,
    pdl_level: PDLLevel,
    max_num_blocks: int | None,
    trace: Trace | None,
    more: Sequence[str] = (),
) -> CallOptions:
    """The checked options of `op`, whose group is on one node. `more` are its algorithms besides `ALGORITHMS`.

    Raises Unsupported for a group over several nodes, and for an algorithm that the devices cannot run.
    """
    checked = CallOptions.of(op, group, algo, (*ALGORITHMS, *more), pdl_level, max_num_blocks, trace)
    if group.link is not None:
        raise Unsupported(f"{op} moves bytes within a node, and the group spans {group.nodes} nodes: split it by node")
    if algo != "auto":
        plan.require_peers(group, algo)
    return checked


def lengths(argument: str, value: Any, ranks: int) -> tuple[int, ...]:
    """A list with the number of rows of each rank, checked."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(argument, kind_of(value), f"a list of {ranks} numbers of rows, one for each rank")
    if len(value) != ranks:
        raise ArgumentError(argument, f"{len(value)} entries", f"{ranks} entries, one for each rank of the group")
    for position, rows in enumerate(value):
        if isinstance(rows, bool) or not hasattr(rows, "__index__") or rows < 0:
            raise ArgumentError(f"{argument}[{position}]", repr(rows), "an integer of at least 0: a number of rows")
    return tuple(map(int, value))


def outputs(
    group: Group,
    argument: str,
    given: Any,
    shape: tuple[int, ...] | list[tuple[int, ...]],
    dtype: DType,
    queues: Sequence[Stream],
    why: str,
    alignment: int = 1,
) -> tuple[list[Operand], list[Any]]:
    """Arrays, given or new, as operands and as what the caller gets. A list has a shape for each local rank."""
    targets = []
    if given is not None:
        targets = operands.of_ranks(group, argument, given, shape, dtype, why, alignment=alignment, writable=True)
    return results.of_ranks(group, argument, given, targets, shape, dtype, queues)


def prepare(
    common: CallOptions,
    text: str,
    parts: Sequence[MovePart],
    queues: Sequence[Stream],
    result: R,
    *,
    same: bool,
    root: int | None = None,
    in_place_hazard: bool = False,
) -> Prepared[R]:
    """The call. `text` describes everything that must be equal on all ranks, besides op and algorithm. `same`: a rank's
    bytes are the same for all. `root`: of a broadcast. `in_place_hazard`: a peer's bytes may come over bytes of an
    input that are still to be read.
    """
    work = moves.MoveWork(tuple(part.table for part in parts), same, root, parts[-1].arrangement)
    described = MoveCall(text, common, parts, work, in_place_hazard, common.algo, False)

    def make(algo: str) -> MoveCall:
        staged = work.nbytes > 0 and algo not in moves.PUSH and not described.direct(algo)
        return replace(described, algo=algo, staged=staged)

    return collective_call.prepare(
        common,
        described.algorithms() if work.nbytes else [common.algo],
        make,
        MoveCall.schedule if work.nbytes else None,
        result,
        [[part.sources[position] for part in parts] for position in range(len(common.group))],
        [[part.targets[position] for part in parts] for position in range(len(common.group))],
        queues,
    )


@dataclass(frozen=True)
class MoveCall:
    """A call by one algorithm; `described` is what must be equal on all ranks besides op and algorithm."""

    described: str
    common: CallOptions
    parts: Sequence[MovePart]
    work: moves.MoveWork
    in_place_hazard: bool
    algo: str
    staged: bool

    @property
    def name(self) -> str:
        """The name of the algorithm in `Prepared.algo`."""
        return self.algo

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        staged = " staged" if self.staged else ""
        return f"{self.common.op} {self.algo}{staged} {self.described}"

    def traffic(self) -> Traffic:
        return moves.traffic(self.work, self.algo, self.staged)

    def algorithms(self) -> list[str]:
        """The algorithms to try in turn, where the workspace is too small for the first."""
        group, algo = self.common.group, self.common.algo
        if algo == RELAY and group.size < 3:
            return ["push"]
        if algo != "auto":
            return [algo]
        if not group.peers_readable:
            return ["naive"]
        best = ("pull", "put") if self.work.root is not None else ("put", "pull")  # measured: docs/performance.md
        behind_barriers = next((algo for algo in best if self.direct(algo)), "pull")
        staged, costs = not self.direct(behind_barriers), group.part(Tuned).costs
        return [moves.algorithm(costs, self.work, behind_barriers, staged), behind_barriers]

    def direct(self, algo: str) -> bool:
        """Whether the bytes go directly from inputs to outputs, without staging."""
        if self.in_place_hazard or (algo == "put" and self.work.arrangement is not None):
            return False
        if algo == "naive":
            return True
        far = [operand for part in self.parts for operand in (part.targets if algo == "put" else part.sources)]
        aligned = self.work.aligned(algo) and all(operand.ptr % 16 == 0 for operand in far)
        return aligned and plan.readable_by_peers(self.common.group, far)

    def schedule(self) -> tuple[Schedule, list[Ready]]:
        group, common = self.common.group, self.common
        if self.algo == "naive":
            return Copies(group, self.parts, self.staged), []
        own = [source.ptr for source in self.parts[0].sources]
        key = ("move", self.work, self.algo, self.staged, common.blocks, common.alone)
        ready = plan.take(group, key, self._plan, [[]] * len(own), own, common.pdl, common.trace)
        for field, part in zip(("rows", "scales"), self.parts, strict=False):
            self._point(ready, field, part)
        return Direct([one.launch for one in ready]), ready

    def _point(self, ready: Sequence[Ready], field: str, part: MovePart) -> None:
        inputs, written = ([operand.ptr for operand in of] for of in (part.sources, part.targets))
        for position, one in enumerate(ready):
            one.point(f"{field}.input", inputs[position])
            one.point(f"{field}.output", written[position])
            if self.algo in moves.PUSH or self.staged:
                continue
            ranks = len(inputs)
            if self.algo == "put":
                far = [written[(position + distance) % ranks] for distance in range(1, ranks)]
            else:
                far = [inputs[position - distance] for distance in range(1, ranks)]
            one.point(f"{field}.far", 0, *far)

    def _plan(self) -> plan.Plan:
        group, common, work = self.common.group, self.common, self.work
        same = work.same and (
            self.algo == "push" or (self.algo == "pull" and self.staged)
        )  # only where kernels differ by it
        arrangement = work.arrangement
        kernel = MoveKernel(self.algo, group.size, same, self.staged, arrangement is not None, plan.compares(group))

        def tailor(parameters: Any, rank: int) -> None:
            for target, table in zip((parameters.rows, parameters.scales), work.tables, strict=False):
                target.tailor(table, rank)
            if arrangement is not None:
                parameters.arrangement.tailor(arrangement, rank)

        if kernel.pushes:
            pushed = moves.push_shape(work, group.workspace.payload_bytes)
            parameters = MovePushParams(most=work.most, chunk_packs=pushed.chunk, root=work.root or 0)
            made = plan.push(group, kernel, pushed, common.blocks, common.alone, parameters)
            return replace(made, tailor=tailor)
        chunk = moves.staged_chunk(work, self.algo, group.workspace.payload_bytes) if self.staged else 0
        shape = moves.barrier_shape(work, common.blocks, self.staged)
        return plan.Plan(
            kernel,
            shape.blocks,
            shape.threads,
            moves.trace_counts(work, shape, chunk),
            moves.barriers(work, chunk),
            MoveParams(most=work.most, chunk_packs=chunk),
            tailor=tailor,
        )
