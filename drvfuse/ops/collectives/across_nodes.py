# SPDX-License-Identifier: Apache-2.0
"""The schedule of a call over several nodes: kernels, and exchanges between the nodes, one after another.

The stages follow one another on each rank's stream. With dependent launch the first kernel is a dependent of the kernel
in front of the call, and the kernel behind the call is a dependent of the last kernel. The engine's work is no
dependent launch: the kernel in front of it triggers at its end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...errors import ArgumentError, Unsupported
from ...nodes.exchange import Part, Piece, Pieces
from ...nodes.link import PROGRESS_FIELDS
from ...plans import moves
from ...runtime.graph import capturing
from ..call.options import PDLLevel
from ..call.planned import PlanCache, Planned, Ready
from ..call.prepared import require_one_side
from ..call.specialisation import Specialisation
from . import plan
from .call_options import CallOptions
from .move_kernels import MoveKernel, MoveParams

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...nodes.link import NodeLink
    from ...runtime.launch import Launch
    from ...runtime.stream import Stream


def link(group: Group) -> NodeLink:
    """The link of a group over several nodes, which exchanges data between the nodes."""
    assert group.link is not None
    return group.link


def require_moves(group: Group, op: str, algo: str) -> None:
    """Raise an error unless `op` can run by `algo` on a group over several nodes: ArgumentError for "naive",
    Unsupported if the devices of a node lack peer access or the engine cannot move bytes.
    """
    if algo == "naive":
        raise ArgumentError("algo", '"naive"', 'another algorithm, such as "auto", as the group is over several nodes')
    plan.require_peers(group, algo)
    link(group).require_all_to_all(op)


def sources_inside(group: Group, inputs: Sequence[int]) -> list[Sequence[int]]:
    """For each local rank the addresses that it sums, of `inputs` by local rank: those of its node's ranks. None where
    they are in other processes."""
    layout = group.layout
    if layout.inside == 1:
        return [[own] for own in inputs]
    if not group.together:
        return [[]] * len(inputs)
    return [[inputs[peer] for peer in layout.ranks(layout.of[rank.index])] for rank in group]


def level_inside(pdl: PDLLevel) -> PDLLevel:
    """The PDL level of all kernels of a call except the last: they trigger at their end."""
    return PDLLevel.OFF if pdl is PDLLevel.OFF else PDLLevel.ON


def barrier(options: CallOptions) -> list[Ready]:
    """Launches of a kernel that moves nothing and passes barriers of the node's ranks.

    Peers may still read a payload when the kernels of the call in front have ended: results, or staged inputs. So this
    kernel precedes one that stores to payloads and has no barrier before its stores.
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


class Stage(Protocol):
    """A stage of a call on all local ranks. `launches` are its kernels, by local rank."""

    @property
    def launches(self) -> Sequence[Launch]: ...

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        """Queue the work on the stream of each local rank."""


class Kernels:
    """A stage with one kernel per local rank."""

    def __init__(self, ready: Sequence[Ready]) -> None:
        self.launches = [one.launch for one in ready]

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        for launch, stream in zip(self.launches, streams, strict=True):
            launch(stream)


class Sums:
    """An exchange of partial sums between the ranks with equal numbers inside their nodes, each of which gets all sums.
    `memory` has the address and the count of the float32 numbers of each local rank."""

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        self.launches: Sequence[Launch] = []
        self._memory = memory

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        each = zip(link.members, self._memory, streams, strict=True)
        link.exchange([Part(member, address, count, stream) for member, (address, count), stream in each])


class Bytes:
    """An exchange of bytes: the pieces that each local rank sends and receives. Where the engine's waits are not
    bounded, `counters` are kernels in front of it and behind it that tell the host whether the exchange has ended."""

    def __init__(self, group: Group, sent: Sequence[Sequence[Piece]], received: Sequence[Sequence[Piece]]) -> None:
        self.launches: Sequence[Launch] = []
        self._pieces = list(zip(sent, received, strict=True))
        self._before, self._behind = _counters(group) if link(group).engine.watched else ([], [])

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        for launch, stream in zip(self._before, streams, strict=False):
            launch(stream)
        each = zip(link.members, self._pieces, streams, strict=True)
        link.move([Pieces(member, sent, received, stream) for member, (sent, received), stream in each])
        for launch, stream in zip(self._behind, streams, strict=False):
            launch(stream)


class _CountParams(ctypes.Structure):
    """`struct CountParams` of cu/collectives/count_exchange.cu."""

    _fields_ = (("word", ctypes.c_uint64),)


def _counters(group: Group) -> tuple[list[Launch], list[Launch]]:
    """Launches on every local rank: those that add one to `Progress.sending`, and those that add one to
    `Progress.received`."""

    def counting(field: str) -> list[Launch]:
        spec, found = Specialisation("collectives", "count_exchange", ()), []
        for rank, progress in zip(group, link(group).progress, strict=True):
            word = progress + 8 * PROGRESS_FIELDS.index(field)
            found.append(Planned(rank.device, spec, 1, 1, _CountParams(word=word)).take().launch)
        return found

    made: tuple[list[Launch], list[Launch]] = group.part(PlanCache).get(
        ("count_exchange",), lambda: (counting("sending"), counting("received"))
    )
    return made


class AcrossNodes:
    """The schedule of a call: its stages. `repeatable`: no exchange has addresses of the call's arrays."""

    def __init__(self, group: Group, stages: Sequence[Stage], repeatable: bool = True) -> None:
        self._link, self._stages = link(group), stages  # holds no group, as the group keeps repeated calls
        self.repeatable = repeatable
        kernels = [stage.launches for stage in stages if stage.launches]
        self.launches = [[of_ranks[position] for of_ranks in kernels] for position in range(len(group))]

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        """All local ranks must be launched together, and in a capture only if the engine's work can be captured."""
        if alone and len(self.launches) > 1:
            raise Unsupported(
                "a call over several nodes launches all local ranks together, as the engine takes their exchanges at "
                "once; call launch() without rank="
            )
        require_one_side(captures)
        self._link.engine.check_captures(captures)

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        for stage in self._stages:
            stage.queue(self._link, streams)
        for stream in streams:
            graph = capturing(stream)
            if graph is not None:
                self._link.captured(graph)
