# SPDX-License-Identifier: Apache-2.0
"""An allocation, as a process sees it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..objects import Context, Device, Handle, Mappable, Memory, Multicast, Pool
from .exports import Export
from .managed import Advice

if TYPE_CHECKING:
    from ..graphs.memory import GraphMemory


@dataclass(eq=False)
class Allocation:
    """A live range of addresses. `device` is None for host memory, managed memory and multicast addresses.

    Exactly one of context, pool, handle and graph is set, and decides which devices may access the memory
    (`machine/memory/process_memory.py`). For mapped memory, `handle` is the handle that cuMemMap was given. The
    addresses of a graph's allocation have memory only from the run of the allocation node until a call or a free node
    has freed the memory.
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
    alias: Allocation | None = None  # for registered memory: the addresses by which devices reach it
    descriptor: int | None = None  # for registered memory: the descriptor of its file
    host: int | None = None  # if this is the `alias` of registered memory: that memory's address on the host
    of_module: bool = False  # whether it holds the variables of a module, so that cuMemFree cannot free it
    managed: Advice | None = None  # for managed memory: the program's advice on its use
    synchronous: bool = False  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    freed: bool = False  # whether cuMemFreeAsync is queued for the allocation
    export: Export | None = None  # the handle by which other processes can open the allocation
    origin: Export | None = None  # the Export of another process's memory, which this process has opened `opens` times
    opens: int = 0
    access: dict[int, int] = field(default_factory=dict)  # for mapped memory: device -> CUmemAccess_flags
    number: int = field(default_factory=itertools.count(1).__next__)

    @property
    def freeable(self) -> bool:
        """Whether cuMemFree can free the allocation: memory of cuMemAlloc, managed memory and memory of a pool."""
        memory = self.device is not None or self.managed is not None
        return memory and self.mapped is None and not self.of_module

    @property
    def exportable(self) -> bool:
        """Whether cuIpcGetMemHandle gives a handle for other processes: only for memory of cuMemAlloc."""
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
