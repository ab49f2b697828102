# SPDX-License-Identifier: Apache-2.0
"""The common part of all functions of the emulated driver: registration, the reading of arguments, the result tuple.

A function is written as `name(process, arguments...)`. It returns its outputs, and raises `Failure` for every other
CUresult than success. `@entry` registers it under its name, and `invoke` makes of its outputs, or of the Failure, the
`(CUresult, outputs...)` of cuda.bindings.

The prototype of a function decides in which form it gets its arguments (`wire.inputs`): an int for a number, a handle,
a device pointer or a host pointer (which keeps its buffer alive), a member for an enum, bytes for a C string or an
image, a list for a list, the object of cuda.bindings for a structure, or None.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..bindings import MAJOR, R, T
from ..findings.reports import Report
from ..machine.objects import Handle, Memory
from ..machine.process import interrupts
from ..machine.process.failure import Failure
from ..wire.arguments import Invalid
from ..wire.coder import Coder, coder

if TYPE_CHECKING:
    from ..machine.process.process import Process

log = logging.getLogger("drvfuse.emu")
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One function of the API. `outputs` is the number of values that follow the CUresult."""

    name: str
    function: Callable[..., Any]
    outputs: int
    before_init: bool
    without_machine: bool
    unsafe: bool

    @functools.cached_property
    def coder(self) -> Coder:
        return coder(self.name)

    def failure(self, code: Any) -> tuple[Any, ...]:
        """The result of a call that failed."""
        return (code, *(None,) * self.outputs)


_NO_MEMBER = re.compile(r"is not a valid CU\w+$")

ENTRIES: dict[str, Entry] = {}


def entry(
    outputs: int = 0,
    *,
    before_init: bool = False,
    without_machine: bool = False,
    unsafe: bool = False,
    bindings: int | None = None,
    optional: bool = False,
    name: str = "",
) -> Callable[[Function], Function]:
    """Register a function.

    `before_init`: it may be called before cuInit. `without_machine`: it may be called after the machine was closed.
    `unsafe`: it may not be called while a stream of the thread is captured, unless the capture is relaxed. `bindings`:
    it exists only in that major version of cuda.bindings. `optional`: it exists only in bindings that declare it.
    """

    def register(function: Function) -> Function:
        if bindings is None or bindings == MAJOR:
            known = name or function.__name__
            if not optional or hasattr(T, known):
                early = before_init or without_machine
                ENTRIES[known] = Entry(known, function, outputs, early, without_machine, unsafe)
        return function

    return register


