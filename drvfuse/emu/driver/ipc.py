# SPDX-License-Identifier: Apache-2.0
"""Memory and events that processes share by IPC handles, which are strings of bytes (`machine/memory/exports.py`).

As with CUDA, a process cannot open its own memory or events. When the owner frees the memory, it is gone for the
processes that have opened it too, and a later access by them is a finding.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.memory.exports import HANDLE_BYTES, Export
from ..machine.objects import Event, Mark
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from .entry import check, entry, present
from .event import new_event

_LAZY_PEER_ACCESS = 1


def handle_of(proc: Process, item: object, kind: Any) -> Any:
    """The handle of an object of this process, as a structure of the bindings."""
    made = kind()
    ctypes.memmove(int(made.getPtr()), proc.machine.shared.handle(item), HANDLE_BYTES)
    return made


def item_of(proc: Process, handle: Any, kind: type[Any]) -> Any:
    """The object whose handle is in a structure of the bindings. None if the object is gone or never existed."""
    return proc.machine.shared.find(ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES), kind)


def own(what: str) -> Failure:
    """The failure of a call that opens memory or an event of its own process, with the CUresult of the driver."""
    message = f"the handle is of {what} of the process that opens it: only other processes can"
    return Failure(R.CUDA_ERROR_INVALID_CONTEXT, Report("context", message))


@entry(1)
def cuIpcGetMemHandle(proc: Process, dptr: Any) -> Any:
    """Returns a handle of the allocation of cuMemAlloc that contains an address. Memory of pools and mappings, managed
    memory and host memory have no such handle.
    """
    proc.current()
    allocation = proc.memory.find(dptr)
    if allocation is None or not allocation.exportable:
        raise proc.memory.stray("cuIpcGetMemHandle needs memory of cuMemAlloc", dptr)
    return handle_of(proc, proc.memory.shared(allocation), T.CUipcMemHandle)


@entry(1, unsafe=True)
def cuIpcOpenMemHandle(proc: Process, handle: Any, Flags: int) -> Any:
    """Opens memory of another process for the device of the current context. The memory has the same address in both
    processes. It may be opened several times, and must be closed as often.
    """
    context = proc.current()
    check(Flags in (0, _LAZY_PEER_ACCESS))
    export = present(item_of(proc, handle, Export), R.CUDA_ERROR_INVALID_HANDLE)
    check(export.live, R.CUDA_ERROR_INVALID_HANDLE)
    if export.home is proc.memory:
        raise own("memory")
    device = present(export.allocation.device)
    reachable = context.device is device or proc.machine.can_reach(context.device, device)
    check(reachable, R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
    return T.CUdeviceptr(proc.memory.open(export, context=context).base)


@entry(unsafe=True)
def cuIpcCloseMemHandle(proc: Process, dptr: Any) -> None:
    """Waits for the work of the context that has opened the memory, then closes it. CUDA_ERROR_INVALID_VALUE if the
    owner has freed the memory.
    """
    proc.current()
    view = proc.memory.at(dptr)
    if view is None or view.origin is None or view.context is None:
        raise proc.memory.stray("cuIpcCloseMemHandle needs the address of memory that was opened", dptr)
    proc.machine.waits.wait(proc.context_ops(view.context))
    proc.memory.close(view)


@entry(1)
def cuIpcGetEventHandle(proc: Process, event: Any) -> Any:
    """Returns a handle of an event that was created with CU_EVENT_INTERPROCESS."""
    found = proc.get(event, Event)
    check(found.interprocess)
    found.mark.home = proc
    return handle_of(proc, found.mark, T.CUipcEventHandle)


@entry(1)
def cuIpcOpenEventHandle(proc: Process, handle: Any) -> Any:
    """Makes an event of the current context that shares its records with the event of the other process."""
    context = proc.current()
    mark = present(item_of(proc, handle, Mark), R.CUDA_ERROR_INVALID_HANDLE)
    if mark.home is proc:
        raise own("an event")
    opened = Event(context, int(T.CUevent_flags.CU_EVENT_DISABLE_TIMING | T.CUevent_flags.CU_EVENT_INTERPROCESS), mark)
    return T.CUevent(new_event(proc, opened).handle)
