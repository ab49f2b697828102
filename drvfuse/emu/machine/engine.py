# SPDX-License-Identifier: Apache-2.0
"""Launches on the native runtime: memory for their blocks, running them together, and their results.

The scheduler, the checks and the structures below are those of `runtime.cu`. An engine serves one machine; `load` is
thread-safe, everything else is called with the machine's lock held. Native code runs without Python's lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import sizeof
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ArgumentError
from .. import abi
from ..abi import Kind, LaunchState, MemoryOf, RunEnd, structs
from ..findings import blocked, events, faults, notices
from ..findings.blocked import Blocked
from ..findings.counters import Counters
from ..findings.faults import Fault
from ..findings.places import Identity, Index
from ..findings.prints import Printer
from ..native import loader
from ..space import pages
from ..space.access import AccessTable
from ..space.pages import round_up
from ..space.window import Window
from . import interrupts

if TYPE_CHECKING:
    from ..findings.race import Detector
    from ..findings.reports import Report
    from .heap import Heap
    from .work import Op

EngineModule = loader.NativeModule
_IDENTITIES = 1 << 16  # how many operations are remembered
_RESUMES = 20_000  # length of a run that is bounded by resumes and not by time
_ENVIRONMENT_BYTES = 256  # the workspace of a cooperative grid barrier


class Engine:
    """Runs launches of one machine. `seed` 0 runs blocks in order; others rotate them and hold launches and warps back.

    `loop_limit`: accesses, or rounds of loops without accesses, that a thread may make between two places where it can
    wait. `delay_stores`: stores reach other blocks late (native/delay.cuh). `count_resumes()` lets a `run` end after a
    number of steps and not after some time, so that it ends at the same place each time. `idle` tells whether the last
    `run` ended because nothing could move; `clock_ns` is the virtual time.
    """

    def __init__(
        self,
        window: Window,
        seed: int = 0,
        sm_count: int = 132,
        loop_limit: int = 100_000_000,
        detector: Detector | None = None,
        delay_stores: bool = False,
    ) -> None:
        runtime = loader.runtime()
        self.detector = detector
        self.identities: dict[int, Identity] = {}
        self._events = (structs.Event * abi.EVENTS)()
        self.window, self.seed, self.sm_count = window, seed, sm_count
        self.idle = False
        u32, u64, at = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        self._run = runtime.function("rt_run", u32, at, at, u32, u64, u32)
        self._advance = runtime.function("rt_advance", u32, at, at, u32, u32)
        self._pass_time = runtime.function("rt_pass_time", u32, at, at, u32, u64, u64, u32)
        self._printer = Printer(window)
        printer = self._printer
        self._print = ctypes.CFUNCTYPE(u32, at)(lambda call: printer.add(call) if call else interrupts.pending())
        self._state = structs.Engine(
            seed=seed & (1 << 64) - 1,
            loop_limit=loop_limit,
            print=ctypes.cast(self._print, ctypes.c_void_p).value,
            race=detector.address if detector is not None else 0,
            events=ctypes.addressof(self._events),
            teams=window.mappings.teams.address,
        )
        self._end_delay: Callable[[int, int], None] | None = None
        if delay_stores:
            self._delay = _zeroed(runtime.function("rt_delay_bytes", u64)())
            self._state.delay = self._delay.ctypes.data
            self._end_delay = runtime.function("rt_delay_end", None, at, at)
        self.end_copies = runtime.function("rt_copy_end", None, at)
        self._settle = runtime.function("rt_race_settle", u32, at)
        self._last: list[EngineLaunch] = []
        self._pools = Pools(window)

    @functools.cached_property
    def copies(self) -> np.ndarray:
        """The native table of pending asynchronous copies, of all launches."""
        return _zeroed(loader.runtime().function("rt_copy_bytes", ctypes.c_uint64)())

    @property
    def clock_ns(self) -> int:
        return int(self._state.clock)

    @property
    def event_count(self) -> int:
        return int(self._state.event_count)

    def history(self, until: int | None = None) -> np.ndarray:
        """The events in the ring, oldest first, without those after the `until`th."""
        return events.recent(self._events, self.event_count, until)

    @property
    def undecided(self) -> int:
        """After an `advance_clock` that returned False: the number of polls after which it gave up, if there is no
        proof that the threads wait for ever, else 0.
        """
        return int(self._state.loop_limit) if self._state.undecided else 0

    def notices(self) -> list[Report]:
        """The notices since the last call: findings that have ended no launch. A place may appear again."""
        state = self._state
        taken = [(n, self.identities.get(n.op)) for n in state.notice[: state.notices]]
        state.notices = 0
        return [notices.report(n, identity) for n, identity in taken if identity is not None]

    @staticmethod
    def load(ptx: str) -> EngineModule:
        """Native code of a module. Raises PtxError with the line that the translator refuses."""
        return loader.load(ptx)

    def identify(self, op: Op, launch: EngineLaunch | None = None) -> None:
        """Remember what an operation is, for reports. Only the last operations are kept."""
        if launch is None:
            context = op.command.context
            title = op.command.title
            name = f"{op.call} ({title})" if op.call else title
            found = Identity(name, context.device.index, process=context.process.title)
        else:
            found = launch.identity
        self.identities[op.number] = found
        if len(self.identities) > _IDENTITIES:
            del self.identities[next(iter(self.identities))]

    def give_up(self, launch: structs.Launch) -> int:
        """The knowledge of the threads of a launch that has ended or is stopped: a reference to a clock."""
        assert self.detector is not None
        known = int(self._settle(ctypes.addressof(launch)))
        for reference in (launch.start, launch.primary):
            self.detector.release(reference)
        return known

    def run(self, launches: Sequence[EngineLaunch], budget_ms: float = 50) -> None:
        """Run these launches together until one ends, faults or has triggered in all its blocks, nothing can move
        (`idle`), or the time, or number of resumes, is up. Launches that have ended already are passed over.
        """
        live = [launch for launch in launches if launch.running]
        self._last = live
        if not live:
            self.idle = True
            return
        budget = _RESUMES if self._state.counted else int(budget_ms * 1e6)
        self.idle = self._native(self._run, live, budget, then=(0,)) == RunEnd.IDLE

    def count_resumes(self) -> None:
        """Let `run` end after a number of resumes, and not after some time, from now on."""
        self._state.counted = 1

    def advance_clock(self) -> bool:
        """The launches of the last `run` are idle: let virtual time pass, in growing steps, and all spins poll again.

        False if nothing came of it and nobody reads a clock: then they wait for ever.
        """
        live = [launch for launch in self._last if launch.running]
        return bool(live) and bool(self._native(self._advance, live))

    def pass_time(self, ns: int, resumes: int) -> bool:
        """The launches of the last `run` are idle, and others may still do something: let so much virtual time pass and
        all spins poll again, once, and about `resumes` times in all. False if nothing came of it.
        """
        live = [launch for launch in self._last if launch.running]
        return bool(live) and bool(self._native(self._pass_time, live, ns, resumes))

    def _native(
        self,
        function: Callable[..., int],
        launches: Sequence[EngineLaunch],
        *arguments: int,
        then: tuple[int, ...] | None = None,
    ) -> int:
        """Call a native function of launches until it has no more to do, after the first time with `then` in place of
        its arguments.
        """
        array = (ctypes.c_void_p * len(launches))(*(launch.address for launch in launches))
        state, found, again = ctypes.addressof(self._state), int(RunEnd.MORE), False
        while found == RunEnd.MORE:  # an interrupt may end this; a later run finds every thread between two suspends
            with interrupts.native():
                found = function(state, array, len(launches), *arguments, again)
            again, arguments = True, arguments if then is None else then
        for launch in launches:
            if not launch.running:
                launch.settle()
        self._printer.flush()
        return found


class Pools:
    """Memory that launches borrow, kept by size: host memory for frames, window memory for the rest."""

    _KEPT = 64 << 20  # larger pieces go back to the system

    def __init__(self, window: Window) -> None:
        self._window = window
        self._free: dict[tuple[Kind, int], list[Any]] = {}

    def take(self, kind: Kind, nbytes: int) -> tuple[int, Any]:
        """(address, ticket) of at least `nbytes`; `Kind.NONE` is memory outside the window."""
        size = max(4096, 1 << (nbytes - 1).bit_length())
        kept = self._free.get((kind, size))
        if kept:
            piece = kept.pop()
        elif kind is Kind.NONE:
            piece = _zeroed(size)
        else:
            piece = self._carve(kind, size)
        address = piece if isinstance(piece, int) else piece.ctypes.data
        return address, (kind, size, piece)

    def give(self, ticket: Any) -> None:
        kind, size, piece = ticket
        if size <= self._KEPT:
            self._free.setdefault((kind, size), []).append(piece)
        elif kind is not Kind.NONE:
            self._window.free(piece)

    def _carve(self, kind: Kind, size: int) -> int:
        """A piece of the window; small ones are cut from a granule, which stays carved."""
        if size >= 1 << abi.GRANULE_SHIFT:
            return self._window.scratch(size, kind)
        base = self._window.scratch(1 << abi.GRANULE_SHIFT, kind)
        pieces = range(base, base + (1 << abi.GRANULE_SHIFT), size)
        self._free.setdefault((kind, size), []).extend(reversed(pieces[1:]))
        return base


class EngineLaunch:
    """A launch that the engine's `run` will run, for `op`. At most `max_resident` of its blocks are resident at once.
    `params` is the packed parameter buffer. The caller has checked grid, block and shared memory against the device.

    `access` is the table of the process that launches it, the window's first one where it is None, and `process` its
    name, if a machine has several. `heap` is that of its context; without one, malloc gives null.
    `gdc_open` decides whether griddepcontrol.wait passes (True unless the machine says otherwise).
    """

    def __init__(
        self,
        engine: Engine,
        module: EngineModule,
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
        self._rows = np.zeros(len(kernel.sites) + 1, np.dtype(structs.Site))
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
            races = sizeof(structs.RaceBlock) + threads * sizeof(structs.RaceThread)
            self._struct.races = self._take(Kind.NONE, slots * races)
            self._struct.start = engine.detector.share(op.started)
            if op.overlapped is not None and op.overlapped.done:
                self._struct.primary = engine.detector.share(op.overlapped.known)

    def _take(self, kind: Kind, nbytes: int) -> int:
        address, ticket = self.engine._pools.take(kind, nbytes)
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
        """The primary has ended: griddepcontrol.wait passes from now on."""
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
        """Blocks that have not ended, resident or not."""
        return int(self._struct.blocks - self._struct.finished)

    @property
    def block_count(self) -> int:
        return int(self._struct.blocks)

    @property
    def unplaced(self) -> int:
        """Blocks that have never been resident."""
        return int(self._struct.blocks - self._struct.next)

    @property
    def ended(self) -> int:
        return int(self._struct.finished)

    def allow(self, resident: int) -> None:
        """Set how many blocks may be resident (rounded down to whole clusters). The first call comes before the launch
        is first run; later ones may only raise the number.
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
        """The launch has ended: keep its counts and clock, and give its memory back."""
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
                self.engine._pools.give(ticket)
            self._tickets.clear()


@functools.cache
def _owner_classes(device: int) -> Any:
    """The class in which the counters of a launch on this device count each owner of memory."""
    classes = (ctypes.c_uint8 * 256)(*[MemoryOf.PEER] * 8)
    classes[device] = MemoryOf.DEVICE
    classes[abi.OWNER_HOST], classes[abi.OWNER_SHARED] = MemoryOf.HOST, MemoryOf.SHARED
    return classes


def _zeroed(nbytes: int) -> np.ndarray:
    return np.frombuffer(pages.arena(nbytes), np.uint8)
