# SPDX-License-Identifier: Apache-2.0
"""The execution of queued work, which runs inside of the calls that wait. All devices advance together.

Nothing runs in the background. A call that synchronises, queries or copies drives `Progress`, by `Waits`, until its
condition holds. All ready operations of all devices are started, and all running kernels share the engine. The order of
starts depends on the order of calls and on the seed alone, so a program runs in the same way each time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...bindings import R
from ...findings import reports
from ...space.pages import WindowError
from ..objects import Context, Stream, new_chain
from ..process import interrupts
from ..process.failure import Failure, error_of
from . import queued
from .backlog import Backlog
from .kernels import Kernels
from .new_findings import NewFindings
from .values import ValueOps, WaitValue
from .work import Callback, Command, Free, HostCall, Launch, Op, Release

if TYPE_CHECKING:
    from ...findings.race import Detector
    from ..machine import Machine
    from ..process.process import Process

BUDGET_MS = 50
_LEAST_NS = 1000
"""The virtual nanoseconds that each operation takes in the times of events. Only a wait advances the clock itself."""


class Progress:
    """Runs the queued operations of one machine. Its methods are called with the machine's lock held."""

    def __init__(self, machine: Machine, detector: Detector | None) -> None:
        self.machine, self.detector = machine, detector
        self.submitted = 0
        self._sequence = itertools.count(1)
        self._backlog = Backlog(machine.seed)
        self._kernels = Kernels(machine)
        self._awaiting: list[Op] = []  # operations that wait for a value in memory
        self.in_host_function = 0  # the number of threads in a host function
        self._pending = 0
        self._ended = 0
        self._findings = NewFindings(machine, detector)

    # Queueing --------------------------------------------------------------------------------------------------------

    def enqueue(self, stream: Stream, command: Command) -> Op:
        """Queue a command after the operations for which its stream has to wait. Not for a captured stream."""
        context = stream.context
        after = self._to_wait_for(stream.tail)
        last = stream.last
        ordered: list[Op] = []
        if stream.is_legacy:
            ordered = self._to_wait_for(op for other in context.streams if other.blocking for op in other.tail)
        elif stream.blocking:
            ordered = self._to_wait_for(context.legacy.tail)
        overlaps = False
        if isinstance(command, Launch) and command.programmatic and last is not None:
            # The launch may overlap `last`, unless `last` has ended. With the race detector, a `last` that has ended
            # counts as running, as the races that are found must not depend on when it ended.
            waits = not last.done or (self.detector is not None and all_done(after))
            overlaps = isinstance(last.command, Launch) and waits and all_done(ordered)
        if overlaps:
            op = self.submit(command, ordered, chain=stream.chain, primary=last, priority=stream.priority)
            stream.tail = [*after, op]
        else:
            op = self.submit(command, [*after, *ordered], chain=stream.chain, priority=stream.priority)
            stream.tail = [op]
        stream.last = op
        return op

    def enqueue_together(self, stream: Stream, commands: Iterable[Command]) -> list[Op]:
        """Queue commands after the operations for which a stream has to wait. The commands are not ordered with one
        another. The stream's next operation waits for all of them.
        """
        start = self.enqueue(stream, Command(stream.context))
        ops = [self.submit(command, [start], chain=new_chain(), priority=stream.priority) for command in commands]
        stream.tail, stream.last = [start, *ops], None
        return ops

    def _to_wait_for(self, ops: Iterable[Op]) -> list[Op]:
        """Those of `ops` for which a later operation has to wait. With the race detector, these include operations that
        have ended.
        """
        live: list[Op] = []
        done: list[Op] = []
        for op in ops:
            (done if op.done else live).append(op)
        if self.detector is None:
            return live
        if len(done) > 1:  # one new operation replaces all operations that have ended
            one = Op(done[0].command, done[0].order, done[0].number)
            one.done = True
            one.started = one.known = self.detector.together(done)
            done = [one]
        return [*done, *live]

    def submit(
        self, command: Command, after: Iterable[Op], *, chain: int, primary: Op | None = None, priority: int = 0
    ) -> Op:
        """Queue a command after the operations `after` and, as a programmatic dependent, after `primary`. The
        operation is the next one of `chain`.
        """
        if isinstance(command, Launch) and command.priority is not None:
            priority = command.priority
        number = next(self._sequence)
        op = Op(command, (priority, self._backlog.draw(), number), number)
        op.call = self.machine.lock.call
        op.allocations = queued.touched(command)
        after = dict.fromkeys(after)
        if self.detector is not None:
            self.detector.queue(op, after, primary, chain)
        for other in after:
            if not other.done:
                other.dependents.append(op)
                op.waits += 1
        if primary is not None and not primary.done:
            op.primary = primary
            primary.secondaries.append(op)
        self._pending += 1
        self.submitted += 1
        self._backlog.release(op)
        self.machine.lock.changed()
        return op

    def kernels(self, context: Context) -> list[str]:
        """The names of the kernels of a context that have not ended, in the order in which they were queued."""
        pending = {*self._kernels.running, *self._kernels.crowded, *self._awaiting, *self._backlog.all()}
        rest = list(pending)
        while rest:
            op = rest.pop()
            rest += [other for other in (*op.dependents, *op.secondaries) if other not in pending]
            pending.update(op.dependents, op.secondaries)
        ours = sorted((op for op in pending if op.command.context is context), key=lambda op: op.number)
        return [op.command.function.name for op in ours if isinstance(op.command, Launch)]

    @property
    def running(self) -> bool:
        """True if any kernel runs."""
        return bool(self._kernels.running)

    def polled(self) -> set[int]:
        """The addresses that kernels poll, and the addresses of words for which streams wait."""
        waited = {wait.address for _, wait in self._waits()}
        return waited | {b.address for op in self._kernels.running for b in op.launch.blocked() if b.address}

    def _waits(self) -> list[tuple[Op, WaitValue]]:
        """The waits of streams for values in memory, each with its operation."""
        found = []
        for op in self._awaiting:
            wait = op.command.operations[op.at] if isinstance(op.command, ValueOps) else None
            assert isinstance(wait, WaitValue)
            found.append((op, wait))
        return found

    def wakes(self) -> bool:
        """True if memory holds a value for which a stream waits."""
        return any(wait.proceed(self.machine) for _, wait in self._waits())

    def step(self) -> bool:
        """Start the ready operations, and let the engine run for a moment. Returns False if no work could proceed."""
        awaiting, self._awaiting = self._awaiting, []
        for op in (*self._kernels.make_room(), *awaiting):
            self._backlog.ready(op)
        moved = self._start_ready()
        if self._kernels.running:
            engine = self.machine.engine
            launches = [op.launch for op in self._kernels.running]
            with interrupts.taken():
                engine.run(launches, budget_ms=BUDGET_MS)
            self._findings.report_notices()
            moved = not engine.idle or moved
            for op in list(self._kernels.running):
                if op in self._kernels.running:  # false if the fault of another kernel has ended it
                    moved = self._settle(op) or moved
        moved = self._start_ready() or moved
        # A loop, since an operation that the backlog lets go cannot start if it waits for a value or for
        # multiprocessors.
        while not moved and self._backlog.let_go():
            moved = self._start_ready()
        self._findings.report_races()
        return moved

    # Running ---------------------------------------------------------------------------------------------------------

    def _start_ready(self) -> bool:
        started = False
        while self._backlog.wake_early():
            while op := self._backlog.take():
                started = self._start(op) or started
            self._backlog.wake_held()
        return started

    def _start(self, op: Op) -> bool:
        command = op.command
        if self.detector is not None:
            self.detector.start(op)
        if command.context.error is not None or command.context.destroyed:
            if isinstance(command, Callback) and not command.context.destroyed:
                self.call_host(command.context.process, command.function, *command.arguments())
            elif isinstance(command, Release):
                command.run(self.machine)
            self._finish(op)
        elif isinstance(command, Launch):
            if not self._place(op, command):
                return False
        elif isinstance(command, HostCall):
            self.call_host(command.context.process, command.function, *command.arguments())
            self._finish(op)
        else:
            return self._run(op, command)
        return True

    def _run(self, op: Op, command: Command) -> bool:
        """Run an operation that is neither a kernel nor a host function. Returns False if it must wait for a value."""
        refusal = queued.refusal(command, op.allocations)
        if refusal is None:
            if self.detector is not None:
                self.machine.engine.identify(op)
                now = self.machine.engine.event_count
                if isinstance(command, Free):
                    self.detector.free(op, command.allocation.base, command.allocation.nbytes, now)
                else:
                    self.detector.touch(op, command.touches(), now)
            if isinstance(command, ValueOps) and not self._proceed(op, command):
                self._awaiting.append(op)
                return False
            try:
                command.run(self.machine)
            except Failure as failure:
                refusal = failure.report
        self._finish(op)
        if refusal is not None:
            self.machine.report(refusal)
            self.fail(command.context, R.CUDA_ERROR_ILLEGAL_ADDRESS, refusal)
        return True

    def _proceed(self, op: Op, command: ValueOps) -> bool:
        """Continue the writes and waits of an operation (`ValueOps`). Returns False if it must wait for a value."""
        for one in command.operations[op.at :]:
            if not one.proceed(self.machine):
                return False
            if self.detector is not None:
                now = self.machine.engine.event_count
                self.detector.value(op, one.address, one.size, op.at, one.writes, one.barrier, now)
            op.at += 1
        return True

    def _place(self, op: Op, command: Launch) -> bool:
        """Start a kernel, or end it with an error. Returns False if the multiprocessors have no room for it yet."""
        try:
            return self._kernels.place(op, command)
        except WindowError as error:
            name, device, process = command.function.name, command.context.device.index, command.context.process
            message = f"no room for the shared and local memory of its resident blocks: {error}"
            report = reports.Report("memory", message, name, device=device, process=process.title)
            self.machine.report(report)
            self._finish(op)
            self.fail(command.context, R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, report)
            return True

    def _settle(self, op: Op) -> bool:
        """Handle the fault or the end of a launch, if there was one. Returns True if the launch has ended."""
        if not op.launch.running:
            op.launch.settle()  # an interrupt may have prevented this when the launch ended
        if op.launch.fault is not None:
            fault = op.launch.fault
            report = reports.Report(**vars(fault))
            self.machine.report(report)
            self.fail(op.command.context, error_of(fault.kind), report)
            return True
        if op.launch.done:
            self._finish(op)
            return True
        return False

    def fail(self, context: Context, code: Any, finding: reports.Report | None = None) -> None:
        """Set the error of a context. Its kernels stop, and its queued work is skipped."""
        if context.error is None:
            context.error, context.finding = code, finding
        for op in [op for op in self._kernels.running if op.command.context is context]:
            op.launch.abandon()
            self._finish(op)
        for op in [op for op in self._awaiting if op.command.context is context]:
            self._awaiting.remove(op)
            self._finish(op)

    def _finish(self, op: Op) -> None:
        op.done = True
        if self.detector is not None:
            self.detector.end(op, None if op.launch is None else op.launch.known)
        self._ended += 1
        op.time = self.machine.clock() + self._ended * _LEAST_NS
        self._pending -= 1
        if op.launch is not None and op in self._kernels.running:
            self._kernels.running.remove(op)
            self.machine.note(op.command, op.launch)
        op.launch = None
        self._backlog.ended(op)
        self.machine.lock.changed()

    def call_host(self, process: Process, function: int, *arguments: int) -> None:
        """Call a host function of a process, without the machine's lock. The function may not call the driver."""
        with self.outside(process):
            process.call_host(function, *arguments)

    @contextlib.contextmanager
    def outside(self, process: Process) -> Iterator[None]:
        """Context manager: in the body of the `with` statement, the calling thread runs host code of a process, without
        the machine's lock.
        """
        machine = self.machine
        self.in_host_function += 1
        try:
            with process.threads.host_function(), machine.lock.released():
                yield
        finally:
            self.in_host_function -= 1
            machine.lock.changed()

    def deadlock(self) -> None:
        """End all running kernels, and all waits for values, with a deadlock report. Called when no work can
        proceed.
        """
        if not self._kernels.running and not self._awaiting:
            raise AssertionError(f"{self._pending} operations wait for one another")
        self._give_up("deadlock", "nothing can go on")

    def interrupted(self, process: Process) -> None:
        """End the running kernels of a process, as one of them may never end. Called if Ctrl-C ends a wait."""
        for op in list(self._kernels.running):
            self._settle(op)
        self._give_up("interrupted", "Ctrl-C ended what ran", process)

    def _give_up(self, kind: str, headline: str, process: Process | None = None) -> None:
        """End the running kernels, and the operations that wait for a value in memory, of a process or, if `process` is
        None, of all processes. Makes a report of kind `kind`, which says where each kernel and each wait was.
        """
        contexts = {op.command.context for op in (*self._kernels.running, *self._awaiting)}
        if process is not None:
            contexts = {context for context in contexts if context.process is process}
        if contexts:
            waits = [
                f"{op.command.context.device.index}, a stream: waits for {wait}; it is 0x{wait.found(self.machine):x}"
                for op, wait in self._waits()
            ]
            report = self._kernels.standstill(kind, headline, waits)
            self.machine.report(report)
            for context in contexts:
                self.fail(context, R.CUDA_ERROR_LAUNCH_TIMEOUT, report)


def all_done(ops: Iterable[Op]) -> bool:
    return all(op.done for op in ops)
