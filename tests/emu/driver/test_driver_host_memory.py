# SPDX-License-Identifier: Apache-2.0
"""Addresses of unmapped or too short host memory are errors, where the driver of a GPU would end the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine
from drvfuse.emu.bindings import T

FAR = 2**47 - 4096
PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 p, .param .u32 n) {
  .reg .u64 a; .reg .u32 b;
  ld.param.u64 a, [p]; ld.param.u32 b, [n]; st.global.u32 [a], b; ret;
}
"""
_NORESERVE = 0x4000  # MAP_NORESERVE of mmap: pages take memory only when they are used
INVALID = R.CUDA_ERROR_INVALID_VALUE


@pytest.fixture
def pointer(cuda: Any) -> Any:
    primary(cuda)
    return ok(cuda.cuMemAlloc(4096))


@pytest.fixture
def constant() -> Any:
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8)


def test_copies_check_the_first_and_the_last_byte(machine: Machine, cuda: Any, pointer: Any, constant: Any) -> None:
    for address in (0, 8, FAR, 2**64 - 1):
        assert code(cuda.cuMemcpyHtoD(pointer, address, 16)) == INVALID
        assert code(cuda.cuMemcpyDtoHAsync(address, pointer, 16, 0)) == INVALID
        assert code(cuda.cuMemcpy(pointer, address, 16)) == INVALID
    ok(cuda.cuMemcpyHtoD(pointer, constant.ctypes.data, 4096))
    assert code(cuda.cuMemcpyDtoH(constant.ctypes.data, pointer, 4096)) == INVALID
    p = T.CUDA_MEMCPY2D()
    p.srcMemoryType, p.dstMemoryType = T.CUmemorytype.CU_MEMORYTYPE_HOST, T.CUmemorytype.CU_MEMORYTYPE_DEVICE
    p.srcHost, p.dstDevice, p.WidthInBytes, p.Height = FAR, pointer, 16, 4
    assert code(cuda.cuMemcpy2D(p)) == INVALID and code(cuda.cuMemcpy2D(None)) == INVALID
    assert code(cuda.cuMemHostRegister(FAR, 4096, 0)) == INVALID
    assert machine.reports == []


def test_a_buffer_that_is_shorter_than_the_copy_is_reported(machine: Machine, cuda: Any, pointer: Any) -> None:
    short = np.zeros(10, np.uint32)
    assert code(cuda.cuMemcpyDtoH(short, pointer, 41)) == INVALID
    (report,) = machine.reports
    assert report.kind == "out_of_bounds"
    assert report.message == "cuMemcpyDtoH: 'dstHost' is a buffer of 40 bytes, and the call needs 41"
    ok(cuda.cuMemcpyDtoH(short, pointer, 40))


def test_images_are_read_no_further_than_their_end(cuda: Any, pointer: Any, constant: Any) -> None:
    assert code(cuda.cuModuleLoadData(FAR)) == INVALID
    assert code(cuda.cuModuleLoadData(constant.ctypes.data)) == R.CUDA_ERROR_INVALID_IMAGE
    header = np.frombuffer(bytearray(b"\x50\xed\x55\xba\1\0\x10\0" + (2**50).to_bytes(8, "little")), np.uint8)
    assert code(cuda.cuModuleLoadData(header.ctypes.data)) == INVALID


def test_missing_parameters_launch_nothing(cuda: Any, pointer: Any) -> None:
    f = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(PTX)), b"kernel"))
    number, place = ctypes.c_uint32(7), ctypes.c_uint64(int(pointer))
    good, size = [ctypes.addressof(place), ctypes.addressof(number)], ctypes.c_size_t(12)

    def launch(params: Any, extra: Any = 0) -> Any:
        return code(cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, params, extra))

    for pointers in ([good[0], 0], [FAR, good[1]], [good[0], 2**64 - 2]):
        assert launch(np.array(pointers, np.uint64)) == INVALID
    for params in (FAR, 8, 0, None, ((1,), (ctypes.c_int,))):
        assert launch(params) == INVALID
    block = (ctypes.c_uint64 * 2)(int(pointer), 7)
    for extra in (
        *([1, FAR, 2, ctypes.addressof(size), 0], [1, ctypes.addressof(block), 2, FAR, 0]),
        *([5, 0, 0], [1, ctypes.addressof(block), 0]),
    ):
        assert launch(0, np.array(extra, np.uint64).ctypes.data) == INVALID
    assert launch(0, FAR) == INVALID
    ok(cuda.cuMemsetD8(pointer, 0, 16))
    assert launch(np.array(good, np.uint64)) == R.CUDA_SUCCESS
    found = np.zeros(1, np.uint32)
    ok(cuda.cuMemcpyDtoH(found, pointer, 4))
    assert found[0] == 7