def invoke(process: Process, e: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Call a function for a process, and return the tuple that cuda.bindings would return."""
    values: Sequence[Any] | Invalid
    try:
        values = e.coder.read(args, kwargs)
    except Invalid as invalid:
        values = invalid
    result = perform(process, e, values)
    if result[0] and process.refusal is not None:
        for listener in process.listeners():
            listener.tell(encoded(process.refusal.brief()))
    return result


def perform(process: Process, e: Entry, values: Sequence[Any] | Invalid) -> tuple[Any, ...]:
    """Do what `invoke` does, with arguments that were read already, or with the reason why they are invalid."""
    machine = process.machine
    process.refusal = None
    if process.closed and not e.without_machine:
        return e.failure(R.CUDA_ERROR_DEINITIALIZED)
    if machine.pid != os.getpid():
        _tell_forked(machine.pid)
        return e.failure(R.CUDA_ERROR_NOT_INITIALIZED)
    if not (process.initialised or e.before_init):
        return e.failure(R.CUDA_ERROR_NOT_INITIALIZED)
    if process.threads.in_host_function:
        return e.failure(R.CUDA_ERROR_NOT_PERMITTED)
    if isinstance(values, Invalid):
        if values.args:
            process.refusal = Report("out_of_bounds", f"{e.name}: {values}", process=process.title)
            machine.report(process.refusal)
        return e.failure(R.CUDA_ERROR_INVALID_VALUE)
    with interrupts.held(), machine.lock:
        machine.lock.called(process, e.name)
        process.callers.add(threading.get_ident())
        try:
            if e.unsafe:
                process.refuse_in_capture()
            if process.injected:
                inject(process, e, values)
            value = e.function(process, *values)
        except Failure as failure:
            if process.closed:  # another thread has closed the process while this call waited
                return e.failure(R.CUDA_ERROR_DEINITIALIZED)
            report = failure.report
            if report is not None:
                report = replace(report, process=process.title)
                machine.report(report)
            process.refusal = report
            return e.failure(failure.code)
        except ValueError as error:  # a field of a structure has a number that is no member of its enum
            if not _NO_MEMBER.search(str(error)):
                raise
            return e.failure(R.CUDA_ERROR_INVALID_VALUE)
    if e.outputs == 0:
        return (R.CUDA_SUCCESS,)
    return (R.CUDA_SUCCESS, value) if e.outputs == 1 else (R.CUDA_SUCCESS, *value)


@functools.cache
def _tell_forked(holder: int) -> None:
    """Log why driver calls fail in a forked process. Each process logs this once."""
    words = "process %d was forked from process %d, which holds the emulated machine, and has none: start processes by "
    log.warning(words + 'the method "spawn" of multiprocessing', os.getpid(), holder)


def inject(process: Process, e: Entry, values: Sequence[Any]) -> None:
    """Raise Failure if a test has made this call fail (`Process.inject`)."""
    rules = [rule for rule in process.injected if rule.function == e.name]
    if rules:
        devices = _devices(process, inspect.signature(e.function).bind(process, *values).arguments)
        for rule in rules:
            if rule.hits(devices):
                raise Failure(rule.code)


def _devices(process: Process, arguments: dict[str, Any]) -> set[int]:
    """The devices that a call concerns: the devices, and the devices of the memory, that its arguments name. If they
    name none, the current device.
    """
    found: set[int] = set()
    for name, value in arguments.items():
        if name in ("dev", "device"):
            found.add(value)
        elif name in ("prop", "poolProps") and hasattr(value, "location"):
            found.add(value.location.id)
        elif name == "desc":
            found.update(d.location.id for d in value or ())
        elif name in ("memHandle", "handle"):
            handle = process.handles.get(value)
            memory = handle.item if isinstance(handle, Handle) else None
            found.update({memory.device.index} if isinstance(memory, Memory) else ())
        elif name in ("ptr", "memptr", "dptr"):
            allocation = process.memory.find(value)
            found.update({allocation.device.index} if allocation and allocation.device else ())
    stack = process.threads.contexts
    if not found and stack and stack[-1] is not None:
        found.add(stack[-1].device.index)
    return found


def check(condition: Any, code: Any = R.CUDA_ERROR_INVALID_VALUE) -> None:
    """Raise Failure(code) unless the condition holds."""
    if not condition:
        raise Failure(code)


def unsupported(message: str) -> Failure:
    """The failure of a call that is not emulated. It is reported once per message."""
    return Failure(R.CUDA_ERROR_NOT_SUPPORTED, Report("unsupported", message))


def present(value: Value | None, code: Any = R.CUDA_ERROR_INVALID_VALUE) -> Value:
    """Return the value. Raise Failure(code) if it is None."""
    check(value is not None, code)
    return cast(Value, value)


def number(value: Any) -> int:
    """The number of a handle or a pointer in a structure of cuda.bindings. None is 0."""
    return 0 if value is None else int(value)


def host_address(value: Any) -> tuple[int, Any]:
    """(address, the object that keeps its memory alive) of a host pointer."""
    return number(value), value


def encoded(value: str) -> bytes:
    """The bytes of a text. Where `text` has kept bytes that are no UTF-8, they come back."""
    return value.encode(errors="surrogateescape")


def text(value: bytes) -> str:
    """The text of a C string. Bytes that are no UTF-8 are kept as surrogates."""
    return value.decode(errors="surrogateescape")
