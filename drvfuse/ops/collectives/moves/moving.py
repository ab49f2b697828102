# SPDX-License-Identifier: Apache-2.0
"""The common part of all-gather, broadcast and all-to-all. It makes a call from tables that say which bytes of which
rank go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ....plans import moves
from ....plans.traffic import Traffic
from ...call import operands, results
from ...call.operands import Operand
from ...call.options import PDLLevel
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence, Prepared
from ..shared import plan
from ..shared import prepare as collective_call
from ..shared.options import CallOptions
from ..shared.tuned import Tuned
from .copies import Copies
from .kernel import ALGORITHMS, RELAY, MoveKernel, MoveParams, MovePushParams
from .part import MovePart

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType
    from ....runtime.stream import Stream
    from ....trace.buffer import Trace

R = TypeVar("R")


def options(
    op: str,
    group: Group,
    algo: str,
    pdl_level: PDLLevel,
    max_num_blocks: int | None,
    trace: Trace | None,
    more: Sequence[str] = (),
) -> CallOptions:
    """Return the checked options of `op`. `more` are its algorithms besides `ALGORITHMS`.

    Raises Unsupported for an algorithm that the devices cannot run, and the errors of `plan.require_moves`.
    """
    checked = CallOptions.of(op, group, algo, (*ALGORITHMS, *more), pdl_level, max_num_blocks, trace)
    if group.link is not None:
        plan.require_moves(group, op, algo)
    elif algo != "auto":
        plan.require_peers(group, algo)
    return checked


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
    """Return the arrays to write: those that the caller gave for `argument`, or new ones. They are returned as operands
    and as the objects that the call returns. `shape` may be a list with a shape for each local rank."""
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
    """Prepare a call, which returns `result` when it is launched.

    `text` describes everything that must be equal on all ranks, besides op and algorithm. `same`: a rank sends the same
    bytes to all ranks. `root` is the root of a broadcast, None for other ops. `in_place_hazard`: bytes from a peer may
    overwrite bytes of an input that have not been read yet.
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
        MoveCall.sequence if work.nbytes else None,
        result,
        [[part.sources[position] for part in parts] for position in range(len(common.group))],
        [[part.targets[position] for part in parts] for position in range(len(common.group))],
        queues,
    )


@dataclass(frozen=True)
class MoveCall:
    """One kernel per rank that moves bytes between the ranks of a node: a whole call on one node, or a step of a call
    over several nodes.

    `work` describes the moves of all parts on all nodes. `described` is a description of what must be equal on all
    ranks besides op and algorithm.
    """

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
        """Return the algorithms to try one after another: the workspace may be too small for the first one."""
        group, algo = self.common.group, self.common.algo
        if algo == RELAY and self.work.ranks < 3:
            return ["push"]
        if algo != "auto":
            return [algo]
        if not group.peers_readable:
            return ["naive"]
        # the quicker algorithm first, as docs/performance.md shows
        best = ("pull", "put") if self.work.root is not None else ("put", "pull")
        with_barriers = next((algo for algo in best if self.direct(algo)), "pull")
        staged, costs = not self.direct(with_barriers), group.part(Tuned).costs
        return [moves.algorithm(costs, self.work, with_barriers, staged), with_barriers]

    def direct(self, algo: str) -> bool:
        """Whether the bytes go directly from inputs to outputs, without staging."""
        if self.in_place_hazard or (algo == "put" and self.work.arrangement is not None):
            return False
        if algo == "naive" or self.work.ranks == 1:
            return True
        far = [operand for part in self.parts for operand in (part.targets if algo == "put" else part.sources)]
        aligned = self.work.aligned(algo) and all(operand.ptr % 16 == 0 for operand in far)
        return aligned and all(part.reachable(self.common.group, algo == "put") for part in self.parts)

    def sequence(self) -> tuple[LaunchSequence, list[Ready]]:
        if self.algo == "naive":
            return Copies(self.common.group, self.parts, self.staged), []
        ready = self.ready()
        return Direct([one.launch for one in ready]), ready

    def ready(self) -> list[Ready]:
        """Return the launches of all local ranks, for an algorithm other than "naive"."""
        group, common = self.common.group, self.common
        own = [source.ptr for source in self.parts[0].sources]
        # On one node `work`, which is in the key too, has the tables of the parts, so the key need not have them twice.
        tables = () if group.link is None else tuple(part.table for part in self.parts)
        key = ("move", self.work, tables, self.algo, self.staged, common.blocks, common.alone)
        ready = plan.take(group, key, self._plan, [[]] * len(own), own, common.pdl, common.trace)
        for field, part in zip(("rows", "scales"), self.parts, strict=False):
            self._point(ready, field, part)
        return ready

    def _point(self, ready: Sequence[Ready], field: str, part: MovePart) -> None:
        group = self.common.group
        for one, rank, source, target in zip(ready, group, part.sources, part.targets, strict=True):
            to_input = one.fix if part.from_payloads else one.point
            to_output = one.fix if part.to_payloads else one.point
            to_input(f"{field}.input", source.ptr)
            to_output(f"{field}.output", target.ptr)
            if self.algo not in moves.PUSH and not self.staged:
                puts = self.algo == "put"
                (to_output if puts else to_input)(f"{field}.far", 0, *part.far(group, rank.index, puts))

    def _plan(self) -> plan.Plan:
        group, common, work = self.common.group, self.common, self.work
        # Only the kernels of "push" and of staged "pull" depend on `work.same`. For others `same` is always False, so
        # that none is compiled twice.
        same = work.same and (self.algo == "push" or (self.algo == "pull" and self.staged))
        arrangement = work.arrangement
        kernel = MoveKernel(self.algo, work.ranks, same, self.staged, arrangement is not None, plan.compares(group))

        def tailor(parameters: Any, rank: int) -> None:
            peers, place = group.layout.ranks(group.layout.of[rank]), group.layout.place(rank)
            for target, part in zip((parameters.rows, parameters.scales), self.parts, strict=False):
                target.tailor(part.table, peers, place)
            if kernel.pushes:
                parameters.offsets = parameters.rows.offsets | parameters.scales.offsets
            if arrangement is not None:
                parameters.arrangement.tailor(arrangement, peers, place)

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
