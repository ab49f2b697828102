# SPDX-License-Identifier: Apache-2.0
"""Device and pinned memory, copies and fills, and what a pointer is."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from ..memory import READ, READ_WRITE, Allocation
from ..objects import Context, Stream
from ..work import Copy, Copy2D, Fill
from .entry import Failure, check, entry, host_address, is_enum, number
from .types import R, T

if TYPE_CHECKING:
    from ..machine import Machine

_HOST_PORTABLE, _HOST_DEVICEMAP, _HOST_WRITECOMBINED = 1, 2, 4
_REGISTER_FLAGS = 0xF
_PITCH = 512


# Allocation ---------------------------------------------------------------------------------------------------------


@entry(1, unsafe=True)
def cuMemAlloc(m: Machine, bytesize: int) -> Any:
    context = m.current()
    check(bytesize > 0)
    return T.CUdeviceptr(m.memory.alloc(context, bytesize).base)


@entry(2, unsafe=True)
def cuMemAllocPitch(m: Machine, WidthInBytes: int, Height: int, ElementSizeBytes: int) -> tuple[Any, int]:
    context = m.current()
    check(WidthInBytes > 0 and Height > 0 and ElementSizeBytes in (4, 8, 16))
    pitch = -(-WidthInBytes // _PITCH) * _PITCH
    return T.CUdeviceptr(m.memory.alloc(context, pitch * Height).base), pitch


@entry(unsafe=True)
def cuMemFree(m: Machine, dptr: Any) -> None:
    """Waits for all work of the memory's context first, as the driver does."""
    m.current()
    address = number(dptr)
    if address == 0:
        return
    allocation = m.memory.at(address)
    check(allocation is not None and allocation.device is not None and allocation.memory is None)
    assert allocation is not None
    if allocation.pool is not None:
        check(not allocation.freed)
        m.synchronise(m.current())
        m.memory.pool_free(allocation.pool, address)
        return
    assert allocation.context is not None
    m.synchronise(allocation.context)
    m.memory.free(allocation)


@entry(2)
def cuMemGetInfo(m: Machine) -> tuple[int, int]:
    device = m.current().device
    return device.total - device.used, device.total


@entry(2)
def cuMemGetAddressRange(m: Machine, dptr: Any) -> tuple[Any, int]:
    m.current()
    allocation = m.memory.find(number(dptr))
    check(allocation is not None, R.CUDA_ERROR_NOT_FOUND)
    assert allocation is not None
    return T.CUdeviceptr(allocation.base), allocation.nbytes


@entry(1, unsafe=True)
def cuMemAllocHost(m: Machine, bytesize: int) -> int:
    context = m.current()
    check(bytesize > 0)
    return m.memory.host_alloc(context, bytesize, _HOST_DEVICEMAP).base


@entry(1, unsafe=True)
def cuMemHostAlloc(m: Machine, bytesize: int, Flags: int) -> int:
    context = m.current()
    check(bytesize > 0 and 0 <= int(Flags) < 8)
    return m.memory.host_alloc(context, bytesize, int(Flags) | _HOST_DEVICEMAP).base


@entry(unsafe=True)
def cuMemFreeHost(m: Machine, p: Any) -> None:
    """Waits for all work of the memory's context first."""
    address, _ = host_address(p)
    allocation = m.memory.at(address)
    check(allocation is not None and allocation.host_flags is not None and not allocation.registered)
    assert allocation is not None and allocation.context is not None
    m.progress.wait(m.context_ops(allocation.context))
    m.memory.free(allocation)


def _host(m: Machine, p: Any) -> Allocation:
    allocation = m.memory.find(host_address(p)[0])
    check(allocation is not None and allocation.host_flags is not None)
    assert allocation is not None
    return allocation


@entry(1)
def cuMemHostGetDevicePointer(m: Machine, p: Any, Flags: int) -> Any:
    """Memory from cuMemHostAlloc has the same address on a device; registered memory has none there."""
    m.current()
    check(Flags == 0)
    check(not _host(m, p).registered, R.CUDA_ERROR_NOT_SUPPORTED)
    return T.CUdeviceptr(host_address(p)[0])


