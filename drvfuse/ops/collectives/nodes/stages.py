# SPDX-License-Identifier: Apache-2.0
"""The launch sequence of a call over several nodes: kernels, and exchanges between the nodes, one after another.

Failure. A rank whose kernel gives up takes part in all later exchanges nevertheless: all nodes must take part in every
exchange, and the host may have queued the exchanges before the kernel gave up. So every exchange also carries a word
that tells whether the sums or bytes are defined: the status of sums (cu/collectives/nodes/sums.cuh), or the abort word
of the sender (cu/collectives/nodes/exchange_ended.cu). The first kernel after the exchange reads this word. If the sums
or bytes are not defined, the kernel writes a report and aborts the ranks of its node, which raise NodeFailed.

The stages follow one another on each rank's stream. With dependent launch the first kernel is a dependent of the kernel
before the call, and the kernel after the call is a dependent of the last kernel. The engine's work is no dependent
launch, so a kernel before that work triggers only at the kernel's own end.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ....comm import workspace
from ....comm.workspace import ABORT_OFFSET, NODES_OFFSET
from ....errors import Unsupported
from ....nodes.exchange import Part, Piece, Pieces
from ....nodes.link import PROGRESS_DTYPE
from ....runtime.graph import capturing
from ...call.options import PDLLevel
from ...call.planned import POINTER_BYTES, PlanCache, Planned, Pointed, Ready
from ...call.prepared import require_one_side
from ...call.specialisation import Specialisation
from ..shared import plan
from ..shared.params import Call, of_collective

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....nodes.link import NodeLink
    from ....runtime.launch import Launch
    from ....runtime.stream import Stream

_WORD = 8  # bytes of an abort word


def link(group: Group) -> NodeLink:
    """Return the link of a group over several nodes, which exchanges data between the nodes."""
    assert group.link is not None
    return group.link


def sources_inside(group: Group, inputs: Sequence[int]) -> list[Sequence[int]]:
    """Return, for each local rank, the addresses in `inputs` of all ranks of its node, whose inputs it sums. A list is
    empty if the ranks of a node are in several processes."""
    layout = group.layout
    if layout.inside == 1:
        return [[own] for own in inputs]
    if not group.together:
        return [[]] * len(inputs)
    return [[inputs[peer] for peer in layout.ranks(layout.of[rank.index])] for rank in group]


def level_inside(pdl: PDLLevel) -> PDLLevel:
    """Return the PDL level of all kernels of a call except the last one: these kernels trigger at their end."""
    return PDLLevel.OFF if pdl is PDLLevel.OFF else PDLLevel.ON


class Stage(Protocol):
    """A stage of a call on all local ranks. `launches` are its kernels, by local rank."""

    @property
    def launches(self) -> Sequence[Launch]: ...

    @property
    def pointed(self) -> Sequence[Pointed]:
        """The objects that hold addresses of the call's arrays, besides the parameters of `launches`."""

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        """Queue the work on the stream of each local rank."""


class Kernels:
    """A stage with one kernel per local rank."""

    pointed: Sequence[Pointed] = ()

    def __init__(self, ready: Sequence[Ready]) -> None:
        self.launches = [one.launch for one in ready]

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        for launch, stream in zip(self.launches, streams, strict=True):
            launch(stream)


class Sums:
    """An exchange of partial sums. Ranks with the same index inside their nodes exchange with one another, and each
    rank gets the sums of all nodes. `memory` has the address and the count of the float32 numbers of each local
    rank."""

    pointed: Sequence[Pointed] = ()

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        self.launches: Sequence[Launch] = []
        self._memory = memory

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        each = zip(link.members, self._memory, streams, strict=True)
        link.exchange([Part(member, address, count, stream) for member, (address, count), stream in each])


class ExchangeAddresses:
    """The addresses of the memory from which an exchange of bytes sends, or in which it receives."""

    def __init__(self) -> None:
        self.parameters = bytearray()
        self.pointers: dict[int, int] = {}

    def fixed(self, address: int) -> int:
        """Add an address that no call changes, such as that of a workspace, and return its index in `values`."""
        self.parameters += struct.pack("Q", address)
        return len(self.parameters) // POINTER_BYTES - 1

    def of_array(self, address: int) -> int:
        """Add the address of an array, which a repeated call replaces, and return its index in `values`."""
        self.pointers[len(self.parameters)] = address
        return self.fixed(address)

    @property
    def values(self) -> Sequence[int]:
        """All addresses, in the order in which they were added."""
        return struct.unpack(f"{len(self.parameters) // POINTER_BYTES}Q", self.parameters)


