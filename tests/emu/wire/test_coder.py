# SPDX-License-Identifier: Apache-2.0
"""Calls and results as bytes: reading the bytes gives the values that were written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, ok, primary, ptx
from loopback import Loopback, LoopbackDriver

from drvfuse.emu import Machine
from drvfuse.emu.bindings import T
from drvfuse.emu.driver import ENTRIES
from drvfuse.emu.wire import scalars
from drvfuse.emu.wire.calls import Call, Run
from drvfuse.emu.wire.coder import coder
from drvfuse.emu.wire.message import Incoming, Outgoing

pytestmark = pytest.mark.emulated


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=2) as made:
        made.driver.cuInit(0)
        yield made


@pytest.fixture
def cuda(machine: Machine) -> Any:
    """The driver API of a machine, all of whose calls travel as bytes."""
    made = LoopbackDriver(machine)
    primary(made)
    return made


def _values(kind: scalars.Scalar, rng: np.random.Generator) -> Any:
    if isinstance(kind, scalars.Enumeration):
        members = list(kind.kind)
        return members[rng.integers(len(members))]
    if isinstance(kind, scalars.Real):
        return float(np.float32(rng.standard_normal()))
    least, most = kind.least, kind.most
    return (least, most, least + int(rng.integers(2**62)) % (most - least + 1))[rng.integers(3)]


@pytest.mark.parametrize("name", [n for n in sorted(ENTRIES) if coder(n)._numbers is not None])
def test_numbers_arrive_as_they_were_sent(name: str, rng: np.random.Generator) -> None:
    made = coder(name)
    for _ in range(5):
        values = [_values(item.scalar, rng) for item in made.inputs]
        out = Outgoing()
        made.write_call(out, values, Loopback(None))
        incoming = Incoming(memoryview(b"".join(out.parts)), [])
        assert made.read_call(incoming, Loopback(None)).values == values
        assert incoming.at == len(incoming.content)


@pytest.mark.parametrize("name", [n for n in sorted(ENTRIES) if coder(n)._results is not None])
def test_results_have_the_types_of_the_bindings(name: str, rng: np.random.Generator) -> None:
    made = coder(name)
    values = [_values(item.scalar, rng) for item in made.outputs]
    out = Outgoing()
    made.write_result(out, values, Run(made.signature, Loopback(None)))
    incoming = Incoming(memoryview(b"".join(out.parts)), [])
    found = made.read_result(incoming, Call(made.signature, [], Loopback(None)))
    for item, value, got in zip(made.outputs, values, found, strict=True):
        assert got == value if isinstance(item.scalar, scalars.Real) else int(got) == int(value)
        if isinstance(item.scalar, scalars.Handle | scalars.Enumeration):
            assert type(got) is item.scalar.kind


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("cuMemAlloc", (-1,), OverflowError),
        ("cuMemAlloc", ("64",), TypeError),
        ("cuMemAlloc", (1 << 64,), OverflowError),
        ("cuDeviceGet", (1 << 31,), OverflowError),
        ("cuDeviceGetAttribute", (None, 0), TypeError),
        ("cuMemsetD8", (0, 256, 1), OverflowError),
        ("cuStreamSynchronize", (object(),), TypeError),
        ("cuMemCreate", (1 << 21, object(), 0), TypeError),
        ("cuModuleGetFunction", (0, "name"), TypeError),
        ("cuMemcpyHtoD", (0, object(), 4), TypeError),
        ("cuMemcpyHtoD", (0, 0), TypeError),
    ],
)
def test_arguments_of_wrong_types_are_refused_before_anything_is_sent(
    cuda: Any, name: str, args: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        getattr(cuda, name)(*args)


@pytest.mark.parametrize("value", [64, 64.0, np.int32(64), np.array([64]), np.float32(64)])
def test_integers_are_read_as_the_bindings_read_them(cuda: Any, value: Any) -> None:
    with np.errstate(all="ignore"):
        pointer = ok(cuda.cuMemAlloc(value if not isinstance(value, np.ndarray) else value[0]))
    assert ok(cuda.cuMemGetAddressRange(pointer))[1] == 64


# Memory -------------------------------------------------------------------------------------------------------------


def test_pageable_memory_is_copied_both_ways(cuda: Any, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 5000).astype(np.uint8)
    pointer = ok(cuda.cuMemAlloc(5000))
    for source in (data, data.tobytes(), bytearray(data), data.ctypes.data):
        ok(cuda.cuMemsetD8(pointer, 0, 5000))
        ok(cuda.cuMemcpyHtoD(pointer, source, 5000))
        back = np.zeros(5000, np.uint8)
        ok(cuda.cuMemcpyDtoHAsync(back, pointer, 5000, 0))
        assert (back == data).all()
    ok(cuda.cuMemcpy(int(pointer) + 10, data.ctypes.data, 100))
    ok(cuda.cuMemcpyAsync(back.ctypes.data, int(pointer) + 10, 100, 0))
    assert (back[:100] == data[:100]).all()
    assert code(cuda.cuMemcpyHtoD(pointer, None, 4)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuMemcpyHtoD(pointer, None, 0))


def test_copies_of_rows_of_pageable_memory_leave_the_bytes_between_them(cuda: Any, rng: np.random.Generator) -> None:
    source = rng.integers(0, 256, (7, 40)).astype(np.uint8)
    pointer, pitch = ok(cuda.cuMemAllocPitch(32, 7, 4))
    p = T.CUDA_MEMCPY2D()
    p.srcMemoryType, p.dstMemoryType = T.CUmemorytype.CU_MEMORYTYPE_HOST, T.CUmemorytype.CU_MEMORYTYPE_DEVICE
    p.srcHost, p.srcPitch, p.srcXInBytes, p.srcY = source.ctypes.data, 40, 3, 1
    p.dstDevice, p.dstPitch, p.WidthInBytes, p.Height = pointer, pitch, 30, 5
    ok(cuda.cuMemcpy2D(p))
    target = np.full((6, 50), 7, np.uint8)
    q = T.CUDA_MEMCPY2D()
    q.srcMemoryType, q.dstMemoryType = T.CUmemorytype.CU_MEMORYTYPE_DEVICE, T.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    q.srcDevice, q.srcPitch, q.WidthInBytes, q.Height = pointer, pitch, 30, 5
    q.dstDevice, q.dstPitch, q.dstXInBytes, q.dstY = target.ctypes.data, 50, 11, 1
    ok(cuda.cuMemcpy2DAsync(q, 0))
    expected = np.full((6, 50), 7, np.uint8)
    expected[1:, 11:41] = source[1:6, 3:33]
    assert (target == expected).all()


def test_a_copy_of_zero_bytes_moves_nothing(cuda: Any) -> None:
    p = T.CUDA_MEMCPY2D()
    p.srcMemoryType, p.dstMemoryType = T.CUmemorytype.CU_MEMORYTYPE_DEVICE, T.CUmemorytype.CU_MEMORYTYPE_HOST
    target = np.full(4, 7, np.uint8)
    p.srcDevice, p.dstHost, p.Height = ok(cuda.cuMemAlloc(16)), target.ctypes.data, 4
    ok(cuda.cuMemcpy2D(p))
    assert (target == 7).all()


def test_properties_and_access_lists_arrive_as_they_were_sent(cuda: Any) -> None:
    prop = T.CUmemAllocationProp()
    prop.type = T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = T.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
    handle = ok(cuda.cuMemCreate(4 << 20, prop, 0))
    assert ok(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id == 1
    address = ok(cuda.cuMemAddressReserve(4 << 20, 0, 0, 0))
    ok(cuda.cuMemMap(address, 4 << 20, 0, handle, 0))
    access = [T.CUmemAccessDesc() for _ in range(2)]
    for device, item in enumerate(access):
        item.location.type, item.location.id = prop.location.type, device
        item.flags = T.CUmemAccess_flags(3 if device else 1)
    ok(cuda.cuMemSetAccess(address, 4 << 20, access, 2))
    assert [ok(cuda.cuMemGetAccess(item.location, address)) for item in access] == [1, 3]
    assert type(ok(cuda.cuMemRetainAllocationHandle(address))) is T.CUmemGenericAllocationHandle
    with pytest.raises(RuntimeError, match="too small"):
        cuda.cuMemSetAccess(address, 4 << 20, access, 3)


@pytest.mark.parametrize("kind", ["plain", "pinned", "pool"])
def test_attributes_of_pointers_arrive_as_they_were_sent(machine: Machine, cuda: Any, kind: str) -> None:
    """Results have the values and types of a direct call."""
    plain = machine.driver
    pointer = {
        "plain": lambda: ok(cuda.cuMemAlloc(64)),
        "pinned": lambda: ok(cuda.cuMemHostAlloc(64, 0)),
        "pool": lambda: ok(cuda.cuMemAllocAsync(64, 0)),
    }[kind]()
    compared = 0
    known = list(T.CUpointer_attribute)
    for attribute in known:
        here, there = plain.cuPointerGetAttribute(attribute, pointer), cuda.cuPointerGetAttribute(attribute, pointer)
        assert here[0] == there[0]
        if here[0] == 0:
            compared += 1
            assert type(there[1]) is type(here[1]) or attribute.name.endswith("IS_GPU_DIRECT_RDMA_CAPABLE")
            assert int(here[1]) == int(there[1])
    assert compared > 10
    pair = (len(known), known, pointer)
    both = ok(plain.cuPointerGetAttributes(*pair)), ok(cuda.cuPointerGetAttributes(*pair))
    assert [int(v) for v in both[0]] == [int(v) for v in both[1]]
    assert [int(v) for v in ok(cuda.cuPointerGetAttributes(len(known), known, 12345))][6:8] == [0, 0]


def test_attributes_of_pools_arrive_as_they_were_sent(cuda: Any) -> None:
    pool, kind = ok(cuda.cuDeviceGetDefaultMemPool(0)), T.CUmemPool_attribute
    for attribute, value in (
        (kind.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, T.cuuint64_t(1 << 40)),
        (kind.CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 0),
    ):
        ok(cuda.cuMemPoolSetAttribute(pool, attribute, value))
        assert int(ok(cuda.cuMemPoolGetAttribute(pool, attribute))) == int(value)


# Code, graphs -------------------------------------------------------------------------------------------------------

AXPY = """
extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
extern "C" __global__ void nothing() {}
"""


def test_images_arrive_in_every_form(cuda: Any) -> None:
    text = ptx(AXPY)
    options = [T.CUjit_option.CU_JIT_MAX_REGISTERS]
    for image in (
        text,
        bytearray(text),
        np.frombuffer(text, np.uint8),
        ctypes.addressof(ctypes.c_char_p(text)) and text,
    ):
        assert ok(cuda.cuModuleGetFunctionCount(ok(cuda.cuModuleLoadData(image)))) == 2
        ok(cuda.cuModuleLoadDataEx(image, 1, options, [32]))
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    ok(cuda.cuModuleLoadData(address))
    library = ok(cuda.cuLibraryLoadData(text, [], [], 0, [], [], 0))
    assert {ok(cuda.cuKernelGetName(k)) for k in ok(cuda.cuLibraryEnumerateKernels(2, library))} == {
        b"axpy",
        b"nothing",
    }
    assert code(cuda.cuModuleLoadData(None)) == R.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="too small"):
        cuda.cuModuleLoadDataEx(text, 2, options, [32])


def test_file_names_are_sent_as_absolute_paths(cuda: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.ptx").write_bytes(ptx(AXPY))
    monkeypatch.chdir(tmp_path)
    out = Outgoing()
    coder("cuModuleLoad").write_call(out, (b"module.ptx",), Loopback(None))
    assert str(tmp_path / "module.ptx").encode() in b"".join(out.parts)
    ok(cuda.cuModuleLoad(b"module.ptx"))


def test_parameters_and_configurations_arrive_in_every_form(cuda: Any) -> None:
    module = ok(cuda.cuModuleLoadData(ptx(AXPY)))
    f = ok(cuda.cuModuleGetFunction(module, b"axpy"))
    x, y = ok(cuda.cuMemAlloc(400)), ok(cuda.cuMemAlloc(400))
    ones = np.ones(100, np.float32)
    ok(cuda.cuMemcpyHtoD(x, ones, 400))
    ok(cuda.cuMemcpyHtoD(y, ones, 400))
    values = [ctypes.c_float(2), ctypes.c_void_p(int(x)), ctypes.c_void_p(int(y)), ctypes.c_int(100)]
    pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(v) for v in values))
    kinds = (ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    block = bytearray(28)
    for offset, value in zip((0, 8, 16, 24), values, strict=True):
        block[offset : offset + ctypes.sizeof(value)] = bytes(value)
    held, size = (ctypes.c_char * 28).from_buffer(block), ctypes.c_size_t(28)
    extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(held), 2, ctypes.addressof(size), 0)
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 128, 1, 1, 0, 0, ((2.0, int(x), int(y), 100), kinds), 0))
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 128, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
    ok(cuda.cuLaunchCooperativeKernel(f, 1, 1, 1, 128, 1, 1, 0, 0, ctypes.addressof(pointers)))
    ok(cuda.cuLaunchKernel(f, 1, 1, 1, 128, 1, 1, 0, 0, 0, ctypes.addressof(extra)))
    config, attribute = T.CUlaunchConfig(), T.CUlaunchAttribute()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = 128
    attribute.id = T.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [attribute], 1
    ok(cuda.cuLaunchKernelEx(config, f, ctypes.addressof(pointers), 0))
    assert ok(cuda.cuOccupancyMaxActiveClusters(f, config)) > 0
    attribute.value.clusterDim.x = 3
    config.attrs = [attribute]
    assert code(cuda.cuLaunchKernelEx(config, f, ctypes.addressof(pointers), 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLaunchKernel(f, 1, 1, 1, 128, 1, 1, 0, 0, 0, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLaunchKernel(7, 1, 1, 1, 128, 1, 1, 0, 0, 0, 0)) == R.CUDA_ERROR_INVALID_HANDLE
    ok(cuda.cuLaunchKernel(ok(cuda.cuModuleGetFunction(module, b"nothing")), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    back = np.zeros(100, np.float32)
    ok(cuda.cuMemcpyDtoH(back, y, 400))
    assert (back == 11).all()


def test_graphs_and_captures_arrive_as_they_were_sent(cuda: Any) -> None:
    stream = ok(cuda.cuStreamCreate(1))
    pointer = ok(cuda.cuMemAlloc(64))
    ok(cuda.cuStreamBeginCapture(stream, T.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    for value in (1, 2):
        ok(cuda.cuMemsetD8Async(pointer, value, 64, stream))
    getter = cuda.cuStreamGetCaptureInfo_v3 if hasattr(T, "cuStreamGetCaptureInfo_v3") else cuda.cuStreamGetCaptureInfo
    status, ident, graph, tail, edges, count = ok(getter(stream))
    assert status == T.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert type(ident) is T.cuuint64_t and type(tail[0]) is T.CUgraphNode and type(edges[0]) is T.CUgraphEdgeData
    assert len(tail) == count == 1
    assert int(ok(cuda.cuStreamEndCapture(stream))) == int(graph)
    assert ok(cuda.cuGraphGetNodes(graph)) == ([], 2)
    nodes, count = ok(cuda.cuGraphGetNodes(graph, numNodes=3))
    assert count == 2 and [int(n) for n in nodes][2:] == [0] and int(nodes[1]) == int(tail[0])
    params = T.CUDA_GRAPH_INSTANTIATE_PARAMS()
    ok(cuda.cuGraphLaunch(ok(cuda.cuGraphInstantiateWithParams(graph, params)), stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert type(ok(cuda.cuThreadExchangeStreamCaptureMode(T.CUstreamCaptureMode(2)))) is T.CUstreamCaptureMode
