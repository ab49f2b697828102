# SPDX-License-Identifier: Apache-2.0
"""An allocation, as a process sees it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .managed import Advice
from .objects import Context, Device, Handle, Mappable, Memory, Multicast, Pool
from .shared import Export

if TYPE_CHECKING:
    from .graph_memory import GraphMemory


@dataclass(eq=False)
class Allocation:
    """A live range. `device` is None for host memory, managed memory and multicast addresses; exactly one of context,
    pool, handle and graph says its regime. `handle` is that which cuMemMap was given. That of a graph holds memory at
    times only.
    """

    base: int
    nbytes: int
    device: Device | None
    context: Context | None = None
    pool: Pool | None = None
    handle: Handle | None = None
    graph: GraphMemory | None = None
    host_flags: int | None = None
    registered: bool = False
    alias: Allocation | None = None  # of registered memory: the addresses by which devices reach it
    descriptor: int | None = None  # of registered memory: its file, so that what else lies in its pages is found there
    host: int | None = None  # of such addresses: where the host has the memory
    of_module: bool = False  # the variables of a module
    managed: Advice | None = None  # of managed memory: what the program has said about its use
    synchronous: bool = False  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    freed: bool = False  # whether cuMemFreeAsync is queued for it
    export: Export | None = None  # the handle by which other processes can open it
    origin: Export | None = None  # of memory that belongs to another process, which was opened `opens` times
    opens: int = 0
    access: dict[int, int] = field(default_factory=dict)  # VMM: device -> flags
    number: int = field(default_factory=itertools.count(1).__next__)

    @property
    def freeable(self) -> bool:
        """Memory that cuMemFree takes: of cuMemAlloc, managed or of a pool."""
        memory = self.device is not None or self.managed is not None
        return memory and self.mapped is None and not self.of_module

    @property
    def exportable(self) -> bool:
        """Memory of cuMemAlloc, which another process can open (cuIpcGetMemHandle)."""
        return self.device is not None and self.context is not None and self.origin is None and not self.of_module

    @property
    def mapped(self) -> Mappable | None:
        """The memory or multicast object that cuMemMap has mapped here."""
        return None if self.handle is None else self.handle.item

    @property
    def memory(self) -> Memory | None:
        return self.mapped if isinstance(self.mapped, Memory) else None

    @property
    def multicast(self) -> Multicast | None:
        return self.mapped if isinstance(self.mapped, Multicast) else None
