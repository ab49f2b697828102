# SPDX-License-Identifier: Apache-2.0
"""Copies, in stream order or synchronous."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from ..bindings import R, T
from ..machine.memory.foreign import FOREIGN
from ..machine.objects import Context, Stream
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run.work import Copy, Copy3D, End
from ..space import mapped
from .entry import check, entry, number, unsupported
from .refused import ARRAYS

_NOW = object()  # given in place of a stream: copy in the legacy stream, and wait for the copy
END_KEYS = ("XInBytes", "Y", "Z", "LOD", "MemoryType", "Host", "Device", "Array", "Pitch", "Height")
_END = 1 << 56  # the end of a program's address space


def check_range(proc: Process, verb: str, address: int, nbytes: int, device: bool, context: Context) -> None:
    """Check the source or the destination of a copy that is made in `context`. Memory of the machine must be live, and
    the device of the context must have access to it; host memory must be mapped. An address of at least `FOREIGN` is
    `FOREIGN` plus an address of host memory in a client. The address in the client must lie below `_END`. While memory
    is registered, `serve/host_memory.py` adds 2^56 to its address: a higher address than `_END` is that of memory which
    is not registered any more.

    The device of the stream does not matter: a copy on another device's stream needs access from the current context.
    """
    if proc.foreign is not None and address >= FOREIGN and not device:
        check(address - FOREIGN <= _END - nbytes)
    elif device or proc.machine.window.contains(address):
        proc.memory.require(f"a copy {verb}", address, nbytes, context)
    else:
        check(0 < address <= _END - nbytes)
        check(mapped.usable(address, nbytes, verb == "writes"))


def pageable(proc: Process, address: int) -> bool:
    return proc.memory.find(address) is None


def _capturable(proc: Process, stream: Stream, *addresses: int) -> None:
    """Raise Failure, and invalidate the capture, if a captured copy of rows uses host memory of a client. The
    contents of that memory are available during the call only.
    """
    if stream.capture is not None and proc.foreign and any(pageable(proc, address) for address in addresses):
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)


def _copy_async(proc: Process, dst: int, src: int, nbytes: int, stream: Stream, keep: Any = None) -> None:
    """Queue a copy. Before the call returns, a pageable source is read and a pageable destination is written, as with
    CUDA. A captured copy reads or writes pageable memory only when its node runs.
    """
    source: int | bytes = src
    if stream.capture is None and pageable(proc, src):
        source = ctypes.string_at(src, nbytes)
    _queue(proc, stream, Copy(stream.context, dst, source, nbytes, keep), pageable(proc, dst))


def _lasting(proc: Process, stream: Stream, given: Any, address: int) -> int:
    """The address by which a queued copy accesses memory of the caller. In a capture, for host memory of a client, it
    is the address in the client plus `FOREIGN`: each launch of the graph then requests the contents from the client. In
    all other cases it is `address`.
    """
    origin = getattr(given, "origin", None)
    if stream.capture is None or proc.foreign is None or origin is None:
        return address
    if given.keep is not None:
        given.keep.unused = True  # the answer to this call need not contain the memory, as only launches write to it
    return int(origin) + FOREIGN


def _queue(proc: Process, stream: Stream, command: Copy | Copy3D, wait: bool) -> None:
    """Queue a copy and, with `wait`, wait for it unless it is captured."""
    op = proc.enqueue(stream, command)
    if op is not None and wait:
        proc.machine.waits.wait([op])
        proc.healthy(stream.context)


def _copy(proc: Process, kind: str, dst: int, src: int, nbytes: int, hStream: Any = _NOW) -> None:
    """Copy now, or in the order of a stream. `kind` says what kind of memory source and destination are, as in the
    driver's names ("HtoD", "DtoD"). "" means that both may be any memory.
    """
    target, source = proc.memory.on_device(dst), proc.memory.on_device(src)
    context = proc.current()
    stream = None if hStream is _NOW else proc.stream(hStream)
    if nbytes:
        check_range(proc, "writes", target, nbytes, kind.endswith("D"), context)
        check_range(proc, "reads", source, nbytes, kind.startswith("D"), context)
        if stream is None:
            _queue(proc, context.legacy, Copy(context, target, source, nbytes), True)
        else:
            target, source = _lasting(proc, stream, dst, target), _lasting(proc, stream, src, source)
            _copy_async(proc, target, source, nbytes, stream, (dst, src))


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
    """Check a copy between contexts: its source and its destination must be memory of the contexts named for them."""
    for verb, address, handle in (("writes", dst, dst_context), ("reads", src, src_context)):
        context = proc.get(handle, Context, R.CUDA_ERROR_INVALID_CONTEXT)
        proc.healthy(context)
        if nbytes:
            check_range(proc, verb, address, nbytes, True, context)


@entry(unsafe=True)
def cuMemcpyPeer(
    proc: Process, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int
) -> None:
    """Copies between contexts. Peer access is not needed, as without it the copy goes through the host."""
    context, dst, src = proc.current(), dstDevice, srcDevice
    _peer(proc, dst, dstContext, src, srcContext, ByteCount)
    if ByteCount:
        _queue(proc, context.legacy, Copy(context, dst, src, ByteCount), True)


@entry()
def cuMemcpyPeerAsync(
    proc: Process, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
) -> None:
    """Queues the copy of cuMemcpyPeer. In a capture the call is refused, and the capture is invalidated."""
    stream, dst, src = proc.stream(hStream), dstDevice, srcDevice
    _peer(proc, dst, dstContext, src, srcContext, ByteCount)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    if ByteCount:
        _copy_async(proc, dst, src, ByteCount, stream)


def field(p: Any, name: str) -> Any:
    """A field of a structure. 0 if the structure has no such field. Raises Failure for a number that is no member of
    its enum.
    """
    try:
        return getattr(p, name, 0)
    except ValueError:
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None


def copy_3d(proc: Process, p: Any, context: Context) -> Copy3D | None:
    """The checked copy that a CUDA_MEMCPY3D, a CUDA_MEMCPY3D_PEER or a CUDA_MEMCPY2D describes. None for an empty copy.
    A pitch or height of 0 means rows or layers without gaps.
    """
    width, height, depth = p.WidthInBytes, p.Height, getattr(p, "Depth", 1)
    if 0 in (width, height, depth):
        return None

    def end(name: str, verb: str) -> End:
        given = {key: field(p, name + key) for key in END_KEYS}
        kinds, kind = T.CUmemorytype, given["MemoryType"]
        if kind == kinds.CU_MEMORYTYPE_ARRAY:
            raise unsupported(f"a copy that {verb} an array is refused: {ARRAYS}")
        check(not given["LOD"])
        pitch = given["Pitch"] or width + given["XInBytes"]
        rows = given["Height"] or height + given["Y"]
        check(pitch >= width + given["XInBytes"] and (depth == 1 or rows >= height + given["Y"]))
        base = number(given["Host" if kind == kinds.CU_MEMORYTYPE_HOST else "Device"])
        first = base + (given["Z"] * rows + given["Y"]) * pitch + given["XInBytes"]
        found = End(proc.memory.on_device(first), pitch, rows * pitch, given)
        device = kind == kinds.CU_MEMORYTYPE_DEVICE
        user = proc.current()
        if hasattr(p, f"{name}Context") and kind != kinds.CU_MEMORYTYPE_HOST:
            user = proc.get(getattr(p, f"{name}Context"), Context, R.CUDA_ERROR_INVALID_CONTEXT)
            proc.healthy(user)
        check_range(proc, verb, found.address, found.span(width, height, depth), device, user)
        return found

    return Copy3D(context, end("dst", "writes"), end("src", "reads"), width, height, depth, p)


def _rows(proc: Process, p: Any) -> None:
    """Copy rows, and wait for the copy."""
    check(p is not None)
    context = proc.current()
    command = copy_3d(proc, p, context)
    if command is not None:
        _queue(proc, context.legacy, command, True)


def _rows_async(proc: Process, p: Any, hStream: Any) -> None:
    """Copy rows in the order of a stream. Pageable memory is read, or written, before the call returns."""
    check(p is not None)
    stream = proc.stream(hStream)
    command = copy_3d(proc, p, stream.context)
    if command is not None:
        _capturable(proc, stream, command.source.address, command.destination.address)
        if pageable(proc, command.source.address):
            command = read_now(command)
        _queue(proc, stream, command, pageable(proc, command.destination.address))


def read_now(command: Copy3D) -> Copy3D:
    """The same copy, but from a snapshot of the bytes that its source holds now."""
    source = command.source
    nbytes = source.span(command.width, command.height, command.depth)
    held = ctypes.create_string_buffer(ctypes.string_at(source.address, nbytes), nbytes)
    return replace(command, source=source._replace(address=ctypes.addressof(held)), keep=(command.keep, held))


@entry(unsafe=True, name="cuMemcpy2DUnaligned")
@entry(unsafe=True)
def cuMemcpy2D(proc: Process, pCopy: Any) -> None:
    """Copies rows of any alignment, as cuMemcpy2DUnaligned does."""
    _rows(proc, pCopy)


@entry()
def cuMemcpy2DAsync(proc: Process, pCopy: Any, hStream: Any) -> None:
    _rows_async(proc, pCopy, hStream)


@entry(unsafe=True)
def cuMemcpy3D(proc: Process, pCopy: Any) -> None:
    """Copies layers of rows between linear memory of any kind. Arrays are not supported."""
    _rows(proc, pCopy)


@entry()
def cuMemcpy3DAsync(proc: Process, pCopy: Any, hStream: Any) -> None:
    _rows_async(proc, pCopy, hStream)


@entry(unsafe=True)
def cuMemcpy3DPeer(proc: Process, pCopy: Any) -> None:
    """Copies layers of rows between contexts. Peer access is not needed. A source in device memory must be memory of
    `srcContext`, and a destination in device memory must be memory of `dstContext`.
    """
    _rows(proc, pCopy)


@entry()
def cuMemcpy3DPeerAsync(proc: Process, pCopy: Any, hStream: Any) -> None:
    """Queues the copy of cuMemcpy3DPeer. In a capture the call is refused, and the capture is invalidated."""
    proc.stream(hStream).refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    _rows_async(proc, pCopy, hStream)
