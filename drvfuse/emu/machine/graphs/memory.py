# SPDX-License-Identifier: Apache-2.0
"""Memory that graphs allocate. An allocation has the same address in all launches of its graph.

Address, use and device memory have different lifetimes:

- The address is assigned when the allocation node is created. No other memory gets the address while the graph or an
  executable of it exists, while the memory is live, or while queued work may use the memory.
- The memory is `live` from the call that launches its graph to the call that frees the memory or launches a free node
  for it. Driver calls accept the address while the memory is live. Kernels and copies can access the memory from the
  run of the allocation node until the free has run. An earlier or later access is reported as a use after free.
- The memory is `backed` from the first launch or upload of an executable until that executable is destroyed, or until
  the device is trimmed while the memory is not in use. While the memory is backed, it takes device memory. Afterwards
  its bytes stay reserved for graphs of the device until the device is trimmed (cuDeviceGraphMemTrim). Each allocation
  has its own device memory, which no two graphs share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...space.pages import WindowError
from ..memory.allocation import Allocation
from ..objects import Device
from ..process.failure import Failure

if TYPE_CHECKING:
    from ..process.process import Process
    from ..run.work import Op
    from .graph import Graph


@dataclass(eq=False)
class GraphMemory:
    """The memory of one allocation node of the graph `owner`. `access` has the CUmemAccess_flags of each device, except
    the device on which the memory lies. `freed_in` are the graphs with a free node for the memory. `last` is the last
    operation that may use the memory. `abandoned`: whether `owner` was destroyed.
    """

    owner: Graph
    access: dict[int, int]
    allocation: Allocation = field(init=False)
    freed_in: set[Graph] = field(default_factory=set)
    live: bool = False
    backed: bool = False
    abandoned: bool = False
    last: Op | None = None

    @property
    def in_use(self) -> bool:
        return self.live or (self.last is not None and not self.last.done)

    @property
    def freeable_by_call(self) -> bool:
        """True if cuMemFree and cuMemFreeAsync may free the memory now: it is live, and `owner` does not free it."""
        return self.live and self.owner not in self.freed_in

    def freeable_in(self, graph: Graph) -> bool:
        """True if a free node for this memory may be added to a graph. Each graph may have one such node, but
        `owner` and another graph may not both have one.
        """
        if graph in self.freed_in:
            return False
        return not self.freed_in if graph is self.owner else self.owner not in self.freed_in


@dataclass
class Reserve:
    """The bytes of a device that the graphs of a process take: `used` now, and `reserved` in all. `used_high` and
    `reserved_high` are their highest values so far.
    """

    used: int = 0
    used_high: int = 0
    reserved: int = 0
    reserved_high: int = 0


class GraphMemories:
    """The memory of all graphs of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._reserves = [Reserve() for _ in process.machine.devices]
        self._memories: dict[GraphMemory, None] = {}

    def reserve(self, device: Device) -> Reserve:
        return self._reserves[device.index]

    def create(self, owner: Graph, device: Device, nbytes: int, access: dict[int, int]) -> GraphMemory:
        """Make the memory of a new allocation node. Raises Failure if the device, or the address space, has no room for
        it.
        """
        memory, process = GraphMemory(owner, access), self._process
        if nbytes > device.total:
            raise process.memory.full(device, nbytes, f"it has {device.total} bytes")
        try:
            base = process.machine.window.hold(nbytes)
        except WindowError as error:
            why = f"{error}: set DRVFUSE_EMU_WINDOW_GIB to a larger number"
            raise process.memory.full(device, nbytes, why) from None
        memory.allocation = process.memory.add(Allocation(base, nbytes, device, graph=memory))
        self._memories[memory] = None
        return memory

    def back(self, memories: Iterable[GraphMemory]) -> None:
        """Reserve device memory for all of `memories`. If there is not enough, raises Failure and reserves none."""
        done: list[GraphMemory] = []
        for memory in memories:
            if not memory.backed:
                try:
                    self._back(memory)
                except Failure:
                    for other in done:
                        self.unback(other)
                    raise
                done.append(memory)

    def _back(self, memory: GraphMemory) -> None:
        allocation = memory.allocation
        assert allocation.device is not None
        reserve = self.reserve(allocation.device)
        missing = max(0, reserve.used + allocation.nbytes - reserve.reserved)
        self._process.memory.charge(allocation.device, missing)
        memory.backed = True
        reserve.used += allocation.nbytes
        reserve.reserved += missing
        reserve.used_high = max(reserve.used_high, reserve.used)
        reserve.reserved_high = max(reserve.reserved_high, reserve.reserved)

    def unback(self, memory: GraphMemory) -> None:
        """Release the device memory that backs `memory`. Its bytes stay reserved for graphs."""
        if memory.backed:
            assert memory.allocation.device is not None
            memory.backed = False
            self.reserve(memory.allocation.device).used -= memory.allocation.nbytes

    def trim(self, device: Device) -> None:
        """Give back the reserved memory of the device that is not in use."""
        self.sweep()
        for memory in self._memories:
            if memory.allocation.device is device and not memory.in_use:
                self.unback(memory)
        reserve = self.reserve(device)
        device.used -= reserve.reserved - reserve.used
        reserve.reserved = reserve.used

    def occupy(self, memory: GraphMemory) -> None:
        """Map memory at the address of `memory`, unless some is there already. Called when the allocation node runs."""
        allocation, window = memory.allocation, self._process.machine.window
        assert allocation.device is not None
        if not window.index.covers(allocation.base, 1):
            masks = self._process.memory.masks(allocation)
            window.occupy(
                allocation.base, allocation.nbytes, allocation.device.index, *masks, table=self._process.table
            )

    def free_now(self, memory: GraphMemory) -> None:
        """Free `memory` at once. The caller has waited for the work that uses it."""
        memory.live = False
        self._process.memory.give_back(memory.allocation)
        self.sweep()

    def abandon(self, owner: Graph) -> None:
        """Mark the memory that the graph `owner` allocates as abandoned, forget the free nodes of `owner`, and drop
        memory that nothing uses any more. Called when `owner` is destroyed.
        """
        for memory in self._memories:
            memory.abandoned = memory.abandoned or memory.owner is owner
            memory.freed_in.discard(owner)
        self.sweep()

    def sweep(self) -> None:
        """Drop memory that belongs to no graph and no executable any more, and that nothing uses."""
        for memory in list(self._memories):
            if memory.abandoned and memory.owner.root.executable is None and not memory.in_use:
                self.unback(memory)
                self._process.memory.free(memory.allocation)
                del self._memories[memory]

    def clear(self) -> None:
        """Release all device memory. Called when the process ends. ProcessMemory releases the addresses."""
        for reserve, device in zip(self._reserves, self._process.machine.devices, strict=True):
            device.used -= reserve.reserved
            reserve.reserved = reserve.used = 0
