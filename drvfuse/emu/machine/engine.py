# SPDX-License-Identifier: Apache-2.0
"""The launches of a machine, run together by the native runtime.

The scheduler, the checks and the structures below are those of `runtime.cu`. An engine serves one machine; `load` is
thread-safe, everything else is called with the machine's lock held. Native code runs without Python's lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import abi
from ..abi import RunEnd, structs
from ..findings import events, notices
from ..findings.places import Identity
from ..findings.prints import Printer
from ..native import loader
from ..space.window import Window
from . import interrupts
from .launch_memory import LaunchMemory, zeroed

if TYPE_CHECKING:
    from ..findings.race import Detector
    from ..findings.reports import Report
    from .engine_launch import EngineLaunch
    from .work import Op

EngineModule = loader.NativeModule
_IDENTITIES = 1 << 16  # how many operations are remembered
_RESUMES = 20_000  # length of a run that is bounded by resumes and not by time


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
            self._delay = zeroed(runtime.function("rt_delay_bytes", u64)())
            self._state.delay = self._delay.ctypes.data
            self._end_delay = runtime.function("rt_delay_end", None, at, at)
        self.end_copies = runtime.function("rt_copy_end", None, at)
        self._settle = runtime.function("rt_race_settle", u32, at)
        self._last: list[EngineLaunch] = []
        self.memory = LaunchMemory(window)

    @functools.cached_property
    def copies(self) -> np.ndarray:
        """The native table of pending asynchronous copies, of all launches."""
        return zeroed(loader.runtime().function("rt_copy_bytes", ctypes.c_uint64)())

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