@entry(1)
def cuMemHostGetFlags(m: Machine, p: Any) -> int:
    flags = _host(m, p).host_flags
    assert flags is not None
    return flags


@entry(unsafe=True)
def cuMemHostRegister(m: Machine, p: Any, bytesize: int, Flags: int) -> None:
    """Pins memory for asynchronous copies. Emulated kernels cannot reach it: mapping it is not supported."""
    context = m.current()
    address, _ = host_address(p)
    flags = int(Flags)
    check(address and bytesize > 0 and 0 <= flags <= _REGISTER_FLAGS)
    check(not flags & _HOST_DEVICEMAP, R.CUDA_ERROR_NOT_SUPPORTED)
    check(not m.memory.within(address, bytesize), R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    m.memory.add(Allocation(address, bytesize, None, context=context, host_flags=flags, registered=True))


@entry(unsafe=True)
def cuMemHostUnregister(m: Machine, p: Any) -> None:
    allocation = m.memory.at(host_address(p)[0])
    check(allocation is not None and allocation.registered, R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    assert allocation is not None and allocation.context is not None
    m.progress.wait(m.context_ops(allocation.context))
    m.memory.free(allocation)


# Copies -------------------------------------------------------------------------------------------------------------


def _range(m: Machine, address: int, nbytes: int, device: bool) -> None:
    """Check one end of a copy: memory of the machine has to be live, host memory is taken on trust."""
    if device or m.window.contains(address, nbytes):
        check(m.memory.covered(address, nbytes))
    else:
        check(address)


def _pageable(m: Machine, address: int) -> bool:
    return m.memory.find(address) is None


def _copy_async(m: Machine, dst: int, src: int, nbytes: int, stream: Stream, keep: Any = None) -> None:
    """Queue a copy. Pageable memory is read, or written, before the call returns, as by the driver."""
    if stream.capture is not None and (_pageable(m, src) or _pageable(m, dst)):
        stream.capture.invalidate()
        raise Failure(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    source = ctypes.string_at(src, nbytes) if _pageable(m, src) else src
    op = m.enqueue(stream, Copy(stream.context, dst, source, nbytes, keep))
    if op is not None and _pageable(m, dst):
        m.progress.wait([op])
        m.healthy(stream.context)


def _copy(m: Machine, dst: int, src: int, nbytes: int, context: Context) -> None:
    """Copy in the order of the legacy stream, and wait."""
    op = m.enqueue(context.legacy, Copy(context, dst, src, nbytes))
    assert op is not None
    m.progress.wait([op])
    m.healthy(context)


def _sync(m: Machine, dst: int, src: int, nbytes: int, *, dst_device: bool = False, src_device: bool = False) -> None:
    context = m.current()
    if nbytes:
        _range(m, dst, nbytes, dst_device)
        _range(m, src, nbytes, src_device)
        _copy(m, dst, src, nbytes, context)


def _async(
    m: Machine,
    dst: int,
    src: int,
    nbytes: int,
    hStream: Any,
    *,
    dst_device: bool = False,
    src_device: bool = False,
    keep: Any = None,
) -> None:
    stream = m.stream(hStream)
    if nbytes:
        _range(m, dst, nbytes, dst_device)
        _range(m, src, nbytes, src_device)
        _copy_async(m, dst, src, nbytes, stream, keep)


@entry(unsafe=True)
def cuMemcpy(m: Machine, dst: Any, src: Any, ByteCount: int) -> None:
    _sync(m, number(dst), number(src), ByteCount)


@entry()
def cuMemcpyAsync(m: Machine, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    _async(m, number(dst), number(src), ByteCount, hStream)


@entry(unsafe=True)
def cuMemcpyHtoD(m: Machine, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    source, keep = host_address(srcHost)
    _sync(m, number(dstDevice), source, ByteCount, dst_device=True)
    del keep


@entry()
def cuMemcpyHtoDAsync(m: Machine, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    source, keep = host_address(srcHost)
    _async(m, number(dstDevice), source, ByteCount, hStream, dst_device=True, keep=keep)


@entry(unsafe=True)
def cuMemcpyDtoH(m: Machine, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    destination, keep = host_address(dstHost)
    _sync(m, destination, number(srcDevice), ByteCount, src_device=True)
    del keep


@entry()
def cuMemcpyDtoHAsync(m: Machine, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    destination, keep = host_address(dstHost)
    _async(m, destination, number(srcDevice), ByteCount, hStream, src_device=True, keep=keep)


@entry(unsafe=True)
def cuMemcpyDtoD(m: Machine, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
    _sync(m, number(dstDevice), number(srcDevice), ByteCount, dst_device=True, src_device=True)


@entry()
def cuMemcpyDtoDAsync(m: Machine, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    _async(m, number(dstDevice), number(srcDevice), ByteCount, hStream, dst_device=True, src_device=True)


def _peers(m: Machine, *contexts: Any) -> None:
    for context in contexts:
        m.healthy(m.get(context, Context, R.CUDA_ERROR_INVALID_CONTEXT))


@entry(unsafe=True)
def cuMemcpyPeer(m: Machine, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int) -> None:
    """Needs no peer access: without it the copy goes through the host."""
    _peers(m, dstContext, srcContext)
    _sync(m, number(dstDevice), number(srcDevice), ByteCount, dst_device=True, src_device=True)


@entry()
def cuMemcpyPeerAsync(
    m: Machine, dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
) -> None:
    _peers(m, dstContext, srcContext)
    _async(m, number(dstDevice), number(srcDevice), ByteCount, hStream, dst_device=True, src_device=True)


def _copy_2d(m: Machine, p: Any, context: Context) -> Copy2D | None:
    def end(kind: Any, host: Any, device: Any, pitch: int, x: int, y: int) -> tuple[int, int]:
        kinds = T.CUmemorytype
        check(kind != kinds.CU_MEMORYTYPE_ARRAY, R.CUDA_ERROR_NOT_SUPPORTED)
        base = host_address(host)[0] if kind == kinds.CU_MEMORYTYPE_HOST else number(device)
        check(pitch == 0 or pitch >= p.WidthInBytes + x)
        pitch = pitch or p.WidthInBytes + x
        start = base + y * pitch + x
        _range(m, start, pitch * (p.Height - 1) + p.WidthInBytes, kind == kinds.CU_MEMORYTYPE_DEVICE)
        return start, pitch

    if p.WidthInBytes == 0 or p.Height == 0:
        return None
    dst, dst_pitch = end(p.dstMemoryType, p.dstHost, p.dstDevice, p.dstPitch, p.dstXInBytes, p.dstY)
    src, src_pitch = end(p.srcMemoryType, p.srcHost, p.srcDevice, p.srcPitch, p.srcXInBytes, p.srcY)
    return Copy2D(context, dst, dst_pitch, src, src_pitch, p.WidthInBytes, p.Height, p)


@entry(unsafe=True)
def cuMemcpy2D(m: Machine, pCopy: Any) -> None:
    context = m.current()
    command = _copy_2d(m, pCopy, context)
    if command is not None:
        op = m.enqueue(context.legacy, command)
        assert op is not None
        m.progress.wait([op])
        m.healthy(context)


@entry()
def cuMemcpy2DAsync(m: Machine, pCopy: Any, hStream: Any) -> None:
    stream = m.stream(hStream)
    command = _copy_2d(m, pCopy, stream.context)
    if command is not None:
        op = m.enqueue(stream, command)
        if op is not None and (_pageable(m, command.destination) or _pageable(m, command.source)):
            m.progress.wait([op])
            m.healthy(stream.context)


# Fills --------------------------------------------------------------------------------------------------------------


def _fill(m: Machine, dst: Any, value: int, size: int, count: int, stream: Stream) -> None:
    address = number(dst)
    if not 0 <= value < 1 << 8 * size:
        raise OverflowError(f"value {value} does not fit into {size} bytes")
    if count == 0:
        return
    check(address % size == 0)
    check(m.memory.covered(address, count * size))
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


# What a pointer is --------------------------------------------------------------------------------------------------

_P = T.CUpointer_attribute


def _attribute(m: Machine, a: Allocation, attribute: Any, address: int) -> Any:
    """The value of a pointer attribute, in the type that cuda.bindings gives it."""
    host = a.device is None
    index = a.context.device.index if a.device is None and a.context else a.device.index if a.device else -1
    if attribute == _P.CU_POINTER_ATTRIBUTE_CONTEXT:
        check(a.context is not None)
        assert a.context is not None
        return T.CUcontext(a.context.handle)
    if attribute == _P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return int(T.CUmemorytype.CU_MEMORYTYPE_HOST if host else T.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    if attribute == _P.CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        check(not a.registered)
        return T.CUdeviceptr(address)
    if attribute == _P.CU_POINTER_ATTRIBUTE_HOST_POINTER:
        check(host)
        return address
    if attribute == _P.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return T.CUmemoryPool(a.pool.handle if a.pool else 0)
    if attribute in (_P.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, _P.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR):
        return T.CUdeviceptr(a.base)
    if attribute == _P.CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return _access_flags(m, a)
    plain = {
        _P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: index,
        _P.CU_POINTER_ATTRIBUTE_BUFFER_ID: a.number,
        _P.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: False,
        _P.CU_POINTER_ATTRIBUTE_IS_MANAGED: False,
        _P.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: False,
        _P.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: 0,
        _P.CU_POINTER_ATTRIBUTE_RANGE_SIZE: a.nbytes,
        _P.CU_POINTER_ATTRIBUTE_MAPPING_SIZE: a.nbytes,
        _P.CU_POINTER_ATTRIBUTE_MAPPED: True,
        _P.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: 0,
        _P.CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: a.number,
    }
    check(attribute in plain, R.CUDA_ERROR_NOT_SUPPORTED)
    return plain[attribute]


def _access_flags(m: Machine, a: Allocation) -> int:
    """What the current context's device may do with an allocation, as CU_POINTER_ATTRIBUTE_ACCESS_FLAGS."""
    bit = 1 << m.current().device.index
    read, write = m.window.access(a.base) if not a.registered else (0, 0)
    return READ_WRITE if write & bit else READ if read & bit else 0


@entry(1)
def cuPointerGetAttribute(m: Machine, attribute: Any, ptr: Any) -> Any:
    is_enum(attribute, _P, "attribute")
    allocation = m.memory.find(number(ptr))
    check(allocation is not None)
    assert allocation is not None
    return _attribute(m, allocation, attribute, number(ptr))


@entry(1)
def cuPointerGetAttributes(m: Machine, numAttributes: int, attributes: Any, ptr: Any) -> list[Any]:
    """Unlike the single query this succeeds for any pointer, with zeros for memory that CUDA does not know."""
    wanted = list(attributes or [])
    for attribute in wanted:
        is_enum(attribute, _P, "attributes")
    if numAttributes > len(wanted):
        raise RuntimeError(f"List is too small: {len(wanted)} < {numAttributes}")
    allocation = m.memory.find(number(ptr))
    return [_or_empty(m, allocation, attribute, number(ptr)) for attribute in wanted[:numAttributes]]


def _or_empty(m: Machine, allocation: Allocation | None, attribute: Any, address: int) -> Any:
    if allocation is not None:
        try:
            return _attribute(m, allocation, attribute, address)
        except Failure:
            pass
    empty = {
        _P.CU_POINTER_ATTRIBUTE_CONTEXT: T.CUcontext,
        _P.CU_POINTER_ATTRIBUTE_DEVICE_POINTER: T.CUdeviceptr,
        _P.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: T.CUdeviceptr,
        _P.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: T.CUdeviceptr,
        _P.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: T.CUmemoryPool,
    }
    if attribute == _P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return -2
    return empty[attribute](0) if attribute in empty else 0
