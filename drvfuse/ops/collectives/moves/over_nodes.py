# SPDX-License-Identifier: Apache-2.0
"""All-gather, broadcast and all-to-all over several nodes.

`plans.moves_over_nodes` plans the steps. A step inside the nodes is a kernel as on one node, by the algorithm that the
caller asked for. In a step between nodes the engine exchanges bytes, from where they lie to their place in the outputs.

Memory ordering. The kernels and exchanges of a rank follow one another in its stream. So a kernel reads what the
previous exchange has received, and an exchange sends what the previous kernel has left in this rank's memory. In a step
inside the node, the kernels of peers store to this memory only while this rank's kernel of the step runs (move.cu,
move_push.cu). So a payload is written again only after the exchange that reads it.

Peers may still read a payload as staging when the kernel that staged there has ended. On one node this does no harm, as
the next call stages in the other half. Over several nodes a kernel that stores to a payload comes after a barrier of
the node's ranks: "put" begins with one, and "push", which has none, follows a kernel that only passes barriers.

Scales by column or in tiles are received in payloads, since the scales of a rank are not contiguous in an output. This
exchange follows a kernel of the call that begins with a barrier and stages nothing, or else a kernel that only passes
barriers. The kernels that rearrange the scales pull them directly from the payloads, and end with a barrier. After it
no peer reads the payload any more, and the next chunk may be received. The kernels of the rows, which may stage in the
payloads, come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ....comm.workspace import PAYLOAD_OFFSET
from ....errors import ArgumentError
from ....plans import moves, moves_over_nodes
from ....plans.moves_over_nodes import Crossing, Inside, NodeRanks, Place
from ....plans.traffic import NONE, Traffic
from ....runtime.array import view
from ...call import operands
from ...call.planned import Ready
from ...call.prepared import LaunchSequence, Prepared
from ..nodes.stages import AcrossNodes, Bytes, ExchangeAddresses, Kernels, Span, Stage, level_inside
from ..shared import plan
from ..shared import prepare as collective_call
from ..shared.options import CallOptions
from ..shared.tuned import Tuned
from .kernel import RELAY, MoveKernel, MoveParams
from .moving import MoveCall
from .part import MovePart

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.stream import Stream
    from ...call.operands import Operand

R = TypeVar("R")


def barrier(options: CallOptions) -> list[Ready]:
    """Return launches of a kernel that moves nothing and passes barriers of the node's ranks.

    Peers may still read results or staged inputs in a payload when the kernels of the previous call have ended. So this
    kernel precedes a kernel that stores to payloads and has no barrier before its stores.
    """
    group = options.group

    def planned() -> plan.Plan:
        inside, none = range(group.layout.inside), moves.Move(0, 0, 0)
        work = moves.MoveWork((tuple(tuple(none for _ in inside) for _ in inside),), same=False)
        shape = moves.barrier_shape(work, options.blocks, False)
        kernel = MoveKernel("put", work.ranks, False, False, False, plan.compares(group))
        counts, steps = moves.trace_counts(work, shape, 0), moves.barriers(work, 0)
        return plan.Plan(kernel, shape.blocks, shape.threads, counts, steps, MoveParams())

    nothing = [0] * len(group)
    level = level_inside(options.pdl)
    return plan.take(group, ("barrier",), planned, [[]] * len(group), nothing, level, options.trace)


class ToPayloads(MovePart):
    """The part of a step whose targets are payloads, which all ranks of a node can access."""

    to_payloads = True

    def reachable(self, group: Group, targets: bool) -> bool:
        return targets

    def far(self, group: Group, rank: int, targets: bool) -> list[int]:
        return _far_payloads(group, rank, 1)


class FromPayloads(MovePart):
    """The part of a step whose sources are payloads, which all ranks of a node can access."""

    from_payloads = True

    def reachable(self, group: Group, targets: bool) -> bool:
        return not targets

    def far(self, group: Group, rank: int, targets: bool) -> list[int]:
        return _far_payloads(group, rank, -1)


class _NoRows(FromPayloads):
    """A part without bytes, in place of the rows, for a step that moves only scales."""

    to_payloads = True


def _far_payloads(group: Group, rank: int, direction: int) -> list[int]:
    """Return the addresses of the payloads of a rank's peers. The next rank of the node comes first if `direction` is
    1, the previous rank if it is -1."""
    peers, place = group.layout.ranks(group.layout.of[rank]), group.layout.place(rank)
    others = [peers[(place + direction * distance) % len(peers)] for distance in range(1, len(peers))]
    return [group.workspace.pointers[peer] + PAYLOAD_OFFSET for peer in others]


def prepare(
    common: CallOptions,
    text: str,
    parts: Sequence[MovePart],
    steps: Sequence[moves_over_nodes.Step],
    queues: Sequence[Stream],
    result: R,
    in_place_hazard: bool = False,
) -> Prepared[R]:
    """Prepare the call that consists of `steps`; the other arguments are those of `moving.prepare`."""
    call = NodeMoveCall(common, text, parts, steps, in_place_hazard)
    return collective_call.prepare(
        common,
        [common.algo],
        lambda algo: call,
        NodeMoveCall.sequence if steps else None,
        result,
        [[part.sources[position] for part in parts] for position in range(len(common.group))],
        [[part.targets[position] for part in parts] for position in range(len(common.group))],
        queues,
    )


@dataclass(frozen=True)
class NodeMoveCall:
    """A call over several nodes; `described` is what must be equal on all ranks besides op and algorithm."""

    common: CallOptions
    described: str
    parts: Sequence[MovePart]
    steps: Sequence[moves_over_nodes.Step]
    in_place_hazard: bool

    @property
    def ranks(self) -> NodeRanks:
        return NodeRanks(self.common.group.layout.of)

    @property
    def name(self) -> str:
        """The name of the algorithm in `Prepared.algo`."""
        return self.common.algo

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        return f"{self.common.op} {self.name} {self.described}"

    def traffic(self) -> Traffic:
        total = NONE
        for step in self.steps:
            if isinstance(step, Inside):
                kernel = self._kernel(step)
                for node in range(self.ranks.count):
                    tables = tuple(self.ranks.of_node(table, node) for table in step.tables)
                    total += moves.traffic(moves.MoveWork(tables, step.same, step.root), kernel.algo, kernel.staged)
            else:
                total += moves_over_nodes.crossing_traffic(step)
        return total

    def sequence(self) -> tuple[LaunchSequence, list[Ready]]:
        stages: list[Stage] = []
        every: list[Ready] = []
        last = max(number for number, step in enumerate(self.steps) if isinstance(step, Inside))
        payloads_free = self.ranks.inside == 1  # whether no peer can still read this rank's payload
        for number, step in enumerate(self.steps):
            if isinstance(step, Inside):
                kernel = self._kernel(step)
                if number != last:
                    kernel = replace(kernel, common=replace(kernel.common, pdl=level_inside(self.common.pdl)))
                if self._barrier_first(step, kernel):
                    met = barrier(self.common)
                    stages.append(Kernels(met))
                    every += met
                ready = kernel.ready()
                stages.append(Kernels(ready))
                every += ready
                payloads_free |= kernel.algo not in moves.PUSH and not kernel.staged
            else:
                if not payloads_free and any(crossing.target is Place.PAYLOAD for crossing in step):
                    met = barrier(self.common)
                    stages.append(Kernels(met))
                    every += met
                stages.append(self._exchange(step))
        return AcrossNodes(self.common.group, stages), every

    def _kernel(self, step: Inside) -> MoveCall:
        """Return the kernel of a step, by an algorithm for which the workspace is large enough."""
        group = self.common.group
        if step.source is Place.PAYLOAD:
            return self._rearranging(step)
        found: list[MovePart] = []
        for table, part in zip(step.tables, self.parts, strict=False):
            sources = part.sources if step.source is Place.INPUT else part.targets
            if step.target is Place.PAYLOAD:
                found.append(ToPayloads(sources, _payloads(group), table))
            else:
                found.append(MovePart(sources, part.targets, table))
        hazard = self.in_place_hazard and step.target is Place.OUTPUT
        common = self.common
        # A relay passes on the bytes of one rank, the root of a step. Steps without a root are pushed.
        if common.algo == RELAY and step.root is None:
            common = replace(common, algo="push")
        call = MoveCall(self.text, common, found, moves_over_nodes.work_of(step, self.ranks), hazard, "", False)
        if step.target is not Place.PAYLOAD:
            first, *others = call.algorithms()
            algo = others[-1] if others and first in moves.PUSH and not self._has_slots(call) else first
            return replace(call, algo=algo, staged=algo not in moves.PUSH and not call.direct(algo))
        # "put" only without staging, since it would stage in the payload, which is its target
        puts = call.direct("put") and self.common.algo != "push"
        if puts and self.common.algo == "auto" and self._has_slots(call):
            puts = moves.algorithm(group.part(Tuned).costs, call.work, "put", False) == "put"
        return replace(call, algo="put" if puts else "push")

    def _rearranging(self, step: Inside) -> MoveCall:
        """Return the kernel that rearranges scales from payloads. Its algorithm is "pull", which needs no room in
        the workspace."""
        scales, payloads = self.parts[-1], _payloads(self.common.group)
        targets = [
            operands.made(
                "gathered_scales",
                view(target.ptr + step.begin, target.array.nbytes - step.begin, "uint8", target.device),
            )
            for target in scales.targets
        ]
        rows = _NoRows(payloads, payloads, self.ranks.table({}))
        found = [rows, FromPayloads(payloads, targets, step.tables[-1])]
        work = moves_over_nodes.work_of(replace(step, tables=(rows.table, step.tables[-1])), self.ranks)
        return MoveCall(self.text, self.common, found, work, False, "pull", False)

    def _has_slots(self, call: MoveCall) -> bool:
        """Whether the slots of the workspace are large enough for the algorithm "push"."""
        try:
            moves.push_shape(call.work, self.common.group.workspace.payload_bytes)
        except ArgumentError:
            return False
        return True

    def _barrier_first(self, step: Inside, kernel: MoveCall) -> bool:
        """Whether a barrier of the node's ranks must precede the kernel of the step."""
        return step.target is Place.PAYLOAD and kernel.algo == "push" and self.ranks.inside > 1

    def _exchange(self, crossings: Sequence[Crossing]) -> Bytes:
        group, addresses = self.common.group, ExchangeAddresses()
        memory = {
            Place.INPUT: [[addresses.of_array(source.ptr) for source in part.sources] for part in self.parts],
            Place.OUTPUT: [[addresses.of_array(target.ptr) for target in part.targets] for part in self.parts],
            Place.PAYLOAD: [[addresses.fixed(payload.ptr) for payload in _payloads(group)]] * len(self.parts),
        }
        position = {rank.index: number for number, rank in enumerate(group)}
        sent: list[list[Span]] = [[] for _ in position]
        received: list[list[Span]] = [[] for _ in position]
        for one in crossings:
            sender, receiver = position.get(one.sender), position.get(one.receiver)
            if sender is not None:
                base = memory[one.source][one.part][sender]
                sent[sender].append(Span(group.layout.of[one.receiver], base, one.source_offset, one.nbytes))
            if receiver is not None:
                base = memory[one.target][one.part][receiver]
                received[receiver].append(Span(group.layout.of[one.sender], base, one.target_offset, one.nbytes))
        return Bytes(group, addresses, sent, received)


def _payloads(group: Group) -> list[Operand]:
    """Return the payloads of the local ranks."""
    nbytes = group.workspace.payload_bytes
    begins = [group.workspace.pointers[rank.index] + PAYLOAD_OFFSET for rank in group]
    return [
        operands.made("payload", view(begin, nbytes, "uint8", rank.device))
        for begin, rank in zip(begins, group, strict=True)
    ]
