# SPDX-License-Identifier: Apache-2.0
"""The launches of a machine, run together by the native runtime.

The scheduler and the checks are in `native/runtime.cu` and its headers. An engine serves one machine. `load` is
thread-safe; for all other methods the caller holds the machine's lock. Native code runs without Python's global lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ... import abi
from ...abi import RunEnd, structs
from ...findings import events, notices
from ...findings.places import Identity
from ...findings.prints import Printer
from ...native import loader
from ...space.window import Window
from ..memory.launch_memory import LaunchMemory, zeroed
from ..process import interrupts

if TYPE_CHECKING:
    from ...findings.race import Detector
    from ...findings.reports import Report
    from .engine_launch import EngineLaunch
    from .work import Op

EngineModule = loader.NativeModule
_IDENTITIES = 1 << 16  # the number of operations whose names are kept for reports
_RESUMES = 20_000  # the number of resumes of threads after which a `run` ends, once `count_resumes()` was called


class Engine:
    """Runs the launches of one machine. With seed 0, blocks run in order; other seeds rotate that order, and let some
    launches and warps run later than they could.

    `loop_limit`: the most accesses, or iterations of loops without accesses, that a thread may make between two
    suspends. `delay_stores`: stores reach other blocks late (native/delay.cuh). `idle`: whether the last `run` ended
    because no thread could continue. `clock_ns`: the virtual time.
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
        """The native table of the pending asynchronous copies of all launches."""
        return zeroed(loader.runtime().function("rt_copy_bytes", ctypes.c_uint64)())

    @property
    def clock_ns(self) -> int:
        return int(self._state.clock)

    @property
    def event_count(self) -> int:
        return int(self._state.event_count)

    def history(self, until: int | None = None) -> np.ndarray:
        """The most recent events of the launches, as many as the ring buffer keeps, oldest first. With `until`, only
        those whose number is lower than `until`.
        """
        return events.recent(self._events, self.event_count, until)

    @property
    def undecided(self) -> int:
        """Of the last `advance_clock`, which has returned False: 0 if it has proved that the threads wait for ever,
        else the number of polls after which it stopped the check without a proof.
        """
        return int(self._state.loop_limit) if self._state.undecided else 0

    def notices(self) -> list[Report]:
        """The findings that stop no launch and that were made since this method was last called. Two of them may have
        the same site.
        """
        state = self._state
        taken = [(n, self.identities.get(n.op)) for n in state.notice[: state.notices]]
        state.notices = 0
        return [notices.report(n, identity) for n, identity in taken if identity is not None]

    @staticmethod
    def load(ptx: str) -> EngineModule:
        """The native code of a PTX module. Raises PtxError with the line that the translator refuses."""
        return loader.load(ptx)

    def identify(self, op: Op, launch: EngineLaunch | None = None) -> None:
        """Remember the name of an operation for reports. Only the names of the most recent operations are kept."""
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
        """Drop the references of a launch to vector clocks, and return a reference to one clock: the join of the
        clocks of its threads. Called when the launch has ended or is stopped.
        """
        assert self.detector is not None
        known = int(self._settle(ctypes.addressof(launch)))
        for reference in (launch.start, launch.primary):
            self.detector.release(reference)
        return known

    def run(self, launches: Sequence[EngineLaunch], budget_ms: float = 50) -> None:
        """Run those of the launches together that have not ended. Returns at the first of these events:

        - a launch ends, faults, or has triggered in all of its blocks
        - no thread can continue (then `idle` is set)
        - `budget_ms` milliseconds have passed; after a call of `count_resumes`: a number of resumes of threads is
          reached
        """
        live = [launch for launch in launches if launch.running]
        self._last = live
        if not live:
            self.idle = True
            return
        budget = _RESUMES if self._state.counted else int(budget_ms * 1e6)
        self.idle = self._native(self._run, live, budget, then=(0,)) == RunEnd.IDLE

    def count_resumes(self) -> None:
        """From now on, make each `run` end after a number of resumes of threads, not after a time, so that it ends at
        the same point in each repetition.
        """
        self._state.counted = 1

    def advance_clock(self) -> bool:
        """Advance virtual time, by growing steps, and let all threads poll again. Returns False if that made no
        progress and no thread reads a clock: then the threads wait for ever. Called when the launches of the last `run`
        are idle.
        """
        live = [launch for launch in self._last if launch.running]
        return bool(live) and bool(self._native(self._advance, live))

    def pass_time(self, ns: int, resumes: int) -> bool:
        """Advance virtual time by `ns` and let all threads poll again, for at most about `resumes` resumes of threads.
        Returns False if that made no progress. Called when the launches of the last `run` are idle, but other threads
        or processes of the host may still act.
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
        """Call a native function on launches until its result is not MORE, and return that result. `arguments` are the
        further arguments of the function. If `then` is given, the second and later calls get `then` in place of
        `arguments`.
        """
        array = (ctypes.c_void_p * len(launches))(*(launch.address for launch in launches))
        state, found, again = ctypes.addressof(self._state), int(RunEnd.MORE), False
        # An interrupt (KeyboardInterrupt) may end the loop between two calls, as no thread of a kernel runs then.
        while found == RunEnd.MORE:
            with interrupts.native():
                found = function(state, array, len(launches), *arguments, again)
            again, arguments = True, arguments if then is None else then
        for launch in launches:
            if not launch.running:
                launch.settle()
        self._printer.flush()
        return found
