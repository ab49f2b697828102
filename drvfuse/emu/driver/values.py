# SPDX-License-Identifier: Apache-2.0
"""Writes of values to memory by streams, and waits for values in memory, single or in batches
(`machine/run/values.py`)."""

from __future__ import annotations

import struct
from typing import Any

from ..bindings import R, T
from ..machine.objects import Context
from ..machine.process.process import Process
from ..machine.run.values import NOR, ValueOps, WaitValue, WriteValue
from ..wire.structs import Structure
from .entry import check, entry

_OP = T.CUstreamBatchMemOpType
_SIZES = {
    _OP.CU_STREAM_MEM_OP_WAIT_VALUE_32: 4,
    _OP.CU_STREAM_MEM_OP_WAIT_VALUE_64: 8,
    _OP.CU_STREAM_MEM_OP_WRITE_VALUE_32: 4,
    _OP.CU_STREAM_MEM_OP_WRITE_VALUE_64: 8,
}
_WAITS = (_OP.CU_STREAM_MEM_OP_WAIT_VALUE_32, _OP.CU_STREAM_MEM_OP_WAIT_VALUE_64)
_LAYOUT = Structure("CUstreamBatchMemOpParams")
_PARAMS = struct.Struct("<IIQQI")  # operation, flags of a memory barrier, address, value, flags
_NO_MEMORY_BARRIER = 1
_FLUSH = 1 << 30
_MOST = 256


def _write(proc: Process, context: Context, address: int, value: int, size: int, flags: int) -> WriteValue:
    check(flags in (0, _NO_MEMORY_BARRIER))
    at = _word(proc, context, "a stream write writes", address, size)
    return WriteValue(at, value, size, barrier=not flags)


def _wait(proc: Process, context: Context, address: int, value: int, size: int, flags: int) -> WaitValue:
    """A checked wait. The flag FLUSH is refused, as no emulated device can flush remote writes (CAN_FLUSH_REMOTE_WRITES
    is 0).
    """
    check(not flags & _FLUSH, R.CUDA_ERROR_NOT_SUPPORTED)
    check(0 <= flags <= NOR)
    return WaitValue(_word(proc, context, "a stream wait reads", address, size), value, size, flags)


def _word(proc: Process, context: Context, what: str, address: int, size: int) -> int:
    """The address of a word. Raises Failure unless it is aligned and the context's device may access it."""
    at = proc.memory.on_device(address)
    check(at % size == 0)
    proc.memory.require(what, at, size, context, direct=True)
    return at


def value_operations(proc: Process, context: Context, params: Any, count: int) -> tuple[WriteValue | WaitValue, ...]:
    """The checked operations of an array of CUstreamBatchMemOpParams. A memory barrier becomes no operation, as the
    operations are in order anyway.
    """
    check(0 < count <= _MOST)
    found: list[WriteValue | WaitValue] = []
    for p in params[:count]:
        kind, low, address, value, flags = _PARAMS.unpack(_LAYOUT.bytes_of(p)[: _PARAMS.size])
        check(kind != _OP.CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES, R.CUDA_ERROR_NOT_SUPPORTED)
        if kind == _OP.CU_STREAM_MEM_OP_BARRIER:
            check(low in (0, 1))  # the flags of the memory barrier
            continue
        check(kind in _SIZES)
        size, make = _SIZES[kind], _wait if kind in _WAITS else _write
        found.append(make(proc, context, address, value & (1 << 8 * size) - 1, size, flags))
    return tuple(found)


@entry()
def cuStreamBatchMemOp(proc: Process, stream: Any, count: int, paramArray: Any, flags: int) -> None:
    """Executes the operations one after another. Other streams and kernels may see the first write before the last one
    is made.
    """
    queue = proc.stream(stream)
    check(flags == 0)
    proc.enqueue(queue, ValueOps(queue.context, value_operations(proc, queue.context, paramArray, count)))


@entry()
def cuStreamWriteValue32(proc: Process, stream: Any, addr: Any, value: int, flags: int) -> None:
    """Writes a word after all earlier work of the stream. With the flag NO_MEMORY_BARRIER the write is no release: work
    that sees the value is not ordered after that earlier work.
    """
    queue = proc.stream(stream)
    write = _write(proc, queue.context, addr, value, 4, flags)
    proc.enqueue(queue, ValueOps(queue.context, (write,)))


@entry()
def cuStreamWriteValue64(proc: Process, stream: Any, addr: Any, value: int, flags: int) -> None:
    queue = proc.stream(stream)
    write = _write(proc, queue.context, addr, value, 8, flags)
    proc.enqueue(queue, ValueOps(queue.context, (write,)))


@entry()
def cuStreamWaitValue32(proc: Process, stream: Any, addr: Any, value: int, flags: int) -> None:
    """Holds later work of the stream back until the word satisfies the condition. If nothing can write the word any
    more, calls that wait for the stream return CUDA_ERROR_LAUNCH_TIMEOUT with a report of kind "deadlock". With CUDA
    such calls never return.
    """
    queue = proc.stream(stream)
    wait = _wait(proc, queue.context, addr, value, 4, flags)
    proc.enqueue(queue, ValueOps(queue.context, (wait,)))


@entry()
def cuStreamWaitValue64(proc: Process, stream: Any, addr: Any, value: int, flags: int) -> None:
    queue = proc.stream(stream)
    wait = _wait(proc, queue.context, addr, value, 8, flags)
    proc.enqueue(queue, ValueOps(queue.context, (wait,)))
