# SPDX-License-Identifier: Apache-2.0
"""Copies and fills, in stream order or waited for."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..machine.objects import Context, Stream
from ..machine.process import Process
from ..machine.work import Copy, Copy3D, End, Fill
from .entry import check, entry, host_address, number

_NOW = object()  # in place of a stream: the legacy one, and the call waits
END_KEYS = ("XInBytes", "Y", "Z", "LOD", "MemoryType", "Host", "Device", "Array", "Pitch", "Height")
_END = 1 << 56  # no program has memory at this address or above it


def _range(proc: Process, verb: str, address: int, nbytes: int, device: bool, context: Context) -> None:
    """Check one end of a copy by `context`: memory of the machine has to be live and within its device's access, host
    memory is taken on trust. Above all that a program can have there is what a client had registered.

    The stream does not count: a copy on another device's stream needs access from the current context.
    """
    if device or proc.machine.window.contains(address):
        proc.memory.require(f"a copy {verb}", address, nbytes, context)
    else:
        check(0 < address <= _END - nbytes)


def _pageable(proc: Process, address: int) -> bool:
    return proc.memory.find(address) is None


def _capturable(proc: Process, stream: Stream, *addresses: int) -> None:
    """Failure, and the capture is spoilt, for a copy of pageable memory of another process of the operating system: it
    is here for the time of the call only.
    """
    if stream.capture is not None and proc.remote and any(_pageable(proc, address) for address in addresses):
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)


def _copy_async(proc: Process, dst: int, src: int, nbytes: int, stream: Stream, keep: Any = None) -> None:
    """Queue a copy. Pageable memory is read, or written, before the call returns, as by the driver; that of a graph,
    when its node runs.
    """
    _capturable(proc, stream, src, dst)
    source = ctypes.string_at(src, nbytes) if stream.capture is None and _pageable(proc, src) else src
    _queue(proc, stream, Copy(stream.context, dst, source, nbytes, keep), _pageable(proc, dst))


def _queue(proc: Process, stream: Stream, command: Copy | Copy3D, wait: bool) -> None:
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


def copy_3d(proc: Process, p: Any, context: Context) -> Copy3D | None:
    """What a CUDA_MEMCPY3D or CUDA_MEMCPY2D asks for, checked; None where it is empty. A pitch or a height of 0 is that
    of rows and layers without gaps.
    """
    width, height, depth = p.WidthInBytes, p.Height, getattr(p, "Depth", 1)
    if 0 in (width, height, depth):
        return None

    def end(name: str, verb: str) -> End:
        given = {key: getattr(p, name + key, 0) for key in END_KEYS}
        kinds, kind = T.CUmemorytype, given["MemoryType"]
        check(kind != kinds.CU_MEMORYTYPE_ARRAY, R.CUDA_ERROR_NOT_SUPPORTED)
        check(kind in list(kinds) and not given["LOD"])
        pitch = given["Pitch"] or width + given["XInBytes"]
        rows = given["Height"] or height + given["Y"]
        check(pitch >= width + given["XInBytes"] and (depth == 1 or rows >= height + given["Y"]))
        base = host_address(given["Host"])[0] if kind == kinds.CU_MEMORYTYPE_HOST else number(given["Device"])
        first = base + (given["Z"] * rows + given["Y"]) * pitch + given["XInBytes"]
        found = End(proc.memory.on_device(first), pitch, rows * pitch, given)
        device = kind == kinds.CU_MEMORYTYPE_DEVICE
        _range(proc, verb, found.address, found.span(width, height, depth), device, proc.current())
        return found

    return Copy3D(context, end("dst", "writes"), end("src", "reads"), width, height, depth, p)


@entry(unsafe=True)
def cuMemcpy2D(proc: Process, pCopy: Any) -> None:
    context = proc.current()
    command = copy_3d(proc, pCopy, context)
    if command is not None:
        _queue(proc, context.legacy, command, True)


@entry()
def cuMemcpy2DAsync(proc: Process, pCopy: Any, hStream: Any) -> None:
    stream = proc.stream(hStream)
    command = copy_3d(proc, pCopy, stream.context)
    if command is not None:
        ends = command.source.address, command.destination.address
        _capturable(proc, stream, *ends)
        _queue(proc, stream, command, any(_pageable(proc, address) for address in ends))


# Fills --------------------------------------------------------------------------------------------------------------


def _fill(proc: Process, dst: Any, value: int, size: int, count: int, stream: Stream) -> None:
    address = number(dst)
    if not 0 <= value < 1 << 8 * size:
        raise OverflowError(f"value {value} does not fit into {size} bytes")
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