class Span(NamedTuple):
    """A `Piece` without its address, which repeated calls may change: it begins `offset` bytes after the address with
    the index `base` in `ExchangeAddresses.values`."""

    node: int
    base: int
    offset: int
    nbytes: int


class Bytes:
    """An exchange of bytes. Each local rank sends and receives spans of `addresses`, and then sends its abort word to
    each peer. A kernel after the exchange checks the received abort words. If the engine's waits have no time limit
    (`watched`), a kernel before the exchange counts the exchanges that have begun, and the kernel after the exchange
    counts those that have ended. So the host can see whether an exchange is still running."""

    def __init__(
        self,
        group: Group,
        addresses: ExchangeAddresses,
        sent: Sequence[Sequence[Span]],
        received: Sequence[Sequence[Span]],
    ) -> None:
        self.launches: Sequence[Launch] = []
        self.pointed: Sequence[Pointed] = [addresses]
        self._addresses = addresses
        self._spans: list[tuple[list[Span], list[Span]]] = []
        for rank, to, of in zip(group, sent, received, strict=True):
            base = addresses.fixed(group.workspace.pointers[rank.index])
            words = [Span(node, base, ABORT_OFFSET, _WORD) for node in _nodes_of(to)]
            heard = [Span(node, base, NODES_OFFSET + _WORD * node, _WORD) for node in _nodes_of(of)]
            self._spans.append(([*to, *words], [*of, *heard]))
        self._before, self._after = _around(group, link(group).engine.watched)

    def queue(self, link: NodeLink, streams: Sequence[Stream]) -> None:
        for launch, stream in zip(self._before, streams, strict=False):
            launch(stream)
        values = self._addresses.values

        def pieces(spans: Sequence[Span]) -> list[Piece]:
            return [Piece(node, values[base] + offset, nbytes) for node, base, offset, nbytes in spans]

        each = zip(link.members, self._spans, streams, strict=True)
        link.move([Pieces(member, pieces(to), pieces(of), stream) for member, (to, of), stream in each])
        for launch, stream in zip(self._after, streams, strict=True):
            launch(stream)


def _nodes_of(spans: Sequence[Span]) -> list[int]:
    """Return the nodes to which `spans` are sent, or from which they are received."""
    return sorted({span.node for span in spans})


@of_collective("collectives/nodes/count_exchange.cu")
class CountParams(ctypes.Structure):
    """The parameters of the kernel before an exchange."""


@of_collective("collectives/nodes/exchange_ended.cu", parts=(Call,))
class ExchangeEndedParams(ctypes.Structure):
    """The parameters of the kernel after an exchange."""


def _around(group: Group, watched: bool) -> tuple[list[Launch], list[Launch]]:
    """Return the launches on every local rank before an exchange of bytes, and those after it. If the exchange is not
    `watched`, there are no launches before it."""

    def word(position: int, field: str) -> int:
        fields: Any = PROGRESS_DTYPE.fields
        return link(group).progress[position] + fields[field][1] if watched else 0

    def before() -> list[Launch]:
        spec, found = Specialisation("collectives/nodes", "count_exchange", ()), []
        for position, rank in enumerate(group):
            parameters = CountParams(word=word(position, "sending"))
            found.append(Planned(rank.device, spec, 1, 1, parameters).take().launch)
        return found

    def after() -> list[Launch]:
        defines = workspace.defines() | {"DRVFUSE_RANKS": group.layout.inside}
        spec, found = Specialisation("collectives/nodes", "exchange_ended", tuple(defines.items())), []
        for position, rank in enumerate(group):
            call = plan.call_of_rank(group, position)
            parameters = ExchangeEndedParams(call, word(position, "received"), group.nodes)
            found.append(Planned(rank.device, spec, 1, 32, parameters).take().launch)
        return found

    made: tuple[list[Launch], list[Launch]] = group.part(PlanCache).get(
        ("around_exchange", watched), lambda: (before() if watched else [], after())
    )
    return made


class AcrossNodes:
    """The launch sequence of a call over several nodes: its stages, one after another on each rank's stream."""

    def __init__(self, group: Group, stages: Sequence[Stage]) -> None:
        # the group itself is not stored: it keeps repeated calls, which would then keep the group
        self._link, self._stages = link(group), stages
        self.pointed = [holder for stage in stages for holder in stage.pointed]
        kernels = [stage.launches for stage in stages if stage.launches]
        self.launches = [[of_ranks[position] for of_ranks in kernels] for position in range(len(group))]

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        """Raise unless all local ranks are launched together and, in a capture, the engine's work can be captured."""
        if alone and len(self.launches) > 1:
            raise Unsupported(
                "a call over several nodes launches all local ranks together, as the engine needs the exchanges of "
                "all of them together; call launch() without rank="
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
