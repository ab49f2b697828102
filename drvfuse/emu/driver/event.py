# SPDX-License-Identifier: Apache-2.0
"""Events. Their times are those of the machine's virtual clock, which gives an order but measures no real time."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.objects import Context, Event, Stream
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run.work import Command, Record
from .entry import check, entry

_DISABLE_TIMING, _INTERPROCESS = 2, 4
_RECORD_EXTERNAL = 1


@entry(1)
def cuEventCreate(proc: Process, Flags: int) -> Any:
    check(0 <= Flags < 8)
    check(not Flags & _INTERPROCESS or Flags & _DISABLE_TIMING)
    return T.CUevent(new_event(proc, Event(proc.current(), Flags)).handle)


def new_event(proc: Process, event: Event) -> Event:
    """Register an event with its process."""
    event.context.events.add(event)
    return proc.add(event)


@entry()
def cuEventDestroy(proc: Process, hEvent: Any) -> None:
    event = proc.get(hEvent, Event)
    event.context.events.discard(event)
    proc.remove(event)


@entry()
def cuEventRecord(proc: Process, hEvent: Any, hStream: Any) -> None:
    cuEventRecordWithFlags(proc, hEvent, hStream, 0)


@entry()
def cuEventRecordWithFlags(proc: Process, hEvent: Any, hStream: Any, flags: int) -> None:
    event = proc.get(hEvent, Event)
    stream = proc.stream(hStream)
    check(flags in (0, _RECORD_EXTERNAL))
    check(event.context is stream.context, R.CUDA_ERROR_INVALID_HANDLE)
    if stream.capture is None:
        proc.refuse_implicit(stream)
        event.captured = None
        event.op = proc.machine.progress.enqueue(stream, Command(stream.context))
    elif flags == _RECORD_EXTERNAL:
        proc.enqueue(stream, Record(stream.context, event))
    else:
        stream.capture.valid()
        event.captured = (stream.capture, dict(stream.capture_tail))


@entry()
def cuCtxRecordEvent(proc: Process, hCtx: Any, hEvent: Any) -> None:
    """Records the event when all work that is queued in the context so far is done."""
    context, event = _uncaptured(proc, hCtx), proc.get(hEvent, Event)
    check(event.context is context, R.CUDA_ERROR_INVALID_HANDLE)
    event.captured = None
    after_all = Stream(context, flags=1, tail=proc.context_ops(context))
    event.op = proc.machine.progress.enqueue(after_all, Command(context))


@entry()
def cuCtxWaitEvent(proc: Process, hCtx: Any, hEvent: Any) -> None:
    """Makes all work that is queued in the context from now on wait for the event, even in streams that are created
    later.
    """
    context, event = _uncaptured(proc, hCtx), _recorded(proc, hEvent)
    if event.op is not None:
        context.awaited = [op for op in context.awaited if not op.done] + [event.op]
        for stream in (*context.streams, context.legacy):
            stream.tail.append(event.op)
            stream.last = None


def _uncaptured(proc: Process, hCtx: Any) -> Context:
    """The context of a handle. Raises Failure if one of the context's streams is being captured."""
    context = proc.get(hCtx, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    proc.healthy(context)
    for stream in context.streams:
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    return context


def _recorded(proc: Process, value: Any) -> Event:
    event = proc.get(value, Event)
    if event.captured is not None:
        event.captured[0].invalidate()
        raise Failure(R.CUDA_ERROR_CAPTURED_EVENT)
    proc.healthy(event.context)
    return event


@entry(unsafe=True)
def cuEventQuery(proc: Process, hEvent: Any) -> None:
    event = _recorded(proc, hEvent)
    if event.op is not None:
        ready = proc.machine.waits.poll([event.op])
        proc.healthy(event.context)
        check(ready, R.CUDA_ERROR_NOT_READY)


@entry(unsafe=True)
def cuEventSynchronize(proc: Process, hEvent: Any) -> None:
    event = _recorded(proc, hEvent)
    if event.op is not None:
        proc.machine.waits.wait([event.op], proc)
        proc.healthy(event.context)


@entry(1, bindings=12, name="cuEventElapsedTime_v2")
@entry(1)
def cuEventElapsedTime(proc: Process, hStart: Any, hEnd: Any) -> float:
    """Returns the virtual time between two events in milliseconds. Every operation takes some virtual time."""
    start, end = _recorded(proc, hStart), _recorded(proc, hEnd)
    check(start.timed and end.timed and start.op is not None and end.op is not None, R.CUDA_ERROR_INVALID_HANDLE)
    assert start.op is not None and end.op is not None
    check(start.op.done and end.op.done, R.CUDA_ERROR_NOT_READY)
    return (end.op.time - start.op.time) / 1e6
