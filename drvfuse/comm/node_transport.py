# SPDX-License-Identifier: Apache-2.0
"""The transport of a group over several nodes, with one rank in this process.

All ranks of the group take part in its steps. The ranks of one node share memory through a transport of that node only.
In tables of addresses the entries for ranks of other nodes are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import Unsupported
from .process_transport import OnBoard, ProcessTransport
from .transport import HostMemory, Memory

if TYPE_CHECKING:
    from ..bootstrap.board import Board
    from ..runtime.device import Device
    from ..runtime.vmm import SymmetricBuffer
    from .agreement import Agreement


class _Closable(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=_Closable)


class NodeTransport(OnBoard):
    """The transport of a group over several nodes. `board` is the board of all ranks of the group, and `ranks` are the
    ranks of this node."""

    def __init__(self, board: Board, device: Device, agreement: Agreement) -> None:
        """Collective: the ranks of each node get a board of their own."""
        super().__init__(board, device, agreement)
        layout = agreement.layout
        self.ranks = layout.ranks(layout.of[board.rank])
        own = board.split(layout.of[board.rank], board.rank)
        assert own is not None
        self._node = ProcessTransport(own, device, agreement.of(self.ranks))

    def open(self) -> None:
        self._node.open()

    def allocate(self, nbytes: int) -> Memory:
        return _OfNode(self._on_every_node("allocate memory", lambda: self._node.allocate(nbytes)), self)

    def host_memory(self, nbytes: int) -> HostMemory:
        return self._on_every_node("make report blocks", lambda: self._node.host_memory(nbytes))

    def _on_every_node(self, what: str, make: Callable[[], Made]) -> Made:
        """The result of `make`, which is collective over a node. Either it succeeds on all nodes, or all ranks
        raise.
        """
        made: list[Made] = []
        try:
            with self.step(f"{what} on every node", self.board.timeout):
                made.append(make())
        except BaseException:
            for one in made:
                one.close()
            raise
        return made[0]

    def require_multicast(self) -> None:
        raise Unsupported("multicast memory exists inside one node only, and the group has several nodes")

    def symmetric(self, nbytes: int, multicast: bool) -> SymmetricBuffer:
        raise Unsupported("symmetric memory exists inside one node only, and the group has several nodes")

    def all_ended(self) -> bool:
        return True  # unused: whether all ranks have ended matters only for multicast memory, which is refused

    def close(self) -> None:
        self._node.close()
        super().close()


class _OfNode:
    """Memory of the ranks of a node, with an entry for each rank of the group."""

    def __init__(self, memory: Memory, transport: NodeTransport) -> None:
        self._memory = memory
        pointers = dict(zip(transport.ranks, memory.ptrs, strict=True))
        self.ptrs: tuple[int, ...] = tuple(pointers.get(rank, 0) for rank in range(len(transport.members)))

    def close(self) -> None:
        self._memory.close()
