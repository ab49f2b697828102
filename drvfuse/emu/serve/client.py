# SPDX-License-Identifier: Apache-2.0
"""The client's side of a machine that another process serves."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsInt

from ...errors import ArgumentError, ClosedError, DriverUnavailable, shown
from ..bindings import R
from ..machine.process import interrupts
from ..wire.arguments import Invalid
from ..wire.coder import Coder
from ..wire.message import Incoming, Outgoing
from ..wire.parameters import Layout
from . import address as addresses
from .channel import Ended, Tag, close_rest, packed, receive, send, unpacked
from .client_thread import Line, Local, run_host_functions
from .hello import greeting
from .host_memory import HostMemory
from .logs import ErrorLogs

if TYPE_CHECKING:
    from ..findings.counters import Summary
    from ..findings.reports import Report

_END_CONTEXTS = {"cuCtxDestroy", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset"}
# After these calls, the machine may request that this process runs host functions, or reads and writes its host memory.
# So the thread that does this is started before the first of these calls.
_HOST_FUNCTIONS = {
    *("cuLaunchHostFunc", "cuStreamAddCallback", "cuUserObjectCreate"),
    *("cuStreamBeginCapture", "cuStreamBeginCaptureToGraph"),  # a captured graph may copy host memory when it runs
}
_NO_MACHINE = {"cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}


class AttachedMachine:
    """The machine that another process serves at `address`. This process becomes one of the processes that use it.

    `driver` is its driver API for this process. An AttachedMachine may be given wherever a `Machine` may be given, as
    in `df.device(0, driver=machine)` and `Group.connect(driver=machine)`. `close()` has the effect on the machine that
    the end of this process would have. Raises DriverUnavailable, with the reason, if the machine cannot be reached or
    used.
    """

    def __init__(self, address: str, argument: str = "address") -> None:
        self.address = address
        self.runtime_driver: Any = None  # the `runtime.driver.Driver` for this machine
        self.pid = os.getpid()
        self.closed = self._left = False
        self._argument = argument
        self._local = Local()
        self._layouts: dict[int, Layout] = {}
        self._logs = ErrorLogs()
        self._lock = threading.Lock()
        self._host_line: socket.socket | None = None
        self._known: list[Report] = []
        self.refusal: Report | None = None
        name = os.environ.get("RANK", "")
        self._life, facts = self._greet("life", name=f"rank {name}" if name.isdigit() else None)
        self.name, self._key, self._machine = facts["name"], facts["key"], facts["machine"]
        self.server_pid: int = facts["pid"]
        self.device_count, self.arch, self.seed = facts["devices"], facts["arch"], facts["seed"]
        self.sm_count: int = facts["sm_count"]
        self._memory = self._host_memory(facts["base"], facts["nbytes"])
        _attached.add(self)

    def _host_memory(self, base: int, nbytes: int) -> HostMemory:
        try:
            return HostMemory(base, nbytes, self._layout)
        except OSError:
            self._life.close()
            raise DriverUnavailable(
                f"cannot attach to the machine at {self.address}: its pinned memory needs the addresses 0x{base:x} to "
                f"0x{base + nbytes:x} of this process, and some of them are in use; close the other emulated machines "
                "of this process first"
            ) from None

    # Lifetime --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the machine. All that this process has there is freed. Idempotent."""
        with self._lock:
            if self._left:
                return
            self.closed = self._left = True
        if self.pid == os.getpid():
            self._disconnect()
            self._memory.close()

    def __del__(self) -> None:
        if "_life" in self.__dict__:
            self._disconnect()

    def _disconnect(self) -> None:
        """Close the connections of this process, except those that other threads use now."""
        self._life.close()
        if self._host_line is not None:
            self._host_line.close()
        self._local.line = None

    def __enter__(self) -> AttachedMachine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._machine[1:-1]}, at {self.address}{', closed' if self.closed else ''}>"

    def _greet(self, kind: str, **more: Any) -> tuple[socket.socket, Any]:
        """(a new connection, the machine's answer to its greeting)."""
        connection = addresses.connect(self.address, self._argument)
        try:
            send(connection, Tag.HELLO, packed(greeting(kind, **more)))
            tag, incoming = receive(connection)
            found: Any = unpacked(incoming) if incoming.content else None
        except (Ended, OSError):
            connection.close()
            raise DriverUnavailable(f"the process that serves the machine at {self.address} has ended") from None
        if tag == Tag.RAISED:
            connection.close()
            raise found
        return connection, found

    def _take_line(self) -> Line:
        """Take the calling thread's connection, which is put back after the call. A nested call, from a callback, a
        signal handler or a finalizer, makes a connection of its own, so that no call gets the answer of another one.
        """
        found, self._local.line = self._local.line, None
        return found or Line(*self._greet("line", session=self._key))

    def _lost(self) -> None:
        """Called when the machine is gone: mark it as closed. Pinned memory stays until `close()`, because Python
        objects may still refer to this memory.
        """
        self.closed = True

    # Calls -----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def driver(self) -> Any:
        """The driver API of the machine for this process, with cuda.bindings.driver's names."""
        from .remote import AttachedDriver

        return AttachedDriver(self)

    def call(self, coder: Coder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Make a driver call and return `(CUresult, results...)`. Raises what the bindings raise for wrong types."""
        signature = coder.signature
        nothing = (None,) * len(signature.returned)
        try:
            values = coder.read(args, kwargs)
        except Invalid as invalid:
            if invalid.args and not self.closed:
                return self._question("refuse_argument", signature.name, str(invalid))
            values = None
        if self.closed:
            return self._answered_here(signature.name, values, nothing)
        if self.pid != os.getpid():
            return (R.CUDA_ERROR_NOT_INITIALIZED, *nothing)
        if self._local.in_host_function:
            return (R.CUDA_ERROR_NOT_PERMITTED, *nothing)
        if signature.name in _HOST_FUNCTIONS or any(p.role in ("node", "filled") for p in signature.given):
            self._serve_host_functions()
        if values is None:
            return (R.CUDA_ERROR_INVALID_VALUE, *nothing)
        out = Outgoing()
        try:
            call = coder.write_call(out, values, self._memory)
        except BaseException as error:
            for descriptor in out.own:
                os.close(descriptor)
            if isinstance(error, Invalid):
                return (R.CUDA_ERROR_INVALID_VALUE, *nothing)
            raise
        try:
            tag, incoming = self._exchange(signature.number, out)
        except (Ended, DriverUnavailable, OSError):
            self._lost()
            return (R.CUDA_ERROR_DEINITIALIZED, *nothing)
        try:
            if tag == Tag.RAISED:
                raise unpacked(incoming)
            code = R(incoming.word())
            if code:
                refusal = incoming.data()
                self.refusal = None if refusal is None else pickle.loads(refusal)
                coder.read_filled(incoming, call)
                self._logs.failed(call, self.refusal)
                return (code, *nothing)
            results = coder.read_result(incoming, call)
        finally:
            close_rest(incoming)
        self.refusal = None
        self._memory.after(signature.name, call.values)
        self._logs.succeeded(call, results)
        if signature.name in _END_CONTEXTS and self._memory.registers:
            self._memory.keep_registered(self._ask("registered"))
        return (code, *results)

    def refuse(self, name: str) -> tuple[Any, ...]:
        """Let the machine refuse and report a call of `name`, a function that is not emulated. Returns the call's
        results.
        """
        return self._question("refuse", name)

    def _question(self, question: str, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Make a call that is a request to the machine and not a driver call (`questions`)."""
        try:
            result, self.refusal = self._ask(question, name, *arguments)
        except ClosedError:
            from ..driver.refused import results

            return (R.CUDA_ERROR_DEINITIALIZED, *(None,) * results(name))
        return tuple(result)

    def _answered_here(self, name: str, args: Sequence[Any] | None, nothing: tuple[None, ...]) -> tuple[Any, ...]:
        """Answer a call after the machine was closed. Only functions of `_NO_MACHINE` still succeed."""
        if name in _NO_MACHINE and args is not None:
            from ..driver import ENTRIES

            return (R.CUDA_SUCCESS, ENTRIES[name].function(None, *args))
        return (R.CUDA_ERROR_DEINITIALIZED, *nothing)

    def _exchange(self, tag: int, out: Outgoing) -> tuple[int, Incoming]:
        """Send a message and receive the answer. Callbacks that the machine requests in between run here."""
        line = self._take_line()
        connection = line.connection
        line.calls += 1
        with interrupts.held(lambda: self._interrupt(line)):
            send(connection, tag, out)
            while True:
                got, incoming = receive(connection)
                if got != Tag.CALLBACK:
                    # Put the line back only now. After an exception, the answer of this call may still arrive on the
                    # line, and a later call on the line would take it for its own.
                    self._local.line = line
                    return got, incoming
                function, argument = incoming.word(), incoming.word()
                answer = Outgoing()
                answer.word(ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(function)(argument))
                send(connection, Tag.RESULT, answer)

    def _interrupt(self, line: Line) -> None:
        """Called on Ctrl-C: tell the machine to end the wait of the present call, which then returns."""
        out = Outgoing()
        out.word(line.number)
        out.word(line.calls)
        send(self._life, Tag.INTERRUPT, out)

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self.closed:
            raise ClosedError(f"{self!r} was closed, and its memory with it")
        try:
            tag, incoming = self._exchange(Tag.ASK, packed((name, arguments)))
        except (Ended, DriverUnavailable, OSError):
            self._lost()
            raise ClosedError(f"{self!r} has ended, and its memory with it") from None
        found = unpacked(incoming)
        if tag == Tag.RAISED:
            raise found
        return found

    # Host functions --------------------------------------------------------------------------------------------------

    def _serve_host_functions(self) -> None:
        """Start the thread that runs host functions, unless it was started before."""
        with self._lock:
            if self._host_line is not None:
                return
            self._host_line, _ = self._greet("host", session=self._key)
        threading.Thread(
            target=run_host_functions,
            args=(self._host_line, self._local),
            name="drvfuse-host-functions",
            daemon=True,
        ).start()

    def _layout(self, function: int) -> Layout | None:
        """The parameters of a kernel. They are requested from the machine once."""
        found = self._layouts.get(function)
        if found is None:
            found = self._ask("layout", function)
            if found is not None:
                self._layouts[function] = found
        return found

    # Other requests to the machine -----------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """The reports about all processes of the machine. If the machine is gone, the reports that were read before are
        returned.
        """
        if not self.closed:
            with contextlib.suppress(ClosedError):
                self._known += self._ask("reports", len(self._known))
        return self._known

    @property
    def launches(self) -> list[Any]:
        """Records of the latest launches that have ended on the machine, including launches of other processes."""
        found: list[Any] = self._ask("launches")
        return found

    def counters(self) -> Summary:
        from ..findings.counters import Summary

        return Summary((record.kernel, record.counters) for record in self.launches)

    def finding(self, device: int) -> Report | None:
        """The report that ended the work of this process on a device. None if no context on the device is lost."""
        found: Report | None = self._ask("finding", device)
        return found

    def clock(self) -> int:
        """Virtual nanoseconds since the machine started."""
        return int(self._ask("clock"))

    def held(self) -> dict[str, int]:
        """The numbers of live allocations, counted for all processes of the machine together (see `Machine.held`)."""
        found: dict[str, int] = self._ask("held")
        return found

    def declare_polled(self, memory: Any | SupportsInt, nbytes: int | None = None) -> None:
        """Report no races in a range until it is freed (see `Machine.declare_polled`)."""
        address = getattr(memory, "ptr", memory)
        try:
            address = int(address)
        except (TypeError, ValueError):
            raise ArgumentError("memory", shown(memory), "an array or an address") from None
        self._ask("declare_polled", address, getattr(memory, "nbytes", None) if nbytes is None else nbytes)

    def inject(self, function: str, code: Any, *, device: int | None = None, after: int = 0, times: int = 1) -> None:
        """Make a driver function fail in calls of this process, as `Process.inject` does. `clear_injected` removes all
        injected failures.
        """
        self._ask("inject", function, code, device, after, times)

    def clear_injected(self) -> None:
        self._ask("clear_injected")


_attached: weakref.WeakSet[AttachedMachine] = weakref.WeakSet()


def _after_fork() -> None:
    """Called in a forked child: close the child's copies of the parent's connections. If they stayed open, the machine
    would not notice that the parent ends.
    """
    for machine in list(_attached):
        machine._disconnect()


os.register_at_fork(after_in_child=_after_fork)
