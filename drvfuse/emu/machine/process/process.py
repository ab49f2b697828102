# SPDX-License-Identifier: Apache-2.0
"""A process that uses a machine, with all that a driver keeps for each process of the operating system.

A machine emulates the hardware: devices with their memory, the engine that runs kernels, the clock and the reports. A
process has its own handles, contexts (with their errors), streams, modules, pools, captures and allocations. An address
belongs to one process; kernels, copies and calls of other processes have no access to it. Memory of cuMemCreate and
multicast objects are passed between processes by descriptors only.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, SupportsInt, TypeVar, cast

from ....errors import ArgumentError, require_integer, shown
from ...bindings import R
from ...findings.reports import Report
from ...space.access import AccessTable
from ..graphs.capture import Capture
from ..graphs.memory import GraphMemories
from ..memory import host_files
from ..memory.foreign import Foreign
from ..memory.host_files import FilePart
from ..memory.process_memory import ProcessMemory
from ..objects import Context, Device, Event, Function, Handle, Listener, Mappable, Object, Pool, Stream, Tenancy
from ..run.work import Command, Op, call_host
from . import api, interrupts
from .failure import Failure, Injected
from .threads import Threads

if TYPE_CHECKING:
    from ...findings.counters import Summary
    from ..machine import LaunchRecord, Machine, Memory

ORPHANS_KEPT = 4096
O = TypeVar("O", bound=Object)


class Process:
    """A process of `machine`, made by `machine.process(name)`. `number` counts the processes; the machine's own process
    has number 0.

    `driver` is its driver API. A process may be given wherever drvfuse takes a driver: `df.device(0, driver=process)`.
    Its threads are the threads that call its driver; one thread may call the drivers of several processes. `close()`,
    or the end of a `with` block, ends the process.

    Three attributes are functions that reach host memory and host functions: `file_behind(address, nbytes)` is
    `host_files.behind`, `make_shared(address, nbytes)` is `host_files.make_shared`, and `call_host(function,
    *arguments)` calls a host function, without the machine's lock. By default these functions act on this process of
    the operating system. For a client, they are replaced by functions that act on the client's process.
    """

    def __init__(self, machine: Machine, number: int, name: str, table: AccessTable) -> None:
        self.machine, self.number, self.name, self.table = machine, number, name, table
        self.runtime_driver: Any = None  # the `runtime.driver.Driver` of this process
        self.initialised = False
        self._closed = False
        self.injected: list[Injected] = []
        self.refusal: Report | None = None  # the report on the last driver call that failed
        self.threads = Threads()
        self.handles: dict[int, Object] = {}
        self.orphans: dict[int, int] = {}  # handle -> device, for objects that were destroyed with their context
        self.captures: list[Capture] = []
        self.memory = ProcessMemory(self)
        self.graph_memory = GraphMemories(self)
        self.file_behind: Callable[[int, int], FilePart | None] = host_files.behind
        self.foreign: Foreign | None = None  # for a client: the host memory of its process
        self.make_shared: Callable[[int, int], FilePart | None] = host_files.make_shared
        self.call_host: Callable[..., None] = call_host
        self.callers: set[int] = set()  # the threads that have called this driver so far
        self._blocked: dict[int, Callable[[], bool]] = {}  # waiting thread -> whether its call may return
        self._tenancies: list[Tenancy] = []
        for device in machine.devices:
            pool = self.add(Pool(device, is_default=True))
            self._tenancies.append(Tenancy(device, pool, pool))

    @functools.cached_property
    def driver(self) -> Any:
        """The driver API of this process, with cuda.bindings.driver's names."""
        return api.make(self)

    @property
    def closed(self) -> bool:
        return self._closed or self.machine.closed

    @property
    def title(self) -> str | None:
        """The name of the process in reports. None on a machine that never had a second process."""
        return self.name if self.machine.several else None

    @property
    def alive(self) -> bool:
        """True if the process may still call the driver. The machine's own process counts as alive only while it has a
        context.
        """
        return not self.closed and (self.number > 0 or bool(self.contexts()))

    @contextlib.contextmanager
    def blocking(self, done: Callable[[], bool]) -> Iterator[None]:
        """Context manager: in the body of the `with` statement, the calling thread waits, in a call of this process,
        until `done()` is true.
        """
        ident = threading.get_ident()
        self._blocked[ident] = done
        try:
            yield
        finally:
            del self._blocked[ident]

    @property
    def blocked(self) -> set[int]:
        """The threads in calls that cannot return yet."""
        return {ident for ident, done in list(self._blocked.items()) if not done()}

    def close(self) -> None:
        """End the process: its running and queued work ends, and its contexts, objects and addresses are released.
        Memory and multicast objects that other processes have imported stay valid in those processes. The driver of
        this process returns CUDA_ERROR_DEINITIALIZED from now on, also from calls that wait. Idempotent.
        """
        machine = self.machine
        with interrupts.held(), machine.lock:
            machine.lock.called(self, "close")
            if self.closed:
                return
            self._closed = True
            for context in self.contexts():
                self.drop_context(context)
            self.memory.clear()
            self.graph_memory.clear()
            for handle in [item for item in self.handles.values() if isinstance(item, Handle)]:
                machine.mappables.let_go(handle.item)
            self.handles.clear()
            self.captures.clear()
            machine.processes.remove(self)
            if self.table is not machine.window.table:
                machine.window.close_table(self.table)
            machine.lock.changed()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Process {self.name} of {self.machine!r}{', closed' if self._closed else ''}>"

    # What a program asks of its machine ------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """The reports of the machine, of all its processes."""
        return self.machine.reports

    @property
    def launches(self) -> deque[LaunchRecord]:
        """Records of the kernels that ended last, of all processes of the machine."""
        return self.machine.launches

    def counters(self) -> Summary:
        return self.machine.counters()

    def clock(self) -> int:
        """Virtual nanoseconds since the machine started."""
        return self.machine.clock()

    def declare_polled(self, memory: Memory | SupportsInt, nbytes: int | None = None) -> None:
        """Report no races in a range until it is freed (see `Machine.declare_polled`)."""
        machine, given = self.machine, cast(Any, memory)
        machine.require_open()
        try:
            address = int(getattr(given, "ptr", given))
        except Exception:
            raise ArgumentError("memory", shown(memory), "an array or an address") from None
        nbytes = getattr(memory, "nbytes", None) if nbytes is None else nbytes
        if nbytes is None:
            raise ArgumentError("nbytes", "not given", "the size of the range, as `memory` is a mere address")
        nbytes = require_integer("nbytes", nbytes, "an integer of at least 1", 1)
        with machine.lock:
            machine.lock.called(self, "declare_polled")
            if not machine.window.index.covers(address, nbytes):
                where = f"{nbytes} bytes at 0x{address:x} ({machine.window.index.nearest(address)})"
                raise ArgumentError("memory", where, "a range of allocated memory of this machine")
            if machine.detector is not None:
                machine.detector.polled(address, nbytes)

    def held(self) -> dict[str, int]:
        """The numbers of live allocations of all processes of the machine together, as `Machine.held` describes
        them.
        """
        machine = self.machine
        with machine.lock:
            machine.lock.called(self, "held")
            machine.mappables.descriptors.sweep()
            multicasts = machine.mappables.multicasts()
            found = {
                "device_bytes": sum(device.used for device in machine.devices),
                "physical": len(machine.mappables.memories()),
                "multicast": len(multicasts),
                "binds": sum(len(item.binds) for item in multicasts),
            }
            for kind in ("allocations", "mappings", "reservations"):
                found[kind] = sum(process.memory.held()[kind] for process in machine.processes)
            return found

    def inject(
        self, function: str, code: Any, *, device: int | None = None, after: int = 0, times: int = 1
    ) -> Injected:
        """Make a driver function fail, for tests: after `after` calls of it by this process, the next `times` calls
        return `code` and do nothing.

        With `device`, calls that do not concern this device are ignored. A call concerns the devices, and the devices
        of the memory, that its arguments name. If they name none, it concerns the device of the current context. `left`
        of the result is the number of calls that are still to fail. `self.injected.clear()` removes all injected
        failures.
        """
        rule = Injected.checked(self, function, code, device, after, times)
        self.injected.append(rule)
        return rule

    def finding(self, device: int) -> Report | None:
        """The report of the fault that ended the work of this process on a device. None if there was no fault."""
        found = (context.finding for context in self.contexts() if context.device.index == device)
        return next((finding for finding in found if finding is not None), None)

    # Handles and the current context ---------------------------------------------------------------------------------

    def add(self, item: O) -> O:
        """Register an object under its handle."""
        self.handles[item.handle] = item
        return item

    def remove(self, item: Object) -> None:
        self.handles.pop(item.handle, None)

    def open_handle(self, item: Mappable) -> Handle:
        """A new handle of a Mappable, with one reference."""
        self.machine.mappables.hold(item)
        return self.add(Handle(item))

    def orphan(self, item: Object, device: Device) -> None:
        """Remove an object because its context is destroyed. The report of a later use of its handle says so."""
        self.remove(item)
        self.orphans[item.handle] = device.index
        while len(self.orphans) > ORPHANS_KEPT:
            del self.orphans[next(iter(self.orphans))]

    def get(self, value: Any, kind: type[O], code: Any = R.CUDA_ERROR_INVALID_HANDLE) -> O:
        """The object of a handle. Raises Failure(code) if the handle does not name a live object of this kind."""
        number = 0 if value is None else int(value)
        item = self.handles.get(number)
        if isinstance(item, kind):
            return item
        if number not in self.orphans:
            raise Failure(code)
        device = self.orphans[number]
        name = "kernel" if kind is Function else kind.__name__.lower()
        message = f"the {name} 0x{number:x} is used, and its context on device {device} was destroyed"
        if kind is Event:
            code = R.CUDA_ERROR_CONTEXT_IS_DESTROYED
        elif not self.threads.contexts:
            code = R.CUDA_ERROR_INVALID_CONTEXT
        raise Failure(code, Report("context", message, device=device))

    def device(self, value: Any) -> Device:
        index = 0 if value is None else int(value)
        if not 0 <= index < len(self.machine.devices):
            raise Failure(R.CUDA_ERROR_INVALID_DEVICE)
        return self.machine.devices[index]

    def tenancy(self, device: Device) -> Tenancy:
        """The primary context and the pools of this process on a device."""
        return self._tenancies[device.index]

    def contexts(self) -> list[Context]:
        """The contexts that were not destroyed, in the order of their creation."""
        return [item for item in self.handles.values() if isinstance(item, Context)]

    def listeners(self) -> list[Listener]:
        """The callbacks for calls that failed."""
        return [item for item in list(self.handles.values()) if isinstance(item, Listener)]

    def current(self) -> Context:
        """The current context of the calling thread. Raises Failure with the context's error, if it has one."""
        stack = self.threads.contexts
        if not stack or stack[-1] is None:
            raise Failure(R.CUDA_ERROR_INVALID_CONTEXT)
        context = stack[-1]
        self.healthy(context)
        return context

    @staticmethod
    def healthy(context: Context) -> None:
        """Raise Failure if the context was destroyed or had a fault."""
        if context.destroyed:
            raise Failure(R.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        if context.error is not None:
            raise Failure(context.error)

    def stream(self, value: Any) -> Stream:
        """The stream that a CUstream argument means: 0 and 1 are the current context's legacy stream, 2 is the calling
        thread's own stream, and any other value is a stream's handle.
        """
        handle = 0 if value is None else int(value)
        if handle in (0, 1):
            return self.current().legacy
        if handle == 2:
            context = self.current()
            ident = threading.get_ident()
            if ident not in context.per_thread:
                context.per_thread[ident] = stream = self.add(Stream(context))
                context.streams.add(stream)
            return context.per_thread[ident]
        found = self.get(handle, Stream)
        self.healthy(found.context)
        return found

    def drop_context(self, context: Context) -> None:
        """Stop all that runs in a context, and drop the context with all that belongs to it."""
        context.destroyed = True
        self.machine.progress.fail(context, R.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        for allocation in self.memory.owned(context):
            self.memory.free(allocation)
        if context.heap is not None:
            context.heap.close()
        functions = [function for module in context.modules for function in module.functions.values()]
        for item in (context, *context.streams, *context.events, *context.modules, *functions):
            self.orphan(item, context.device)
        for other in self.contexts():
            other.peers.discard(context)
        for owner in context.peers:
            self.memory.refresh_context(owner)

    # Queueing --------------------------------------------------------------------------------------------------------

    def enqueue(self, stream: Stream, command: Command) -> Op | None:
        """Queue a command on a stream. If the stream is being captured, add it to the graph and return None."""
        if stream.capture is not None:
            stream.capture.record(stream, command)
            return None
        self.refuse_implicit(stream)
        return self.machine.progress.enqueue(stream, command)

    def refuse_implicit(self, stream: Stream) -> None:
        """Raise Failure if work on the legacy stream would have to wait for a stream that is being captured."""
        if stream.is_legacy:
            for other in stream.context.streams:
                if other.blocking:
                    other.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def refuse_in_capture(self) -> None:
        """Raise Failure, and invalidate the captures, if the thread's capture mode forbids an unsafe call now."""
        mode = self.threads.capture_mode
        if mode == Capture.RELAXED:
            return
        ident = threading.get_ident()
        hit = [
            c
            for c in self.captures
            if (c.thread == ident and c.mode != Capture.RELAXED)
            or (mode == Capture.GLOBAL and c.mode == Capture.GLOBAL)
        ]
        for capture in hit:
            capture.invalidate()
        if hit:
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def context_ops(self, context: Context) -> list[Op]:
        """The operations for which a wait for the context has to wait. With the race detector, they include operations
        that have ended, so that the detector learns that they happen before what follows the wait.
        """
        ops = [op for stream in (*context.streams, context.legacy) for op in stream.tail]
        return ops if self.machine.detector is not None else [op for op in ops if not op.done]

    def synchronise(self, context: Context) -> None:
        """Run until all operations of a context are done. Raises Failure with the context's error, if it has one."""
        self.machine.waits.wait(self.context_ops(context))
        self.healthy(context)
