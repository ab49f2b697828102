# SPDX-License-Identifier: Apache-2.0
"""Events. Their times are the machine's virtual clock: they order what happened and measure nothing."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.failure import Failure
from ..machine.machine import Machine
from ..machine.objects import Event
from ..machine.work import Command, Record
from .entry import check, entry

_DISABLE_TIMING, _INTERPROCESS = 2, 4
_RECORD_EXTERNAL = 1


@entry(1)
def cuEventCreate(m: Machine, Flags: int) -> Any:
    flags = int(Flags)
    check(0 <= flags < 8)
    check(not flags & _INTERPROCESS, R.CUDA_ERROR_NOT_SUPPORTED)
    event = m.add(Event(m.current(), flags))
    event.context.events.add(event)
    return T.CUevent(event.handle)


@entry()
def cuEventDestroy(m: Machine, hEvent: Any) -> None:
    event = m.get(hEvent, Event)
    event.context.events.discard(event)
    m.remove(event)


@entry()
def cuEventRecord(m: Machine, hEvent: Any, hStream: Any) -> None:
    cuEventRecordWithFlags(m, hEvent, hStream, 0)


@entry()
def cuEventRecordWithFlags(m: Machine, hEvent: Any, hStream: Any, flags: int) -> None:
    flags = int(flags)
    event = m.get(hEvent, Event)
    stream = m.stream(hStream)
    check(flags in (0, _RECORD_EXTERNAL))
    check(event.context is stream.context, R.CUDA_ERROR_INVALID_HANDLE)
    if stream.capture is None:
        m.refuse_implicit(stream)
        event.captured = None
        event.op = m.progress.enqueue(stream, Command(stream.context))
    elif flags == _RECORD_EXTERNAL:
        m.enqueue(stream, Record(stream.context, event))
    else:
        stream.capture.valid()
        event.captured = (stream.capture, tuple(stream.capture_tail))


def _recorded(m: Machine, value: Any) -> Event:
    event = m.get(value, Event)
    if event.captured is not None:
        event.captured[0].invalidate()
        raise Failure(R.CUDA_ERROR_CAPTURED_EVENT)
    m.healthy(event.context)
    return event


@entry(unsafe=True)
def cuEventQuery(m: Machine, hEvent: Any) -> None:
    event = _recorded(m, hEvent)
    if event.op is not None:
        ready = m.progress.poll([event.op])
        m.healthy(event.context)
        check(ready, R.CUDA_ERROR_NOT_READY)


@entry(unsafe=True)
def cuEventSynchronize(m: Machine, hEvent: Any) -> None:
    event = _recorded(m, hEvent)
    if event.op is not None:
        m.progress.wait([event.op])
        m.healthy(event.context)


@entry(1, bindings=12, name="cuEventElapsedTime_v2")
@entry(1)
def cuEventElapsedTime(m: Machine, hStart: Any, hEnd: Any) -> float:
    """Milliseconds of virtual time."""
    start, end = _recorded(m, hStart), _recorded(m, hEnd)
    check(start.timed and end.timed and start.op is not None and end.op is not None, R.CUDA_ERROR_INVALID_HANDLE)
    assert start.op is not None and end.op is not None
    check(start.op.done and end.op.done, R.CUDA_ERROR_NOT_READY)
    return (end.op.time - start.op.time) / 1e6
