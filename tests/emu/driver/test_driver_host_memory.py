# SPDX-License-Identifier: Apache-2.0
"""Addresses of host memory that is not there, or too short: a result, where the driver of a GPU ends the process."""

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
INVALID = R.CUDA_ERROR_INVALID_VALUE


@pytest.fixture
def pointer(cuda: Any) -> Any:
    primary(cuda)
    return ok(cuda.cuMemAlloc(4096))


@pytest.fixture
def constant() -> Any:
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8)


def test_copies_look_at_both_ends(machine: Machine, cuda: Any, pointer: Any, constant: Any) -> None:
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
    assert report.message == "cuMemcpyDtoH: 'dstHost' is a buffer of 40 bytes, and the call is about 41"
    ok(cuda.cuMemcpyDtoH(short, pointer, 40))


def test_images_are_read_as_far_as_they_go(cuda: Any, pointer: Any, constant: Any) -> None:
    assert code(cuda.cuModuleLoadData(FAR)) == INVALID
    assert code(cuda.cuModuleLoadData(constant.ctypes.data)) == R.CUDA_ERROR_INVALID_IMAGE
    header = np.frombuffer(bytearray(b"\x50\xed\x55\xba\1\0\x10\0" + (2**50).to_bytes(8, "little")), np.uint8)
    assert code(cuda.cuModuleLoadData(header.ctypes.data)) == INVALID


def test_parameters_that_are_not_there_launch_nothing(cuda: Any, pointer: Any) -> None:
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


def test_only_code_is_called(cuda: Any, pointer: Any, constant: Any) -> None:
    for address in (FAR, 7, constant.ctypes.data, int(pointer)):
        assert code(cuda.cuLaunchHostFunc(0, address, 0)) == INVALID
        assert code(cuda.cuOccupancyMaxPotentialBlockSize(0, address, 0, 0)) == INVALID
