# SPDX-License-Identifier: Apache-2.0
"""Copies and fills, in stream order or waited for."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..machine.machine import Machine
from ..machine.objects import Context, Stream
from ..machine.work import Copy, Copy2D, Fill
from .entry import check, entry, host_address, number

_NOW = object()  # in place of a stream: the legacy one, and the call waits


def _range(m: Machine, verb: str, address: int, nbytes: int, device: bool, context: Context) -> None:
    """Check one end of a copy by `context`: memory of the machine has to be live and within its device's access, host
    memory is taken on trust.

    The stream does not count: a copy on another device's stream needs access from the current context.
    """
    if device or m.window.contains(address, nbytes):
        m.memory.require(f"a copy {verb}", address, nbytes, context)
    else:
        check(address)


def _pageable(m: Machine, address: int) -> bool:
    return m.memory.find(address) is None


def _capturable(m: Machine, stream: Stream, *addresses: int) -> None:
    """Failure, and the capture is spoilt, for a copy of pageable memory: the graph could not do what the call does."""
    if stream.capture is not None and any(_pageable(m, address) for address in addresses):
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)


def _copy_async(m: Machine, dst: int, src: int, nbytes: int, stream: Stream, keep: Any = None) -> None:
    """Queue a copy. Pageable memory is read, or written, before the call returns, as by the driver."""
    _capturable(m, stream, src, dst)
    source = ctypes.string_at(src, nbytes) if _pageable(m, src) else src
    _queue(m, stream, Copy(stream.context, dst, source, nbytes, keep), _pageable(m, dst))


def _queue(m: Machine, stream: Stream, command: Copy | Copy2D, wait: bool) -> None:
    """Queue a copy, and wait for it unless it goes into a graph."""
    op = m.enqueue(stream, command)
    if op is not None and wait:
        m.progress.wait([op])
        m.healthy(stream.context)


def _copy(m: Machine, kind: str, dst: Any, src: Any, nbytes: int, hStream: Any = _NOW) -> None:
    """Copy now, or in the order of a stream. `kind` says what each end is, as in the driver's names: "HtoD", "DtoD", or
    "" where any memory may be at both.
    """
    target, keep = host_address(dst) if kind == "DtoH" else (number(dst), None)
    source, more = host_address(src) if kind == "HtoD" else (number(src), None)
    context = m.current()
    stream = None if hStream is _NOW else m.stream(hStream)
    if nbytes:
        _range(m, "writes", target, nbytes, kind.endswith("D"), context)
        _range(m, "reads", source, nbytes, kind.startswith("D"), context)
        if stream is None:
            _queue(m, context.legacy, Copy(context, target, source, nbytes), True)
        else:
            _copy_async(m, target, source, nbytes, stream, (keep, more))


@entry(unsafe=True)
def cuMemcpy(m: Machine, dst: Any, src: Any, ByteCount: int) -> None:
    _copy(m, "", dst, src, ByteCount)


@entry()
def cuMemcpyAsync(m: Machine, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    _copy(m, "", dst, src, ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyHtoD(m: Machine, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    _copy(m, "HtoD", dstDevice, srcHost, ByteCount)


@entry()
def cuMemcpyHtoDAsync(m: Machine, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    _copy(m, "HtoD", dstDevice, srcHost, ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyDtoH(m: Machine, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    _copy(m, "DtoH", dstHost, srcDevice, ByteCount)


@entry()
def cuMemcpyDtoHAsync(m: Machine, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    _copy(m, "DtoH", dstHost, srcDevice, ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyDtoD(m: Machine, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
    _copy(m, "DtoD", dstDevice, srcDevice, ByteCount)


@entry()
def cuMemcpyDtoDAsync(m: Machine, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    _copy(m, "DtoD", dstDevice, srcDevice, ByteCount, hStream)


def _peer(m: Machine, dst: int, dst_context: Any, src: int, src_context: Any, nbytes: int) -> None:
    """Check the ends of a copy between contexts: each is of the context that is named for it."""
    for verb, address, handle in (("writes", dst, dst_context), ("reads", src, src_context)):
        context = m.get(handle, Context, R.CUDA_ERROR_INVALID_CONTEXT)
        m.healthy(context)
        if nbytes:
            _range(m, verb, address, nbytes, True, context)


@entry(unsafe=True)
def cuMemcpyPeer(m: Machine, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int) -> None:
    """Needs no peer access: without it the copy goes through the host."""
    context, dst, src = m.current(), number(dstDevice), number(srcDevice)
    _peer(m, dst, dstContext, src, srcContext, ByteCount)
    if ByteCount:
        _queue(m, context.legacy, Copy(context, dst, src, ByteCount), True)


@entry()
def cuMemcpyPeerAsync(
    m: Machine, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
) -> None:
    """As cuMemcpyPeer. In a capture it is refused, and the capture is spoilt."""
    stream, dst, src = m.stream(hStream), number(dstDevice), number(srcDevice)
    _peer(m, dst, dstContext, src, srcContext, ByteCount)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    if ByteCount:
        _copy_async(m, dst, src, ByteCount, stream)


def _copy_2d(m: Machine, p: Any, context: Context) -> Copy2D | None:
    def end(verb: str, kind: Any, host: Any, device: Any, pitch: int, x: int, y: int) -> tuple[int, int]:
        kinds = T.CUmemorytype
        check(kind != kinds.CU_MEMORYTYPE_ARRAY, R.CUDA_ERROR_NOT_SUPPORTED)
        base = host_address(host)[0] if kind == kinds.CU_MEMORYTYPE_HOST else number(device)
        check(pitch == 0 or pitch >= p.WidthInBytes + x)
        pitch = pitch or p.WidthInBytes + x
        start = base + y * pitch + x
        nbytes = pitch * (p.Height - 1) + p.WidthInBytes
        _range(m, verb, start, nbytes, kind == kinds.CU_MEMORYTYPE_DEVICE, m.current())
        return start, pitch

    if p.WidthInBytes == 0 or p.Height == 0:
        return None
    dst, dst_pitch = end("writes", p.dstMemoryType, p.dstHost, p.dstDevice, p.dstPitch, p.dstXInBytes, p.dstY)
    src, src_pitch = end("reads", p.srcMemoryType, p.srcHost, p.srcDevice, p.srcPitch, p.srcXInBytes, p.srcY)
    return Copy2D(context, dst, dst_pitch, src, src_pitch, p.WidthInBytes, p.Height, p)


@entry(unsafe=True)
def cuMemcpy2D(m: Machine, pCopy: Any) -> None:
    context = m.current()
    command = _copy_2d(m, pCopy, context)
    if command is not None:
        _queue(m, context.legacy, command, True)


@entry()
def cuMemcpy2DAsync(m: Machine, pCopy: Any, hStream: Any) -> None:
    stream = m.stream(hStream)
    command = _copy_2d(m, pCopy, stream.context)
    if command is not None:
        _capturable(m, stream, command.source, command.destination)
        _queue(m, stream, command, _pageable(m, command.destination) or _pageable(m, command.source))


# Fills --------------------------------------------------------------------------------------------------------------


def _fill(m: Machine, dst: Any, value: int, size: int, count: int, stream: Stream) -> None:
    address = number(dst)
    if not 0 <= value < 1 << 8 * size:
        raise OverflowError(f"value {value} does not fit into {size} bytes")
    if count == 0:
        return
    check(address % size == 0)
    m.memory.require("a fill writes", address, count * size, m.current(), direct=True)
    m.enqueue(stream, Fill(stream.context, address, value, size, count))


@entry(unsafe=True)
def cuMemsetD8(m: Machine, dstDevice: Any, uc: int, N: int) -> None:
    """Like the driver's, this does not wait: it is ordered as work of the legacy stream."""
    _fill(m, dstDevice, uc, 1, N, m.current().legacy)


@entry(unsafe=True)
def cuMemsetD16(m: Machine, dstDevice: Any, us: int, N: int) -> None:
    _fill(m, dstDevice, us, 2, N, m.current().legacy)


@entry(unsafe=True)
def cuMemsetD32(m: Machine, dstDevice: Any, ui: int, N: int) -> None:
    _fill(m, dstDevice, ui, 4, N, m.current().legacy)


@entry()
def cuMemsetD8Async(m: Machine, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    _fill(m, dstDevice, uc, 1, N, m.stream(hStream))


@entry()
def cuMemsetD16Async(m: Machine, dstDevice: Any, us: int, N: int, hStream: Any) -> None:
    _fill(m, dstDevice, us, 2, N, m.stream(hStream))


@entry()
def cuMemsetD32Async(m: Machine, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
    _fill(m, dstDevice, ui, 4, N, m.stream(hStream))
