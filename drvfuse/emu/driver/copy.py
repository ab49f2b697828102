# SPDX-License-Identifier: Apache-2.0
"""Copies and fills, in stream order or waited for."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..machine.objects import Context, Stream
from ..machine.process import Process
from ..machine.work import Copy, Copy2D, Fill
from ..wire import mapped
from .entry import check, entry, host_address, number

_NOW = object()  # in place of a stream: the legacy one, and the call waits
_END = 1 << 56  # no program has memory at this address or above it


def _range(proc: Process, verb: str, address: int, nbytes: int, device: bool, context: Context) -> None:
    """Check one end of a copy by `context`: memory of the machine has to be live and within its device's access, host
    memory has to be mapped. Above all that a program can have there is what a client had registered.

    The stream does not count: a copy on another device's stream needs access from the current context.
    """
    if device or proc.machine.window.contains(address):
        proc.memory.require(f"a copy {verb}", address, nbytes, context)
    else:
        check(0 < address <= _END - nbytes)
        check((mapped.writable if verb == "writes" else mapped.readable)(address, nbytes))


def _pageable(proc: Process, address: int) -> bool:
    return proc.memory.find(address) is None


def _capturable(proc: Process, stream: Stream, *addresses: int) -> None:
    """Failure, and the capture is spoilt, for a copy of pageable memory: the graph could not do what the call does."""
    if stream.capture is not None and any(_pageable(proc, address) for address in addresses):
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)


def _copy_async(proc: Process, dst: int, src: int, nbytes: int, stream: Stream, keep: Any = None) -> None:
    """Queue a copy. Pageable memory is read, or written, before the call returns, as by the driver."""
    _capturable(proc, stream, src, dst)
    source = ctypes.string_at(src, nbytes) if _pageable(proc, src) else src
    _queue(proc, stream, Copy(stream.context, dst, source, nbytes, keep), _pageable(proc, dst))


def _queue(proc: Process, stream: Stream, command: Copy | Copy2D, wait: bool) -> None:
    """Queue a copy, and wait for it unless it goes into a graph."""
    op = proc.enqueue(stream, command)
    if op is not None and wait:
        proc.machine.waits.wait([op])
        proc.healthy(stream.context)


def _copy(proc: Process, kind: str, dst: Any, src: Any, nbytes: int, hStream: Any = _NOW) -> None:
    """Copy now, or in the order of a stream. `kind` says what each end is, as in the driver's names: "HtoD", "DtoD", or
    "" where any memory may be at both.
    """
    target, keep = host_address(dst) if kind == "DtoH" else (number(dst), None)
    source, more = host_address(src) if kind == "HtoD" else (number(src), None)
    target, source = proc.memory.on_device(target), proc.memory.on_device(source)
    context = proc.current()
    stream = None if hStream is _NOW else proc.stream(hStream)
    if nbytes:
        _range(proc, "writes", target, nbytes, kind.endswith("D"), context)
        _range(proc, "reads", source, nbytes, kind.startswith("D"), context)
        if stream is None:
            _queue(proc, context.legacy, Copy(context, target, source, nbytes), True)
        else:
            _copy_async(proc, target, source, nbytes, stream, (keep, more))


@entry(unsafe=True)
def cuMemcpy(proc: Process, dst: Any, src: Any, ByteCount: int) -> None:
    _copy(proc, "", dst, src, ByteCount)


@entry()
def cuMemcpyAsync(proc: Process, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    _copy(proc, "", dst, src, ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyHtoD(proc: Process, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    _copy(proc, "HtoD", dstDevice, srcHost, ByteCount)


@entry()
def cuMemcpyHtoDAsync(proc: Process, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    _copy(proc, "HtoD", dstDevice, srcHost, ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyDtoH(proc: Process, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    _copy(proc, "DtoH", dstHost, srcDevice, ByteCount)


@entry()
def cuMemcpyDtoHAsync(proc: Process, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    _copy(proc, "DtoH", dstHost, srcDevice, ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyDtoD(proc: Process, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
    _copy(proc, "DtoD", dstDevice, srcDevice, ByteCount)


@entry()
def cuMemcpyDtoDAsync(proc: Process, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    _copy(proc, "DtoD", dstDevice, srcDevice, ByteCount, hStream)


def _peer(proc: Process, dst: int, dst_context: Any, src: int, src_context: Any, nbytes: int) -> None:
    """Check the ends of a copy between contexts: each is of the context that is named for it."""
    for verb, address, handle in (("writes", dst, dst_context), ("reads", src, src_context)):
        context = proc.get(handle, Context, R.CUDA_ERROR_INVALID_CONTEXT)
        proc.healthy(context)
        if nbytes:
            _range(proc, verb, address, nbytes, True, context)


@entry(unsafe=True)
def cuMemcpyPeer(
    proc: Process, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int
) -> None:
    """Needs no peer access: without it the copy goes through the host."""
    context, dst, src = proc.current(), number(dstDevice), number(srcDevice)
    _peer(proc, dst, dstContext, src, srcContext, ByteCount)
    if ByteCount:
        _queue(proc, context.legacy, Copy(context, dst, src, ByteCount), True)


@entry()
def cuMemcpyPeerAsync(
    proc: Process, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
) -> None:
    """As cuMemcpyPeer. In a capture it is refused, and the capture is spoilt."""
    stream, dst, src = proc.stream(hStream), number(dstDevice), number(srcDevice)
    _peer(proc, dst, dstContext, src, srcContext, ByteCount)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    if ByteCount:
        _copy_async(proc, dst, src, ByteCount, stream)


def _copy_2d(proc: Process, p: Any, context: Context) -> Copy2D | None:
    def end(verb: str, kind: Any, host: Any, device: Any, pitch: int, x: int, y: int) -> tuple[int, int]:
        kinds = T.CUmemorytype
        check(kind != kinds.CU_MEMORYTYPE_ARRAY, R.CUDA_ERROR_NOT_SUPPORTED)
        base = host_address(host)[0] if kind == kinds.CU_MEMORYTYPE_HOST else number(device)
        check(pitch == 0 or pitch >= p.WidthInBytes + x)
        pitch = pitch or p.WidthInBytes + x
        start = proc.memory.on_device(base + y * pitch + x)
        nbytes = pitch * (p.Height - 1) + p.WidthInBytes
        _range(proc, verb, start, nbytes, kind == kinds.CU_MEMORYTYPE_DEVICE, proc.current())
        return start, pitch

    if p.WidthInBytes == 0 or p.Height == 0:
        return None
    dst, dst_pitch = end("writes", p.dstMemoryType, p.dstHost, p.dstDevice, p.dstPitch, p.dstXInBytes, p.dstY)
    src, src_pitch = end("reads", p.srcMemoryType, p.srcHost, p.srcDevice, p.srcPitch, p.srcXInBytes, p.srcY)
    return Copy2D(context, dst, dst_pitch, src, src_pitch, p.WidthInBytes, p.Height, p)


@entry(unsafe=True)
def cuMemcpy2D(proc: Process, pCopy: Any) -> None:
    context = proc.current()
    check(pCopy is not None)
    command = _copy_2d(proc, pCopy, context)
    if command is not None:
        _queue(proc, context.legacy, command, True)


@entry()
def cuMemcpy2DAsync(proc: Process, pCopy: Any, hStream: Any) -> None:
    stream = proc.stream(hStream)
    check(pCopy is not None)
    command = _copy_2d(proc, pCopy, stream.context)
    if command is not None:
        _capturable(proc, stream, command.source, command.destination)
        _queue(proc, stream, command, _pageable(proc, command.destination) or _pageable(proc, command.source))


# Fills --------------------------------------------------------------------------------------------------------------


def _fill(proc: Process, dst: Any, value: int, size: int, count: int, stream: Stream) -> None:
    address = number(dst)
    if count == 0:
        return
    check(address % size == 0)
    proc.memory.require("a fill writes", address, count * size, proc.current(), direct=True)
    proc.enqueue(stream, Fill(stream.context, address, value, size, count))


@entry(unsafe=True)
def cuMemsetD8(proc: Process, dstDevice: Any, uc: int, N: int) -> None:
    """Like the driver's, this does not wait: it is ordered as work of the legacy stream."""
    _fill(proc, dstDevice, uc, 1, N, proc.current().legacy)


@entry(unsafe=True)
def cuMemsetD16(proc: Process, dstDevice: Any, us: int, N: int) -> None:
    _fill(proc, dstDevice, us, 2, N, proc.current().legacy)


@entry(unsafe=True)
def cuMemsetD32(proc: Process, dstDevice: Any, ui: int, N: int) -> None:
    _fill(proc, dstDevice, ui, 4, N, proc.current().legacy)


@entry()
def cuMemsetD8Async(proc: Process, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    _fill(proc, dstDevice, uc, 1, N, proc.stream(hStream))


@entry()
def cuMemsetD16Async(proc: Process, dstDevice: Any, us: int, N: int, hStream: Any) -> None:
    _fill(proc, dstDevice, us, 2, N, proc.stream(hStream))


@entry()
def cuMemsetD32Async(proc: Process, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
    _fill(proc, dstDevice, ui, 4, N, proc.stream(hStream))
