# SPDX-License-Identifier: Apache-2.0
"""The Python side of the race detector: the order of operations, and reports of races.

Native code checks the accesses by the rules in `native/race.cuh`. This module gives it the order of the operations
(launches, copies and fills). An operation is ordered after the operations for which it has waited, and after everything
that the host knew when the operation was queued. A programmatic dependent is ordered after its primary only from
`griddepcontrol.wait` on. All host code counts as one thread.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..abi import NO_SITE, POOL_SHIFT, Edge, Entry, Range, race_structs
from ..native import loader
from ..space import pages
from . import race_report
from .places import Identity
from .reports import Report

if TYPE_CHECKING:
    from ..space.window import Window

PROFILES = ("hardware", "strict")
_OPS = 1 << 24  # operations of a machine beyond this number are not checked
# The detector remembers at most this number of copies and fills, and this number of pairs of blocks of which one has
# stored a flag by a plain write and the other one has read it. The oldest are forgotten first.
_KEPT = 4096
# If an order is missing for one of these reasons, a report may blame a flag that was stored by a plain write.
_WITHOUT_FLAG = (Edge.NONE, Edge.RELEASED_EARLIER, Edge.ORDER)


class Clock:
    """The vector clock of an operation or of the host: the accesses that it knows. `ref` is a reference to a native
    clock (`native/clock.cuh`), which this object owns.
    """

    __slots__ = ("_detector", "ref")

    def __init__(self, detector: Detector, ref: int) -> None:
        self._detector, self.ref = detector, ref

    def __del__(self) -> None:
        # The garbage collector may call this in any thread, where the reference must not be released. `_all` does it.
        self._detector.dropped.append(self.ref)


class Ordered:
    """An operation on a device, for the detector. `number` is its number among the operations of the machine.

    Until it starts, it holds what is ordered before it: the operations `after`, and `host`, the host's clock when the
    operation was queued. A programmatic dependent has its primary as `overlapped`: what is ordered before the primary's
    start is also ordered before the dependent. `started` and `known` are the operation's own clocks at its start and
    after its end. `done` is set when it has ended.
    """

    __slots__ = ("after", "device", "done", "host", "known", "number", "overlapped", "started")

    def __init__(self, number: int, device: int) -> None:
        self.number, self.device = number, device
        self.after: tuple[Ordered, ...] = ()
        self.overlapped: Ordered | None = None
        self.host: Clock | None = None
        self.started: Clock | None = None
        self.known: Clock | None = None
        self.done = False


class Detector:
    """The race detector of one machine. `profile` is "hardware" or "strict" (`native/race.cuh`). The caller of its
    methods holds the machine's lock. References point to native clocks. If a method returns a reference, its caller
    becomes the owner of the reference.
    """

    def __init__(self, window: Window, profile: str) -> None:
        runtime = loader.runtime()
        self.dropped: deque[int] = deque()
        self._arena = pages.arena(window.nbytes)
        self._table = pages.arena(_OPS * ctypes.sizeof(race_structs.Op))
        self._pools = pages.arena(max(window.nbytes >> POOL_SHIFT << 2, 4))
        self._ops = (race_structs.Op * _OPS).from_buffer(self._table)
        self.state = race_structs.Race(
            arena=ctypes.addressof(ctypes.c_char.from_buffer(self._arena)),
            arena_bytes=window.nbytes,
            arena_top=32,
            cells=pages.cell_address(window.base),
            window_base=window.base,
            ops=ctypes.addressof(self._ops),
            pools=ctypes.addressof(ctypes.c_char.from_buffer(self._pools)),
            strict=profile == "strict",
        )
        u32, u64, at, function = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, runtime.function
        self._join = function("rt_clock_join", u32, at, u32, u32)
        self._retain = function("rt_clock_retain", None, at, u32)
        self._release = function("rt_clock_release", None, at, u32)
        self._end = function("rt_clock_end", u32, at, u32, u32)
        self._range = function("rt_race_range", None, at, u32, u32, u64, u64, u32, u64)
        self._value = function("rt_race_value", u32, at, u32, u32, u64, u32, u32, u32, u32, u64)
        self._writer = function("rt_race_writer", u32, at, u64)
        self._clear = function("rt_race_clear", None, at, u64, u64)
        self._polled = function("rt_race_polled", None, at, u64, u64)
        self._window = window
        self._places: dict[int, int] = {}
        self._copies: dict[int, Clock | None] = {}  # number of a copy or fill -> its clock after its end, or None
        self._host = Clock(self, 0)
        self._said_full = False
        # (writer, reader) of a flag that was stored by a plain write, each as (operation, block) -> what is wrong with
        # the flag, as text
        self._flags: dict[Any, str] = {}
        # The window calls `forget` by a weak reference: a cycle would keep the window of a dropped machine alive.
        weak = weakref.WeakMethod(self.forget)

        def forget(address: int, nbytes: int) -> None:
            method = weak()
            if method is not None:
                method(address, nbytes)

        window.forget = forget

    @property
    def address(self) -> int:
        """The address of the detector's state, an `abi.race_structs.Race`."""
        return ctypes.addressof(self.state)

    # Operations ------------------------------------------------------------------------------------------------------

    def queue(self, op: Ordered, after: Iterable[Ordered], primary: Ordered | None, chain: int) -> None:
        """Called when an operation is queued: record what it is ordered after. If the operation is a programmatic
        dependent, `primary` is the kernel on which it depends, otherwise None. `chain` is the number of the operation's
        stream, or of its branch of a graph.
        """
        if op.number >= _OPS:
            self.state.exhausted = 1
            return
        place = self._places[chain] = self._places.get(chain, 0) + 1
        overlapped = 0 if primary is None else primary.number
        self._ops[op.number] = race_structs.Op(chain, place, op.device, overlapped)
        op.host, op.after, op.overlapped = self._host, tuple(after), primary

    def start(self, op: Ordered) -> None:
        """Make the clock of an operation that starts now. All operations for which it waited have ended."""
        if op.started is not None:
            return
        clocks = [op.host, *(other.known for other in op.after)]
        if op.overlapped is not None:
            clocks.append(op.overlapped.started)
        op.started = self._all(clocks)
        op.host, op.after = None, ()

    def end(self, op: Ordered, known: int | None) -> None:
        """Called when an operation has ended: make the clock `op.known`. The argument `known` is a reference to a
        native clock, which holds what the operation's threads knew when they ended. This call becomes the owner of the
        reference. If `known` is None, the clock `op.started` is used.
        """
        self.start(op)
        ref = self.share(op.started) if known is None else known
        op.known = Clock(self, self._end(self.address, ref, op.number))
        if op.number in self._copies:
            self._copies[op.number] = op.known
            if len(self._copies) > _KEPT:
                del self._copies[next(iter(self._copies))]

    def touch(self, op: Ordered, accesses: Iterable[Any], now: int) -> None:
        """Called when a copy or fill accesses memory: check the accesses. `now` is the number of events so far."""
        for at in accesses:
            if at.nbytes and self._window.contains(at.address, at.nbytes):
                if at.write:
                    self._copies[op.number] = None
                self._access(op, at.address, at.nbytes, Range.WRITE if at.write else Range.READ, now)

    def free(self, op: Ordered, address: int, nbytes: int, now: int) -> None:
        """Called when memory is freed: check the free, which conflicts with all accesses to that memory."""
        self._access(op, address, nbytes, Range.FREE, now)

    def _access(self, op: Ordered, address: int, nbytes: int, what: Range, now: int) -> None:
        """Check one access of an operation, to a range of the window, for races."""
        assert op.started is not None
        self._range(self.address, op.number, op.started.ref, address, nbytes, what, now)

    def value(self, op: Ordered, address: int, nbytes: int, number: int, write: bool, ordered: bool, now: int) -> None:
        """Called when a stream writes a word, or has found the value for which it waited: check access `number` of
        `op`. `ordered` says whether the write is a release, or the wait an acquire (`native/race_values.cuh`).

        With the profile "hardware", if a wait finds the value that a copy or fill has written, `op` is ordered after
        that copy or fill, which has ended.
        """
        if not self._window.contains(address, nbytes):
            return
        known = None if write or self.state.strict else self._copies.get(self._writer(self.address, address))
        if known is not None:
            op.started = self._all([op.started, known])
        assert op.started is not None
        ref = self._value(self.address, op.number, op.started.ref, address, nbytes, number, write, ordered, now)
        op.started = Clock(self, ref)

    def host_learns(self, ops: Iterable[Ordered]) -> None:
        """Called when the host has waited for these operations: from now on the host knows what they know."""
        known = [op.known for op in ops if op.done and op.known is not self._host]
        if known:
            self._host = self._all([self._host, *known])

    def together(self, ops: Iterable[Ordered]) -> Clock:
        """The join of the clocks of these operations, which have ended."""
        return self._all([op.known for op in ops])

    def share(self, clock: Clock | None) -> int:
        """A new reference to `clock` for native code. For None it is 0, the empty clock."""
        ref = clock.ref if clock is not None else 0
        self._retain(self.address, ref)
        return ref

    def release(self, ref: int) -> None:
        """Give up a reference to a native clock. Native code has held the reference until now."""
        self._release(self.address, ref)

    def _all(self, clocks: Iterable[Clock | None]) -> Clock:
        """The join of clocks. Also releases the references of `Clock` objects that were deleted since the last call."""
        while self.dropped:
            self._release(self.address, self.dropped.popleft())
        ref = 0
        for clock in clocks:
            ref = self._join(self.address, ref, self.share(clock))
        return Clock(self, ref)

    # Memory ----------------------------------------------------------------------------------------------------------

    def forget(self, address: int, nbytes: int) -> None:
        """Drop the records of all accesses to a range of addresses, which is new memory from now on."""
        self._clear(self.address, address, nbytes)
        pages.drop(pages.cell_address(address), nbytes >> 2)

    def polled(self, address: int, nbytes: int) -> None:
        """Do not check these bytes for races from now on, as the program's protocol accesses them without an order."""
        self._polled(self.address, address, nbytes)

    # Findings --------------------------------------------------------------------------------------------------------

    def drain(self, identities: dict[int, Identity]) -> list[tuple[Report, int]]:
        """The races since the last call, each with the number of events before it."""
        state = self.state
        found = [
            (
                race_report.report(
                    f, identities, self._plain_flag(f, identities), self._window.mappings.teams.behind(int(f.addr))
                ),
                int(f.events),
            )
            for f in state.found_races[: state.found_count]
        ]
        state.found_count = 0
        if state.exhausted and not self._said_full:
            self._said_full = True
            text = "the race detector has used up its memory: races from here on are not found (use a fresh Machine)"
            found.append((Report("race_capacity", text), 0))
        return found

    def _plain_flag(self, f: race_structs.Found, identities: dict[int, Identity]) -> str | None:
        """The reason, as text, why a flag did not order two plain accesses; None if no such flag was seen.

        Such a flag is a word that one block has stored by a plain write, and the other block has read by a strong read.
        When this method is called for the race between that write and that read, it remembers the flag and returns
        None.
        """
        mine, other = (f.op, f.block), (f.other_op, f.other_block)
        strength = f.flags & Entry.STRONG, f.other_flags & Entry.STRONG
        if strength == (0, 0):
            return self._flags.get((other, mine)) if f.edge in _WITHOUT_FLAG else None
        writer, op, site = ((other, mine), f.other_op, f.other_site) if strength[0] else ((mine, other), f.op, f.site)
        reads = f.flags if strength[0] else f.other_flags
        if 0 in strength and not reads & Entry.WRITE and site != NO_SITE:
            self._flags[writer] = race_report.plain_flag(identities.get(op), site)
            if len(self._flags) > _KEPT:
                del self._flags[next(iter(self._flags))]
        return None
