# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine, which carries partial sums and other bytes between the nodes of a group.

An engine is any object with the methods of `Exchange`; `drvfuse.nodes` has three. It moves bytes, and adds float32
numbers, in the memory of GPUs, among the ranks that have the same number inside their nodes: rank k of node 0, rank k
of node 1, and so on. A process may drive one or more ranks of a group, so every method takes all local ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.stream import Stream
    from .layout import Nodes

Gather = Callable[[Sequence[bytes]], Sequence[bytes]]
"""A function that is collective over the group: it takes bytes for each local rank and returns those of all ranks. It
raises if a rank does not take part within a bounded time."""


@dataclass(frozen=True, slots=True)
class Member:
    """A local rank: its number in the group, its device, its node, and its number inside the node."""

    rank: int
    device: Device
    node: int
    place: int


@dataclass(frozen=True, slots=True)
class Part:
    """The numbers that the local rank `member` exchanges: `count` >= 1 float32 numbers from each node, at `address` in
    its memory.

    `all_gather` finds the rank's own numbers at `address` + 4 * `count` * (the number of its node), and leaves the
    numbers of all nodes from `address` on, in the order of the nodes. `all_reduce` finds the rank's own numbers at
    `address`, and leaves the sums at `address`. The work is queued on `stream`, or is complete when the method returns.
    """

    member: Member
    address: int
    count: int
    stream: Stream


class Piece(NamedTuple):
    """`nbytes` >= 1 bytes at `address` in the memory of a local rank. The rank sends them to its peer of `node`, or
    receives that peer's bytes there."""

    node: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the local rank `member` sends to its peers of other nodes, and what it receives from them.

    The first piece that a rank sends to a peer arrives in the first piece that the peer receives from this rank, the
    second in the second, and so on; the sent and the received piece have the same size. A received piece overlaps no
    other piece. The work is queued on `stream`, or is complete when the method returns.
    """

    member: Member
    sent: Sequence[Piece]
    received: Sequence[Piece]
    stream: Stream


class Exchange(Protocol):
    """The methods that an engine must have. An object of this kind serves one group. One thread at a time calls its
    methods; only `abort` may be called while another method runs.

    `name` appears in messages. If `watched` is true, the engine's work on a stream may never end. Then the group
    watches the work and calls `abort` when an exchange has taken longer than the setting `spin_timeout`.
    """

    name: str
    watched: bool

    def open(self, nodes: Nodes, members: Sequence[Member], gather: Gather, timeout: float) -> None:
        """Connect the ranks. Collective over the group: called when the group is made, and by `reset` after `close`.

        `members` are the local ranks. Raises a `DrvfuseError` after about `timeout` seconds if a rank is missing.
        """

    def check_captures(self, captures: Sequence[int | None]) -> None:
        """Raise Unsupported if the engine's work cannot be captured in `captures`, the captures of the local ranks'
        streams (None: not captured). Called before a call queues anything.
        """

    def all_gather(self, parts: Sequence[Part]) -> None:
        """Gather the nodes' float32 numbers at every rank, as `Part` describes. `parts` has an entry for each local
        rank that has numbers to exchange, in the order of the local ranks."""

    def all_reduce(self, parts: Sequence[Part]) -> None:
        """Add the numbers of all nodes in float32, as `Part` describes, and leave the sums on every rank. The engine
        chooses the order of the additions; all ranks get equal bits."""

    def all_to_all(self, parts: Sequence[Pieces]) -> None:
        """Send bytes to other nodes and receive theirs, as `Pieces` describes. `parts` has an entry for each local
        rank, in the order of the local ranks. An engine may lack this method: then its groups have `allreduce`,
        `allreduce_many` and `allreduce_rmsnorm_fp8`, and refuse the other collectives.
        """

    def abort(self) -> None:
        """End queued and running work of all local ranks soon; the contents of their memory are then undefined. Called
        from any thread.
        """

    def close(self) -> None:
        """Close the connections, also after `abort` and after an `open` that has raised. Idempotent. Graphs that hold
        work of the engine may still exist then, but are not launched any more."""
