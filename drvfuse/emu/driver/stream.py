# SPDX-License-Identifier: Apache-2.0
"""Streams, and the capture of streams into graphs."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.capture import Capture, Node
from ..machine.failure import Failure
from ..machine.machine import Machine
from ..machine.objects import Event, Stream
from ..machine.work import HostCall, host_function
from .entry import check, entry, host_address, is_enum, number, present

_STATUS = T.CUstreamCaptureStatus


@entry(1)
def cuStreamCreate(m: Machine, Flags: int) -> Any:
    return cuStreamCreateWithPriority(m, Flags, 0)


@entry(1)
def cuStreamCreateWithPriority(m: Machine, flags: int, priority: int) -> Any:
    context = m.current()
    flags = int(flags)
    check(flags in (0, 1))
    gone = [s for s in context.streams if s.destroyed and all(op.done for op in s.tail)]
    context.streams.difference_update(gone)
    stream = m.add(Stream(context, flags, max(-5, min(0, priority))))
    context.streams.add(stream)
    return T.CUstream(stream.handle)


@entry()
def cuStreamDestroy(m: Machine, hStream: Any) -> None:
    """Returns at once; what is queued still runs."""
    stream = m.get(hStream, Stream)  # one that was created, not one of the default ones
    if stream.capture is not None:
        stream.capture.invalidate()
    stream.destroyed = True  # it stays among its context's streams until its work is done
    m.remove(stream)


def _not_capturing(m: Machine, stream: Stream) -> None:
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    m.refuse_implicit(stream)


def _pending(m: Machine, stream: Stream) -> list[Any]:
    """The operations that a wait for this stream waits for."""
    ops = list(stream.tail)
    if stream.is_legacy:
        ops += [op for other in stream.context.streams if other.blocking for op in other.tail]
    return ops


@entry()
def cuStreamSynchronize(m: Machine, hStream: Any) -> None:
    stream = m.stream(hStream)
    _not_capturing(m, stream)
    m.progress.wait(_pending(m, stream))
    m.healthy(stream.context)


@entry()
def cuStreamQuery(m: Machine, hStream: Any) -> None:
    stream = m.stream(hStream)
    _not_capturing(m, stream)
    ready = m.progress.poll(_pending(m, stream))
    m.healthy(stream.context)
    check(ready, R.CUDA_ERROR_NOT_READY)


@entry()
def cuStreamWaitEvent(m: Machine, hStream: Any, hEvent: Any, Flags: int) -> None:
    stream = m.stream(hStream)
    event = m.get(hEvent, Event)
    flags = int(Flags)
    check(flags in (0, 1))
    if event.captured is not None:
        capture, nodes = event.captured
        check(capture in m.captures, R.CUDA_ERROR_CAPTURED_EVENT)
        if stream.capture not in (None, capture):
            stream.capture.invalidate()
            capture.invalidate()
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        check(not stream.is_legacy, R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        capture.join(stream, nodes)
        return
    if stream.capture is not None:
        stream.capture.valid()
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    if event.op is not None:
        stream.tail.append(event.op)
        stream.last = None


@entry(1)
def cuStreamGetPriority(m: Machine, hStream: Any) -> int:
    return m.stream(hStream).priority


@entry(1)
def cuStreamGetFlags(m: Machine, hStream: Any) -> int:
    return m.stream(hStream).flags


@entry(1)
def cuStreamGetId(m: Machine, hStream: Any) -> int:
    return m.stream(hStream).handle


@entry(1)
def cuStreamGetCtx(m: Machine, hStream: Any) -> Any:
    return T.CUcontext(m.stream(hStream).context.handle)


@entry(1)
def cuStreamGetDevice(m: Machine, hStream: Any) -> Any:
    return T.CUdevice(m.stream(hStream).context.device.index)


@entry()
def cuStreamCopyAttributes(m: Machine, dst: Any, src: Any) -> None:
    target, source = m.stream(dst), m.stream(src)
    target.priority = source.priority


@entry()
def cuLaunchHostFunc(m: Machine, hStream: Any, fn: Any, userData: Any) -> None:
    """The function runs in a thread that waits for the machine, and may call nothing of the driver."""
    stream = m.stream(hStream)
    address = number(fn)
    check(address)
    argument, keep = host_address(userData)
    m.enqueue(stream, HostCall(stream.context, host_function(address), argument, (keep, fn)))


# Capture ------------------------------------------------------------------------------------------------------------


@entry()
def cuStreamBeginCapture(m: Machine, hStream: Any, mode: Any) -> None:
    is_enum(mode, T.CUstreamCaptureMode, "mode")
    stream = m.stream(hStream)
    check(not stream.is_legacy, R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    stream.refuse_captured(R.CUDA_ERROR_ILLEGAL_STATE)
    Capture(m, stream, int(mode))


@entry(1)
def cuStreamEndCapture(m: Machine, hStream: Any) -> Any:
    stream = m.stream(hStream)
    return T.CUgraph(present(stream.capture, R.CUDA_ERROR_ILLEGAL_STATE).end(stream).handle)


def _status(m: Machine, stream: Stream) -> Any:
    m.refuse_implicit(stream)
    if stream.capture is None:
        return _STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    if stream.capture.invalid:
        return _STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    return _STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE


@entry(1)
def cuStreamIsCapturing(m: Machine, hStream: Any) -> Any:
    return _status(m, m.stream(hStream))


@entry(6, bindings=12, name="cuStreamGetCaptureInfo_v3")
@entry(6, bindings=13, name="cuStreamGetCaptureInfo")
def _info(m: Machine, hStream: Any) -> tuple[Any, ...]:
    stream = m.stream(hStream)
    status = _status(m, stream)
    capture = stream.capture
    ident, graph, tail = T.cuuint64_t(0), T.CUgraph(0), []
    if capture is not None and not capture.invalid:
        ident = T.cuuint64_t(capture.number)
        graph = T.CUgraph(m.add(capture.graph).handle)
        tail = [T.CUgraphNode(node.handle) for node in stream.capture_tail]
    return status, ident, graph, tail, [T.CUgraphEdgeData() for _ in tail], len(tail)


@entry(5, bindings=12)
def cuStreamGetCaptureInfo(m: Machine, hStream: Any) -> tuple[Any, ...]:
    status, ident, graph, tail, _, count = _info(m, hStream)
    return status, ident, graph, tail, count


@entry(bindings=12, name="cuStreamUpdateCaptureDependencies_v2")
@entry(bindings=13, name="cuStreamUpdateCaptureDependencies")
def _update(m: Machine, hStream: Any, dependencies: Any, dependencyData: Any, numDependencies: int, flags: int) -> None:
    cuStreamUpdateCaptureDependencies(m, hStream, dependencies, numDependencies, flags)


@entry(bindings=12)
def cuStreamUpdateCaptureDependencies(
    m: Machine, hStream: Any, dependencies: Any, numDependencies: int, flags: int
) -> None:
    """Add to (flags 0) or replace (flags 1) what the next captured node of a stream depends on."""
    stream = m.stream(hStream)
    capture = present(stream.capture, R.CUDA_ERROR_ILLEGAL_STATE)
    nodes = [m.get(node, Node, R.CUDA_ERROR_INVALID_VALUE) for node in (dependencies or [])[:numDependencies]]
    check(all(node.graph is capture.graph for node in nodes))
    check(flags in (0, 1))
    if flags:
        stream.capture_tail = []
    capture.join(stream, nodes)


@entry(1)
def cuThreadExchangeStreamCaptureMode(m: Machine, mode: Any) -> Any:
    is_enum(mode, T.CUstreamCaptureMode, "mode")
    previous = T.CUstreamCaptureMode(m.threads.capture_mode)
    m.threads.capture_mode = int(mode)
    return previous
