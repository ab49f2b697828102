# SPDX-License-Identifier: Apache-2.0
"""3D copies, which copy several layers of rows; batches of copies; copies between contexts; and fills of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary
from loopback import FORMS, initialised

from drvfuse.emu import Machine
from drvfuse.emu.bindings import MAJOR

KIND = types.CUmemorytype
HOST, DEVICE, ARRAY, UNIFIED = (
    KIND.CU_MEMORYTYPE_HOST,
    KIND.CU_MEMORYTYPE_DEVICE,
    KIND.CU_MEMORYTYPE_ARRAY,
    KIND.CU_MEMORYTYPE_UNIFIED,
)
ORDER = types.CUmemcpySrcAccessOrder


@pytest.fixture(params=FORMS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    with initialised(request.param, devices=2) as made:
        yield made


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def _upload(cuda: Any, data: np.ndarray) -> Any:
    pointer = ok(cuda.cuMemAlloc(data.nbytes))
    ok(cuda.cuMemcpyHtoD(pointer, data, data.nbytes))
    return pointer


def _read(cuda: Any, pointer: Any, *shape: int) -> np.ndarray:
    out = np.zeros(shape, np.uint8)
    ok(cuda.cuMemcpyDtoH(out, pointer, out.nbytes))
    return out


def _end(p: Any, end: str, kind: Any, address: int, at: tuple[int, int, int], pitch: int, height: int) -> None:
    """Set the fields of a copy's source or target (`end`): its memory, the x, y and z of the first byte, the bytes from
    one row to the next (`pitch`), and the rows from one layer to the next (`height`).
    """
    fields = dict(zip(("XInBytes", "Y", "Z"), at, strict=True)) | {"MemoryType": kind, "Pitch": pitch, "Height": height}
    fields["Host" if kind == HOST else "Device"] = int(address)
    for name, value in fields.items():
        setattr(p, end + name, value)


def _copy(kind: type, source: tuple[Any, ...], target: tuple[Any, ...], shape: tuple[int, int, int]) -> Any:
    p = kind()
    _end(p, "src", *source)
    _end(p, "dst", *target)
    p.WidthInBytes, p.Height, p.Depth = shape
    return p


def _cut(a: np.ndarray, at: tuple[int, int, int], shape: tuple[int, int, int]) -> np.ndarray:
    """A view of the box of bytes that begins at `at` and has the extents `shape`, both in the order x, y, z."""
    (x, y, z), (width, height, depth) = at, shape
    return a[z : z + depth, y : y + height, x : x + width]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("host", [HOST, UNIFIED])
def test_a_copy_of_layers_leaves_the_bytes_between_rows(
    cuda: Any, rng: np.random.Generator, host: Any, asynchronous: bool
) -> None:
    shape, first, second, third = (7, 3, 2), (5, 1, 1), (2, 2, 0), (1, 0, 1)
    source, there, back = _bytes(rng, 4, 5, 20), _bytes(rng, 3, 6, 16), _bytes(rng, 3, 4, 12)
    pointer, expected = _upload(cuda, there), back.copy()
    _cut(there, second, shape)[:] = _cut(source, first, shape)
    _cut(expected, third, shape)[:] = _cut(there, second, shape)
    up = _copy(types.CUDA_MEMCPY3D, (host, source.ctypes.data, first, 20, 5), (DEVICE, pointer, second, 16, 6), shape)
    down = _copy(types.CUDA_MEMCPY3D, (DEVICE, pointer, second, 16, 6), (host, back.ctypes.data, third, 12, 4), shape)
    for p in (up, down):
        ok(cuda.cuMemcpy3DAsync(p, 0) if asynchronous else cuda.cuMemcpy3D(p))
    assert (_read(cuda, pointer, 3, 6, 16) == there).all()
    assert (back == expected).all()


def test_an_asynchronous_copy_of_layers_reads_pageable_memory_at_once(cuda: Any, rng: np.random.Generator) -> None:
    data, stream, word = _bytes(rng, 3, 4, 8), ok(cuda.cuStreamCreate(1)), ok(cuda.cuMemAlloc(4))
    target, expected = _upload(cuda, np.zeros((2, 2, 5), np.uint8)), data[1:, 1:3, 2:7].copy()
    ok(cuda.cuMemsetD32(word, 0, 1))
    ok(cuda.cuStreamWaitValue32(stream, word, 1, 1))
    source = (HOST, data.ctypes.data, (2, 1, 1), 8, 4)
    p = _copy(types.CUDA_MEMCPY3D, source, (DEVICE, target, (0, 0, 0), 5, 2), (5, 2, 2))
    ok(cuda.cuMemcpy3DAsync(p, stream))
    data[:] = 0
    ok(cuda.cuStreamWriteValue32(0, word, 1, 0))
    ok(cuda.cuStreamSynchronize(stream))
    assert (_read(cuda, target, 2, 2, 5) == expected).all()


def test_rows_without_gaps_need_no_pitch(cuda: Any, rng: np.random.Generator) -> None:
    data = _bytes(rng, 2, 3, 4)
    source, target = _upload(cuda, data), _upload(cuda, np.zeros_like(data))
    p = _copy(types.CUDA_MEMCPY3D, (DEVICE, source, (0, 0, 0), 0, 0), (DEVICE, target, (0, 0, 0), 0, 0), (4, 3, 2))
    ok(cuda.cuMemcpy3D(p))
    assert (_read(cuda, target, 2, 3, 4) == data).all()
    p.Depth = 0
    ok(cuda.cuMemcpy3D(p))


def test_copies_of_layers_outside_of_memory_and_of_arrays_are_refused(cuda: Any) -> None:
    pointer, here = ok(cuda.cuMemAlloc(64)), (0, 0, 0)
    ok(cuda.cuMemsetD8(pointer, 0, 64))
    target = (DEVICE, pointer, here, 8, 2)

    def refused(p: Any) -> Any:
        return code(cuda.cuMemcpy3D(p))

    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert refused(_copy(types.CUDA_MEMCPY3D, (DEVICE, pointer, (1, 0, 0), 8, 2), target, (8, 2, 4))) == wrong
    assert refused(_copy(types.CUDA_MEMCPY3D, (DEVICE, pointer, (0, 1, 0), 8, 2), target, (8, 2, 4))) == wrong
    assert refused(_copy(types.CUDA_MEMCPY3D, (DEVICE, pointer, (0, 0, 1), 8, 2), target, (8, 2, 4))) == wrong
    array = _copy(types.CUDA_MEMCPY3D, (ARRAY, 0, here, 0, 0), target, (8, 2, 4))
    assert refused(array) == R.CUDA_ERROR_NOT_SUPPORTED
    assert refused(None) == wrong


@pytest.mark.parametrize("asynchronous", [False, True])
def test_layers_are_copied_between_contexts(cuda: Any, rng: np.random.Generator, asynchronous: bool) -> None:
    data = _bytes(rng, 2, 3, 8)
    there = primary(cuda, 1)
    target = _upload(cuda, np.zeros_like(data))
    here = primary(cuda, 0)
    source = _upload(cuda, data)
    p = _copy(types.CUDA_MEMCPY3D_PEER, (DEVICE, source, (2, 0, 0), 8, 3), (DEVICE, target, (1, 1, 0), 8, 3), (5, 2, 2))
    p.srcContext, p.dstContext = here, there
    ok(cuda.cuMemcpy3DPeerAsync(p, 0) if asynchronous else cuda.cuMemcpy3DPeer(p))
    ok(cuda.cuCtxSynchronize())
    expected = np.zeros_like(data)
    expected[:, 1:3, 1:6] = data[:, 0:2, 2:7]
    assert (_read(cuda, target, 2, 3, 8) == expected).all()
    p.dstContext = 0
    assert code(cuda.cuMemcpy3DPeer(p)) == R.CUDA_ERROR_INVALID_CONTEXT


def test_rows_of_any_alignment_are_copied(cuda: Any, rng: np.random.Generator) -> None:
    data = _bytes(rng, 5, 7)
    pointer = _upload(cuda, np.zeros(64, np.uint8))
    p = types.CUDA_MEMCPY2D()
    p.srcMemoryType, p.srcHost, p.srcPitch = HOST, data.ctypes.data, 7
    p.dstMemoryType, p.dstDevice, p.dstPitch = DEVICE, int(pointer) + 3, 9
    p.WidthInBytes, p.Height = 7, 5
    ok(cuda.cuMemcpy2DUnaligned(p))
    assert (_read(cuda, pointer, 64)[3 : 3 + 45].reshape(5, 9)[:, :7] == data).all()


# Batches ------------------------------------------------------------------------------------------------------------


def _attributes(order: Any) -> Any:
    made = types.CUmemcpyAttributes()
    made.srcAccessOrder = order
    return made


def _batch(cuda: Any, *args: Any) -> Any:
    """The CUresult of a batch copy. Only with cuda.bindings 12 the call also returns the index of the failed copy."""
    dsts, srcs = ([types.CUdeviceptr(int(address)) for address in addresses] for addresses in args[:2])
    result = cuda.cuMemcpyBatchAsync(dsts, srcs, *args[2:])
    assert len(result) == (2 if MAJOR == 12 else 1)
    return result[0]


def test_a_batch_copies_between_all_kinds_of_memory(cuda: Any, rng: np.random.Generator) -> None:
    stream, data = ok(cuda.cuStreamCreate(1)), _bytes(rng, 3, 40)
    source, target = _upload(cuda, data), _upload(cuda, np.zeros(120, np.uint8))
    host, back = _bytes(rng, 30), np.zeros(50, np.uint8)
    dsts = [int(target), int(target) + 40, back.ctypes.data]
    srcs = [int(source) + 5, host.ctypes.data, int(source) + 60]
    attributes = [
        _attributes(ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM),
        _attributes(ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL),
    ]
    expected = host.copy()
    assert _batch(cuda, dsts, srcs, [40, 30, 50], 3, attributes, [0, 1], 2, stream) == 0
    host[:] = 0
    ok(cuda.cuStreamSynchronize(stream))
    there = _read(cuda, target, 120)
    assert (there[:40] == data.ravel()[5:45]).all()
    assert (there[40:70] == expected).all() and not there[70:].any()
    assert (back == data.ravel()[60:110]).all()


def test_a_wrong_batch_copies_nothing(cuda: Any) -> None:
    stream, target = ok(cuda.cuStreamCreate(1)), _upload(cuda, np.zeros(64, np.uint8))
    source = _upload(cuda, np.ones(64, np.uint8))
    dsts, srcs, attributes = [target, int(target) + 16], [source, source], [_attributes(ORDER(1))]
    wrong = R.CUDA_ERROR_INVALID_VALUE
    for sizes, starts, where, kinds in (
        ([16, 64], [0], stream, attributes),
        ([16, 0], [0], stream, attributes),
        ([16, 16], [1], stream, attributes),
        ([16, 16], [0], 0, attributes),
        ([16, 16], [0, 0], stream, attributes * 2),
        ([16, 16], [0], stream, [_attributes(ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_MAX)]),
    ):
        assert _batch(cuda, dsts, srcs, sizes, 2, kinds, starts, len(starts), where) == wrong
    with pytest.raises(RuntimeError, match="too small"):
        _batch(cuda, dsts, srcs, [16], 2, attributes, [0], 1, stream)
    ok(cuda.cuCtxSynchronize())
    assert not _read(cuda, target, 64).any()


def test_the_copies_of_a_batch_are_not_ordered_among_themselves() -> None:
    with Machine(devices=1, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        stream, memory = ok(cuda.cuStreamCreate(1)), _upload(cuda, np.arange(64, dtype=np.uint8))
        first, second = int(memory), int(memory) + 32
        attributes = [_attributes(ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)]
        assert _batch(cuda, [first, second], [second, second + 16], [16, 16], 2, attributes, [0], 1, stream) == 0
        ok(cuda.cuMemsetD8Async(first, 1, 64, stream))
        ok(cuda.cuStreamSynchronize(stream))
        assert [report.kind for report in machine.reports] == ["race"]


def _operand(address: int, row: int, layer: int) -> Any:
    made = types.CUmemcpy3DOperand()
    made.type = types.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
    made.op.ptr.ptr, made.op.ptr.rowLength, made.op.ptr.layerHeight = int(address), row, layer
    return made


def _operation(source: Any, target: Any, shape: tuple[int, int, int]) -> Any:
    p = types.CUDA_MEMCPY3D_BATCH_OP()
    p.src, p.dst, p.srcAccessOrder = source, target, ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    extent = types.CUextent3D()
    extent.width, extent.height, extent.depth = shape
    p.extent = extent
    return p


def test_a_batch_copies_layers(cuda: Any, rng: np.random.Generator) -> None:
    stream, shape = ok(cuda.cuStreamCreate(1)), (6, 2, 3)
    host, back = _bytes(rng, 3, 4, 8), np.full((3, 3, 7), 9, np.uint8)
    data = _bytes(rng, 3, 2, 6)
    source, target = _upload(cuda, data), _upload(cuda, np.zeros((3, 2, 6), np.uint8))
    operations = [
        _operation(_operand(host.ctypes.data, 8, 4), _operand(target, 0, 0), shape),
        _operation(_operand(source, 6, 2), _operand(back.ctypes.data, 7, 3), shape),
    ]
    assert cuda.cuMemcpy3DBatchAsync(2, operations, 0, stream)[0] == 0
    ok(cuda.cuStreamSynchronize(stream))
    assert (_read(cuda, target, 3, 2, 6) == host[:, :2, :6]).all()
    assert (back[:, :2, :6] == data).all() and (back[:, 2] == 9).all() and (back[:, :, 6] == 9).all()
    for p in (
        _operation(_operand(source, 5, 2), _operand(target, 6, 2), shape),
        _operation(_operand(source, 6, 1), _operand(target, 6, 2), shape),
        _operation(_operand(source, 6, 2), _operand(target, 6, 2), (6, 2, 0)),
        _operation(_operand(source, 7, 2), _operand(target, 6, 2), shape),
    ):
        assert cuda.cuMemcpy3DBatchAsync(1, [p], 0, stream)[0] == R.CUDA_ERROR_INVALID_VALUE


# Fills --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "value"), [(1, 0xA5), (2, 0xBEEF), (4, 0xDEADBEEF)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_fills_of_rows_leave_the_bytes_between_them(cuda: Any, size: int, value: int, asynchronous: bool) -> None:
    pointer = _upload(cuda, np.full(320, 7, np.uint8))
    name = f"cuMemsetD2D{8 * size}"
    if asynchronous:
        ok(getattr(cuda, name + "Async")(int(pointer) + 8, 32, value, 3, 5, 0))
    else:
        ok(getattr(cuda, name)(int(pointer) + 8, 32, value, 3, 5))
    expected = np.full((10, 32), 7, np.uint8)
    expected[:5, 8 : 8 + 3 * size] = np.full((5, 3), value, f"<u{size}").view(np.uint8)
    assert (_read(cuda, pointer, 10, 32) == expected).all()
    fill = getattr(cuda, name)
    ok(fill(pointer, 0, value, 320 // size, 1))
    ok(fill(pointer, 0, value, 0, 3))
    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert code(fill(pointer, 2 * size, value, 3, 2)) == wrong
    assert code(fill(pointer, 32, value, 3, 11)) == wrong
    if size > 1:
        assert code(fill(int(pointer) + 1, 32, value, 3, 2)) == wrong
        assert code(fill(pointer, 32 + 1, value, 3, 2)) == wrong
    with pytest.raises(OverflowError):
        fill(pointer, 32, 1 << 8 * size, 3, 2)
