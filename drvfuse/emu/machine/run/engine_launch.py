# SPDX-License-Identifier: Apache-2.0
"""One launch on the native runtime: the memory of its blocks, its state and its results."""

from __future__ import annotations

import ctypes
import functools
from ctypes import sizeof
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import ArgumentError
from ... import abi
from ...abi import Kind, LaunchState, MemoryOf, race_structs, structs
from ...findings import blocked, faults
from ...findings.blocked import Blocked
from ...findings.counters import Counters
from ...findings.faults import Fault
from ...findings.places import Identity, Index
from ...native.loader import NativeModule
from ...space.access import AccessTable
from ...space.pages import round_up

if TYPE_CHECKING:
    from ..memory.heap import Heap
    from .engine import Engine
    from .work import Op

_ENVIRONMENT_BYTES = 256  # the size of the memory for the barrier of a cooperative grid
_SITE = np.dtype(structs.Site)  # numpy takes long to derive it, and would keep one for each launch


class EngineLaunch:
    """A launch that `Engine.run` runs, for the operation `op`. At most `max_resident` of its blocks are resident at
    once.

    `params` is the packed parameter buffer. The caller has checked grid, block and shared memory against the device.
    `access` is the table of access words of the process that launches it (None: the window's first table), and
    `process` the name of that process if the machine has several. `heap` is the heap of the context; without a heap,
    malloc returns null. While `gdc_open` is False, griddepcontrol.wait waits; the machine keeps it False until the
    primary of the launch has ended.
    """

    def __init__(
        self,
        engine: Engine,
        module: NativeModule,
        kernel_name: str,
        *,
        device: int,
        grid: Index,
        block: Index,
        smem: int,
        params: bytes,
        globals_addr: int,
        max_resident: int,
        cluster: Index | None = None,
        op: Op | None = None,
        access: AccessTable | None = None,
        process: str | None = None,
        heap: Heap | None = None,
    ) -> None:
        self.engine, self.module, self.device = engine, module, device
        self.known: int | None = None
        self.kernel = kernel = module.kernels[kernel_name]
        self.grid, self.block = grid, block
        self.identity = Identity(kernel.name, device, grid, block, kernel.sites, process)
        self.fault: Fault | None = None
        self._counters: Counters | None = None
        self._allowed: int | None = None
        window = engine.window
        threads = block[0] * block[1] * block[2]
        blocks = grid[0] * grid[1] * grid[2]
        cluster_size = cluster[0] * cluster[1] * cluster[2] if cluster else 1
        if len(params) != kernel.param_bytes:
            raise ArgumentError("params", f"{len(params)} bytes", f"{kernel.param_bytes} bytes for {kernel_name}")
        if cluster and any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ArgumentError("cluster", cluster, f"a divisor of the grid {grid}")
        if max_resident < cluster_size:
            raise ArgumentError("max_resident", max_resident, f"at least the {cluster_size} blocks of a cluster")
        slots = min(max_resident, blocks) // cluster_size * cluster_size
        warps = -(-threads // 32)
        frame = round_up(kernel.frame_bytes, 64)
        stride = round_up(sizeof(structs.Block) + warps * sizeof(structs.Warp) + threads * frame, 64)
        shared = kernel.shared_static + smem
        shared_stride = 1 << abi.CLUSTER_SHIFT if cluster_size > 1 else round_up(max(shared, 1), 1024)
        local_stride = round_up(kernel.local_bytes, 16)
        self._tickets: list[Any] = []
        self._groups = np.arange(slots // cluster_size - 1, -1, -1, dtype=np.uint32)
        self._rows = np.zeros(len(kernel.sites) + 1, _SITE)
        address = self._take(Kind.PARAM, max(len(params), 1))
        ctypes.memmove(address, params, len(params))
        environment = self._take(Kind.GLOBALS, _ENVIRONMENT_BYTES)
        window.view(environment, _ENVIRONMENT_BYTES)[:] = 0
        window.mark_initialised(environment, _ENVIRONMENT_BYTES)
        self._struct = structs.Launch(
            params=address,
            globals=globals_addr,
            nctaid=grid,
            ntid=block,
            device=device,
            smem_dynamic=smem,
            shared_static=kernel.shared_static,
            cluster=cluster[0] | cluster[1] << 8 | cluster[2] << 16 if cluster else 0,
            sm_count=engine.sm_count,
            envreg1=environment >> 32,
            envreg2=environment & 0xFFFFFFFF,
            engine=ctypes.addressof(engine._state),
            function=module.address(kernel.symbol),
            slots=self._take(Kind.NONE, slots * stride),
            slot_stride=stride,
            slot_count=slots,
            threads=threads,
            warps=warps,
            frame_stride=frame,
            blocks=blocks,
            shared_base=self._take(Kind.SHARED, slots * shared_stride),
            shared_stride=shared_stride,
            local_base=self._take(Kind.LOCAL, slots * threads * local_stride) if local_stride else 0,
            local_stride=local_stride,
            local_bytes=kernel.local_bytes,
            param_bytes=len(params),
            shared_bytes=shared,
            cluster_size=cluster_size,
            cluster_window=shared_stride * cluster_size if cluster_size > 1 else shared,
            gdc_open=1,
            free_count=len(self._groups),
            free_groups=self._groups.ctypes.data,
            sites=self._rows.ctypes.data,
            polls=self._take(Kind.NONE, slots * threads * sizeof(structs.Poll)),
            window_base=window.base,
            window_bytes=window.nbytes,
            access_base=(access or window.table).address,
            owner_class=_owner_classes(device),
            heap=heap.address if heap is not None else 0,
        )
        if kernel.has_copies:
            self._struct.copies = self._take(Kind.NONE, slots * threads * 2 * sizeof(structs.CopyQueue))
            self._struct.copy_pool = engine.copies.ctypes.data
        if op is not None:
            self._struct.op = op.number
            engine.identify(op, self)
        if engine.detector is not None:
            assert op is not None
            races = sizeof(race_structs.RaceBlock) + threads * sizeof(race_structs.RaceThread)
            self._struct.races = self._take(Kind.NONE, slots * races)
            self._struct.start = engine.detector.share(op.started)
            if op.overlapped is not None and op.overlapped.done:
                self._struct.primary = engine.detector.share(op.overlapped.known)

    def _take(self, kind: Kind, nbytes: int) -> int:
        address, ticket = self.engine.memory.take(kind, nbytes)
        self._tickets.append(ticket)
        return address

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    @property
    def running(self) -> bool:
        return bool(self._struct.state == LaunchState.RUNNING)

    @property
    def done(self) -> bool:
        """True when every block has ended."""
        return bool(self._struct.state == LaunchState.DONE)

    @property
    def triggered(self) -> bool:
        """True when every block has issued launch_dependents or ended."""
        return bool(self._struct.triggered == self._struct.blocks)

    @property
    def gdc_open(self) -> bool:
        return bool(self._struct.gdc_open)

    @gdc_open.setter
    def gdc_open(self, value: bool) -> None:
        self._struct.gdc_open = int(value)

    def primary_ended(self, primary: Op) -> None:
        """Let griddepcontrol.wait pass from now on. Called when the primary has ended."""
        if self.engine.detector is not None:
            self._struct.primary = self.engine.detector.share(primary.known)
        self.gdc_open = True

    @property
    def counters(self) -> Counters:
        """The counts of memory accesses so far."""
        if self._counters is not None:
            return self._counters
        s = self._struct
        return Counters(self._rows, self.kernel.sites, int(s.barriers), int(s.warp_ops), int(s.resumes))

    @property
    def remaining(self) -> int:
        """The number of blocks that have not ended, resident or not."""
        return int(self._struct.blocks - self._struct.finished)

    @property
    def block_count(self) -> int:
        return int(self._struct.blocks)

    @property
    def unplaced(self) -> int:
        """The number of blocks that have never been resident."""
        return int(self._struct.blocks - self._struct.next)

    @property
    def ended(self) -> int:
        return int(self._struct.finished)

    def allow(self, resident: int) -> None:
        """Set how many blocks may be resident, rounded down to whole clusters. The first call is made before the launch
        runs; later calls may only raise the number.
        """
        s = self._struct
        groups = min(resident // s.cluster_size, len(self._groups))
        if self._allowed is None:
            self._allowed = s.free_count = 0
        more = np.arange(groups - 1, self._allowed - 1, -1, dtype=np.uint32)
        self._groups[s.free_count : s.free_count + len(more)] = more
        s.free_count += len(more)
        self._allowed = max(groups, self._allowed)

    def blocked(self) -> list[Blocked]:
        """What each thread of the resident blocks waits for, in the order of blocks and threads."""
        if not self.running:
            return []
        return blocked.blocked(self._struct, self.identity, self.engine.window, self.engine.undecided)

    def abandon(self) -> None:
        """Stop the launch: none of its threads runs again."""
        if self.running:
            self._struct.state = LaunchState.FAULTED
            self.settle()

    def settle(self) -> None:
        """Keep the counts and the clock of the launch, and give its memory back. Called when the launch has ended."""
        if self._counters is None:
            if self.engine._end_delay is not None:
                self.engine._end_delay(ctypes.addressof(self.engine._state), self.address)
            if self._struct.copies:
                self.engine.end_copies(self.address)
            if self._struct.fault.kind:
                self.fault = faults.describe(self._struct, self.identity, self.engine.window)
            self._counters = self.counters
            if self.engine.detector is not None:
                self.known = self.engine.give_up(self._struct)
            for ticket in self._tickets:
                self.engine.memory.give(ticket)
            self._tickets.clear()


@functools.cache
def _owner_classes(device: int) -> Any:
    """For each owner that an access word can name (a device, the host, ...): the `abi.MemoryOf` under which a launch on
    `device` counts accesses to the owner's memory.
    """
    classes = (ctypes.c_uint8 * 256)(*[MemoryOf.PEER] * 8)
    classes[device] = MemoryOf.DEVICE
    classes[abi.OWNER_HOST], classes[abi.OWNER_SHARED] = MemoryOf.HOST, MemoryOf.SHARED
    return classes
