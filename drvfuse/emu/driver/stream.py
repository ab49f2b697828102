# SPDX-License-Identifier: Apache-2.0
"""Streams, and the capture of streams into graphs."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.graphs.capture import Capture
from ..machine.objects import Event, Stream
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run.work import Callback, HostCall, Wait
from .entry import check, entry, present
from .graphs.edges import data_of, dependencies_of, lossless
from .graphs.graph import graph_of

_WAIT_EXTERNAL = 1
_STATUS = T.CUstreamCaptureStatus


@entry(1)
def cuStreamCreate(proc: Process, Flags: int) -> Any:
    return cuStreamCreateWithPriority(proc, Flags, 0)


@entry(1)
def cuStreamCreateWithPriority(proc: Process, flags: int, priority: int) -> Any:
    context = proc.current()
    check(flags in (0, 1))
    gone = [s for s in context.streams if s.destroyed and all(op.done for op in s.tail)]
    context.streams.difference_update(gone)
    stream = proc.add(Stream(context, flags, max(-5, min(0, priority))))
    context.streams.add(stream)
    return T.CUstream(stream.handle)


@entry()
def cuStreamDestroy(proc: Process, hStream: Any) -> None:
    """Returns at once. Queued work still runs."""
    stream = proc.get(hStream, Stream)  # raises Failure for the default streams, which have no object of their own
    if stream.capture is not None:
        stream.capture.invalidate()
    stream.destroyed = True  # the stream stays in its context's list of streams until its work is done
    proc.remove(stream)


def _not_capturing(proc: Process, stream: Stream) -> None:
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    proc.refuse_implicit(stream)


def _pending(proc: Process, stream: Stream) -> list[Any]:
    """The operations that must end before a wait for this stream ends."""
    ops = list(stream.tail)
    if stream.is_legacy:
        ops += [op for other in stream.context.streams if other.blocking for op in other.tail]
    return ops


@entry()
def cuStreamSynchronize(proc: Process, hStream: Any) -> None:
    stream = proc.stream(hStream)
    _not_capturing(proc, stream)
    proc.machine.waits.wait(_pending(proc, stream))
    proc.healthy(stream.context)


@entry()
def cuStreamQuery(proc: Process, hStream: Any) -> None:
    stream = proc.stream(hStream)
    _not_capturing(proc, stream)
    ready = proc.machine.waits.poll(_pending(proc, stream))
    proc.healthy(stream.context)
    check(ready, R.CUDA_ERROR_NOT_READY)


@entry()
def cuStreamWaitEvent(proc: Process, hStream: Any, hEvent: Any, Flags: int) -> None:
    stream = proc.stream(hStream)
    event = proc.get(hEvent, Event)
    check(Flags in (0, 1))
    if event.captured is not None:
        capture, nodes = event.captured
        check(capture in proc.captures, R.CUDA_ERROR_CAPTURED_EVENT)
        if stream.capture not in (None, capture):
            stream.capture.invalidate()
            capture.invalidate()
            raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        check(not stream.is_legacy, R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        capture.join(stream, nodes)
        return
    if stream.capture is not None:
        stream.capture.valid()
        if Flags == _WAIT_EXTERNAL:
            proc.enqueue(stream, Wait(stream.context, event))
            return
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    if event.op is not None:
        stream.tail.append(event.op)
        stream.last = None


@entry(1)
def cuStreamGetPriority(proc: Process, hStream: Any) -> int:
    return proc.stream(hStream).priority


@entry(1)
def cuStreamGetFlags(proc: Process, hStream: Any) -> int:
    return proc.stream(hStream).flags


@entry(1)
def cuStreamGetId(proc: Process, hStream: Any) -> int:
    return proc.stream(hStream).handle


@entry(1)
def cuStreamGetCtx(proc: Process, hStream: Any) -> Any:
    return T.CUcontext(proc.stream(hStream).context.handle)


@entry(2)
def cuStreamGetCtx_v2(proc: Process, hStream: Any) -> tuple[Any, Any]:
    """Returns the context of the stream, and no green context."""
    return cuStreamGetCtx(proc, hStream), T.CUgreenCtx(0)


@entry(1)
def cuStreamGetDevice(proc: Process, hStream: Any) -> Any:
    return T.CUdevice(proc.stream(hStream).context.device.index)


@entry()
def cuLaunchHostFunc(proc: Process, hStream: Any, fn: Any, userData: Any) -> None:
    """Queues a host function. A host thread runs the function while it is in a driver call that makes queued work
    proceed, such as cuStreamSynchronize. The function may not call the driver.
    """
    stream = proc.stream(hStream)
    check(fn)
    proc.enqueue(stream, HostCall(stream.context, fn, int(userData), userData))


@entry()
def cuStreamAddCallback(proc: Process, hStream: Any, callback: Any, userData: Any, flags: int) -> None:
    """Queues a host function, as cuLaunchHostFunc does. The function gets the stream and the CUresult of the context as
    arguments, and runs even after a fault. Not allowed in a capture.
    """
    stream = proc.stream(hStream)
    check(callback and flags == 0)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    proc.enqueue(stream, Callback(stream.context, callback, int(userData), userData, hStream))


# Capture ------------------------------------------------------------------------------------------------------------


@entry()
def cuStreamBeginCapture(proc: Process, hStream: Any, mode: Any) -> None:
    stream = proc.stream(hStream)
    check(not stream.is_legacy, R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    stream.refuse_captured(R.CUDA_ERROR_ILLEGAL_STATE)
    Capture(proc, stream, int(mode))


@entry()
def cuStreamBeginCaptureToGraph(
    proc: Process,
    hStream: Any,
    hGraph: Any,
    dependencies: Any,
    dependencyData: Any,
    numDependencies: int,
    mode: Any,
) -> None:
    """Begins a capture into an existing graph. The first captured nodes wait for the given nodes."""
    stream, graph = proc.stream(hStream), graph_of(proc, hGraph)
    check(not stream.is_legacy, R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    after = dependencies_of(proc, graph, dependencies, dependencyData, numDependencies)
    check(not any(capture.graph is graph for capture in proc.captures))
    stream.refuse_captured(R.CUDA_ERROR_ILLEGAL_STATE)
    Capture(proc, stream, int(mode), graph, after)


@entry(1)
def cuStreamEndCapture(proc: Process, hStream: Any) -> Any:
    stream = proc.stream(hStream)
    return T.CUgraph(present(stream.capture, R.CUDA_ERROR_ILLEGAL_STATE).end(stream).handle)


def _status(proc: Process, stream: Stream) -> Any:
    proc.refuse_implicit(stream)
    if stream.capture is None:
        return _STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    if stream.capture.invalid:
        return _STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    return _STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE


@entry(1)
def cuStreamIsCapturing(proc: Process, hStream: Any) -> Any:
    return _status(proc, proc.stream(hStream))


@entry(6, bindings=12, name="cuStreamGetCaptureInfo_v3")
@entry(6, bindings=13, name="cuStreamGetCaptureInfo")
def _info(proc: Process, hStream: Any) -> tuple[Any, ...]:
    stream = proc.stream(hStream)
    status = _status(proc, stream)
    capture = stream.capture
    ident, graph, tail = T.cuuint64_t(0), T.CUgraph(0), {}
    if capture is not None and not capture.invalid:
        ident = T.cuuint64_t(capture.number)
        graph = T.CUgraph(proc.add(capture.graph).handle)
        tail = stream.capture_tail
    nodes = [T.CUgraphNode(node.handle) for node in tail]
    return status, ident, graph, nodes, data_of(tail.values(), len(tail)), len(tail)


@entry(5, bindings=12)
def cuStreamGetCaptureInfo(proc: Process, hStream: Any) -> tuple[Any, ...]:
    lossless(proc.stream(hStream).capture_tail.values())
    status, ident, graph, tail, _, count = _info(proc, hStream)
    return status, ident, graph, tail, count


@entry(bindings=12, name="cuStreamUpdateCaptureDependencies_v2")
@entry(bindings=13, name="cuStreamUpdateCaptureDependencies")
def _update(
    proc: Process, hStream: Any, dependencies: Any, dependencyData: Any, numDependencies: int, flags: int
) -> None:
    """Add to (flags 0) or replace (flags 1) the dependencies of the next captured node of a stream."""
    stream = proc.stream(hStream)
    capture = present(stream.capture, R.CUDA_ERROR_ILLEGAL_STATE)
    nodes = dependencies_of(proc, capture.graph, dependencies, dependencyData, numDependencies)
    check(flags in (0, 1))
    if flags:
        stream.capture_tail = {}
    capture.join(stream, nodes)


@entry(bindings=12)
def cuStreamUpdateCaptureDependencies(
    proc: Process, hStream: Any, dependencies: Any, numDependencies: int, flags: int
) -> None:
    _update(proc, hStream, dependencies, None, numDependencies, flags)


@entry(1)
def cuThreadExchangeStreamCaptureMode(proc: Process, mode: Any) -> Any:
    previous = T.CUstreamCaptureMode(proc.threads.capture_mode)
    proc.threads.capture_mode = int(mode)
    return previous