def test_addresses_that_are_not_code_are_never_called(cuda: Any, pointer: Any, constant: Any) -> None:
    for address in (FAR, 7, constant.ctypes.data, int(pointer)):
        assert code(cuda.cuLaunchHostFunc(0, address, 0)) == INVALID
        assert code(cuda.cuOccupancyMaxPotentialBlockSize(0, address, 0, 0)) == INVALID


class Nowhere:
    """An object with `getPtr`, like the structures of the bindings; the address that it returns is not mapped."""

    def getPtr(self) -> int:
        return 5


def test_structures_at_unmapped_addresses_are_refused(cuda: Any, pointer: Any) -> None:
    graph = ok(cuda.cuGraphCreate(0))
    assert code(cuda.cuGraphAddMemsetNode(graph, None, 0, T.CUDA_MEMSET_NODE_PARAMS(5), 0)) == INVALID
    assert code(cuda.cuMemcpy2D(T.CUDA_MEMCPY2D(FAR))) == INVALID
    assert code(cuda.cuIpcOpenMemHandle(T.CUipcMemHandle(5), 0)) == INVALID
    assert code(cuda.cuLaunchKernelEx(T.CUlaunchConfig(5), 0, 0, 0)) == INVALID
    assert code(cuda.cuMemPoolSetAccess(0, [T.CUmemAccessDesc(5)], 1)) == INVALID
    pool, attribute = ok(cuda.cuDeviceGetDefaultMemPool(0)), T.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    assert code(cuda.cuMemPoolSetAttribute(pool, attribute, Nowhere())) == INVALID


def test_addresses_of_kernel_parameters_are_checked(cuda: Any, pointer: Any) -> None:
    """The parameter is an object without memory, or a small structure after which nothing is mapped."""

    class Small(ctypes.Structure):
        _fields_ = (("value", ctypes.c_int32),)

    function = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(PTX)), b"kernel"))
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    small = Small.from_address(start + mmap.PAGESIZE - 4)
    small.value = 77

    def launch(value: Any) -> Any:
        return cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((pointer, value), (None, None)), 0)

    assert code(launch(Nowhere())) == INVALID
    ok(launch(small))
    found = np.zeros(1, np.uint32)
    ok(cuda.cuMemcpyDtoH(found, pointer, 4))
    assert found[0] == 77
    assert protect(start + mmap.PAGESIZE, mmap.PAGESIZE, 3) == 0


@pytest.mark.parametrize("way", ["a graph", "registered memory"])
def test_host_memory_freed_before_a_queued_copy_is_reported(
    machine: Machine, cuda: Any, pointer: Any, way: str
) -> None:
    stream, memory = ok(cuda.cuStreamCreate(1)), mmap.mmap(-1, 4096)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    if way == "a graph":
        graph, p = ok(cuda.cuGraphCreate(0)), T.CUDA_MEMCPY3D()
        p.srcMemoryType, p.dstMemoryType = T.CUmemorytype.CU_MEMORYTYPE_HOST, T.CUmemorytype.CU_MEMORYTYPE_DEVICE
        p.srcHost, p.dstDevice, p.WidthInBytes, p.Height, p.Depth = address, pointer, 64, 1, 1
        ok(cuda.cuGraphAddMemcpyNode(graph, None, 0, p, 0))
        ok(cuda.cuGraphLaunch(ok(cuda.cuGraphInstantiate(graph, 0)), stream))
    else:
        ok(cuda.cuMemHostRegister(address, 4096, 0))
        ok(cuda.cuMemcpyHtoDAsync(pointer, address, 64, stream))
    memory.close()
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    (report,) = machine.reports
    assert report.kind == "out_of_bounds" and "host memory that is not mapped any more" in report.message


def test_huge_ranges_are_checked_without_touching_their_pages(machine: Machine, cuda: Any, pointer: Any) -> None:
    """A range of the machine's addresses that is mostly unallocated cannot be registered; mapped pages of the program
    can.
    """
    for address in (int(pointer), int(pointer) + (1 << 30)):
        assert code(cuda.cuMemHostRegister(address, 1 << 36, 0)) != R.CUDA_SUCCESS
    assert code(cuda.cuMemHostRegister(int(pointer) + (1 << 30), 4096, 0)) == INVALID
    pages = mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    before = _resident()
    ok(cuda.cuMemHostRegister(address, 1 << 36, 0))
    assert code(cuda.cuMemcpyHtoD(pointer, address, 1 << 36)) == INVALID
    assert _resident() - before < 1 << 28
    ok(cuda.cuMemHostUnregister(address))


def _resident() -> int:
    """Resident bytes of this process, page tables included."""
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return sum(int(found[key].split()[0]) for key in ("VmRSS", "VmPTE")) << 10
