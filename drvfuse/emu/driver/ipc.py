# SPDX-License-Identifier: Apache-2.0
"""Memory and events that processes pass to one another by handles of bytes (`machine/shared.py`).

As with CUDA, a process cannot open what is its own. Memory that its owner frees is also gone for the processes that
have opened it: any later access by them is a finding.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.failure import Failure
from ..machine.objects import Event, Mark
from ..machine.process import Process
from ..machine.shared import HANDLE_BYTES, Export
from .entry import check, entry, present
from .event import new_event

_LAZY_PEER_ACCESS = 1


def handle_of(proc: Process, item: object, kind: Any) -> Any:
    """The handle of something of this process, in a structure of the bindings."""
    made = kind()
    ctypes.memmove(int(made.getPtr()), proc.machine.shared.handle(item), HANDLE_BYTES)
    return made


def item_of(proc: Process, handle: Any, kind: type[Any]) -> Any:
    """The object of a handle in a structure; None if it is gone, or never existed."""
    return proc.machine.shared.find(ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES), kind)


def own(what: str) -> Failure:
    """The failure of a process that opens its own memory or event, with the driver's code."""
    message = f"the handle is of {what} of the process that opens it: only others can"
    return Failure(R.CUDA_ERROR_INVALID_CONTEXT, Report("context", message))


@entry(1)
def cuIpcGetMemHandle(proc: Process, dptr: Any) -> Any:
    """A handle of the whole allocation of cuMemAlloc that an address lies in. Memory of pools, mappings, managed and
    host memory has no such handle.
    """
    proc.current()
    allocation = proc.memory.find(dptr)
    if allocation is None or not allocation.exportable:
        raise proc.memory.stray("cuIpcGetMemHandle needs memory of cuMemAlloc", dptr)
    return handle_of(proc, proc.memory.shared(allocation), T.CUipcMemHandle)


@entry(1, unsafe=True)
def cuIpcOpenMemHandle(proc: Process, handle: Any, Flags: int) -> Any:
    """The memory, at the same address as in its own process, for the current context's device. Opened again, it has to
    be closed as often.
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
    """Waits for the work of the context that has opened the memory. If the owner has freed it, there is nothing to
    close: CUDA_ERROR_INVALID_VALUE.
    """
    proc.current()
    view = proc.memory.at(dptr)
    if view is None or view.origin is None or view.context is None:
        raise proc.memory.stray("cuIpcCloseMemHandle needs the address of memory that was opened", dptr)
    proc.machine.waits.wait(proc.context_ops(view.context))
    proc.memory.close(view)


@entry(1)
def cuIpcGetEventHandle(proc: Process, event: Any) -> Any:
    """A handle of an event that was created with CU_EVENT_INTERPROCESS."""
    found = proc.get(event, Event)
    check(found.interprocess)
    found.mark.home = proc
    return handle_of(proc, found.mark, T.CUipcEventHandle)


@entry(1)
def cuIpcOpenEventHandle(proc: Process, handle: Any) -> Any:
    """An event of the current context that has the other one's records, and whose own the other one has."""
    context = proc.current()
    mark = present(item_of(proc, handle, Mark), R.CUDA_ERROR_INVALID_HANDLE)
    if mark.home is proc:
        raise own("an event")
    opened = Event(context, int(T.CUevent_flags.CU_EVENT_DISABLE_TIMING | T.CUevent_flags.CU_EVENT_INTERPROCESS), mark)
    return T.CUevent(new_event(proc, opened).handle)
