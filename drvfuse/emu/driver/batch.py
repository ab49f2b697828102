# SPDX-License-Identifier: Apache-2.0
"""Batches of copies. A batch is in stream order as a whole, but its copies are not ordered with one another."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..bindings import R, T
from ..machine.objects import Stream
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run.work import Copy, Copy3D, End
from .copy import check_range, field, pageable, read_now
from .entry import check, entry, number, unsupported
from .refused import ARRAYS

_ORDER = T.CUmemcpySrcAccessOrder
_ORDERS = (
    _ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    _ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL,
    _ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
)
_FLAGS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_NONE = (1 << 64) - 1  # the `failIdx` of a batch that succeeds, or that is refused as a whole


def batch_stream(proc: Process, hStream: Any) -> Stream:
    """The stream of a batch. Raises Failure if it is the legacy stream, or is being captured."""
    stream = proc.stream(hStream)
    check(not stream.is_legacy)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    return stream


def _queue(proc: Process, stream: Stream, commands: Sequence[Copy | Copy3D], waits: Sequence[bool]) -> None:
    """Queue copies, and wait for those whose element of `waits` is true. These write to pageable memory, which has to
    be written before the driver call returns.
    """
    ops = proc.machine.progress.enqueue_together(stream, commands)
    pending = [op for op, wait in zip(ops, waits, strict=True) if wait]
    if pending:
        proc.machine.waits.wait(pending)
        proc.healthy(stream.context)


def _at_once(p: Any) -> bool:
    """Whether srcAccessOrder demands that the source of a copy is read before the call returns. Raises Failure for an
    invalid srcAccessOrder.
    """
    order = field(p, "srcAccessOrder")
    check(order in _ORDERS)
    return bool(order == _ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL)


def _batch(
    proc: Process, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, attrsIdxs: Any, numAttrs: int, hStream: Any
) -> None:
    """Queue a batch of copies of linear memory. Attribute i applies to the copies from index `attrsIdxs[i]` up to the
    start of the next attribute. Before the call returns, pageable sources and sources with the order DURING_API_CALL
    are read, and pageable destinations are written.
    """
    stream = batch_stream(proc, hStream)
    targets, sources, lengths = (items[:count] for items in (dsts, srcs, sizes))
    attributes, starts = attrs[:numAttrs], attrsIdxs[:numAttrs]
    check(count > 0 and 0 < numAttrs <= count and starts[0] == 0)
    check(all(a < b for a, b in zip(starts, [*starts[1:], count], strict=True)))
    check(all(not a.flags & ~_FLAGS for a in attributes))
    at_once = [_at_once(a) for a in attributes]
    copies, waits = [], []
    for i, (dst, src, nbytes) in enumerate(zip(targets, sources, lengths, strict=True)):
        target, source = (proc.memory.on_device(address) for address in (dst, src))
        check(nbytes > 0)
        check_range(proc, "writes", target, nbytes, False, proc.current())
        check_range(proc, "reads", source, nbytes, False, proc.current())
        now = at_once[sum(start <= i for start in starts) - 1] or pageable(proc, source)
        copies.append(Copy(stream.context, target, ctypes.string_at(source, nbytes) if now else source, nbytes))
        waits.append(pageable(proc, target))
    _queue(proc, stream, copies, waits)


@entry(1, bindings=12, name="cuMemcpyBatchAsync")
def _batch_12(
    proc: Process, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, attrsIdxs: Any, numAttrs: int, hStream: Any
) -> int:
    _batch(proc, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream)
    return _NONE


@entry(bindings=13)
def cuMemcpyBatchAsync(
    proc: Process, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, attrsIdxs: Any, numAttrs: int, hStream: Any
) -> None:
    _batch(proc, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream)


def _end(proc: Process, operand: Any, verb: str, shape: tuple[int, int, int]) -> End:
    """The source or the destination of a copy in a batch, which must be linear memory. A row length of 0 means the
    width of the copy, and a layer height of 0 the height of the copy.
    """
    kind, kinds = field(operand, "type"), T.CUmemcpy3DOperandType
    if kind == kinds.CU_MEMCPY_OPERAND_TYPE_ARRAY:
        raise unsupported(f"a copy that {verb} an array is refused: {ARRAYS}")
    check(kind == kinds.CU_MEMCPY_OPERAND_TYPE_POINTER)
    at, (width, height, depth) = operand.op.ptr, shape
    pitch, rows = int(at.rowLength) or width, int(at.layerHeight) or height
    check(pitch >= width and rows >= height)
    found = End(proc.memory.on_device(number(at.ptr)), pitch, rows * pitch, {})
    check_range(proc, verb, found.address, found.span(width, height, depth), False, proc.current())
    return found


def _batch_3d(proc: Process, numOps: int, opList: Any, flags: int, hStream: Any) -> None:
    """Queue a batch of 3D copies between linear memory. Before the call returns, pageable sources and sources with the
    order DURING_API_CALL are read, and pageable destinations are written.
    """
    stream = batch_stream(proc, hStream)
    check(numOps > 0 and flags == 0)
    copies, waits = [], []
    for p in opList[:numOps]:
        shape = int(p.extent.width), int(p.extent.height), int(p.extent.depth)
        check(0 not in shape and not p.flags & ~_FLAGS)
        now = _at_once(p)
        target, source = _end(proc, p.dst, "writes", shape), _end(proc, p.src, "reads", shape)
        copy = Copy3D(stream.context, target, source, *shape)
        copies.append(read_now(copy) if now or pageable(proc, source.address) else copy)
        waits.append(pageable(proc, target.address))
    _queue(proc, stream, copies, waits)


@entry(1, bindings=12, name="cuMemcpy3DBatchAsync")
def _batch_3d_12(proc: Process, numOps: int, opList: Any, flags: int, hStream: Any) -> int:
    _batch_3d(proc, numOps, opList, flags, hStream)
    return _NONE


@entry(bindings=13)
def cuMemcpy3DBatchAsync(proc: Process, numOps: int, opList: Any, flags: int, hStream: Any) -> None:
    _batch_3d(proc, numOps, opList, flags, hStream)


@entry(1)
def cuMemBatchDecompressAsync(proc: Process, paramsArray: Any, count: int, flags: int, stream: Any) -> int:
    """Returns CUDA_ERROR_NOT_SUPPORTED, as no emulated device has a decompression engine
    (MEM_DECOMPRESS_ALGORITHM_MASK is 0).
    """
    proc.stream(stream)
    check(paramsArray is not None and count > 0 and flags == 0)
    raise Failure(R.CUDA_ERROR_NOT_SUPPORTED)
