# SPDX-License-Identifier: Apache-2.0
"""Memory that several processes of a machine use: VMM and multicast objects by descriptors, and shared host memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from emu.driver_helpers import R, code, function, ok, primary
from emu.multicast_helpers import PIECE, access, mapped, memory_prop, object_prop

from drvfuse.emu import Machine, Process

KINDS = types.CUmemAllocationHandleType
DESCRIPTOR, FABRIC = KINDS.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, KINDS.CU_MEM_HANDLE_TYPE_FABRIC
SOURCE = """
extern "C" __global__ void copy(int* to, const int* from) { to[threadIdx.x] = from[threadIdx.x]; }
extern "C" __global__ void broadcast(int* to, const int* from) {
    asm volatile("multimem.st.weak.global.u32 [%0], %1;" :: "l"(to + threadIdx.x), "r"(from[threadIdx.x]) : "memory");
}
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=2) as made:
        yield made


@pytest.fixture
def pair(machine: Machine) -> tuple[Process, Process]:
    """Processes a and b, with contexts on devices 0 and 1."""
    found = machine.process("a"), machine.process("b")
    for device, process in enumerate(found):
        ok(process.driver.cuInit(0))
        primary(process.driver, device)
    return found


def exportable(device: int) -> Any:
    prop = memory_prop(device)
    prop.requestedHandleTypes = DESCRIPTOR
    return prop


def exported(cuda: Any, device: int = 0) -> tuple[Any, int]:
    """New memory: its handle and an exported descriptor."""
    handle = ok(cuda.cuMemCreate(PIECE, exportable(device), 0))
    return handle, ok(cuda.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0))


def imported(cuda: Any, descriptor: int) -> Any:
    handle = ok(cuda.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR))
    os.close(descriptor)
    return handle


def run(cuda: Any, name: str, *pointers: int, threads: int = 64) -> Any:
    """Launch a kernel and wait for it. Returns the CUresult of the wait."""
    kernel = function(cuda, SOURCE, name)
    params = pointers, (ctypes.c_void_p,) * len(pointers)
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, params, 0))
    return code(cuda.cuCtxSynchronize())


def ints(rng: np.random.Generator, count: int = 64) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, count, np.int32)


def read(cuda: Any, address: int, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    ok(cuda.cuMemcpyDtoH(out, address, out.nbytes))
    return out


# Memory of cuMemCreate -----------------------------------------------------------------------------------------------


def test_imported_memory_is_the_memory_of_the_exporter(pair: tuple[Process, Process], rng: np.random.Generator) -> None:
    a, b = (process.driver for process in pair)
    handle, descriptor = exported(a)
    theirs = imported(b, descriptor)
    at_a, at_b = mapped(a, handle, PIECE, 2), mapped(b, theirs, PIECE, 2)
    assert int(theirs) != int(handle) and at_a != at_b
    values = ints(rng)
    ok(a.cuMemcpyHtoD(at_a, values, values.nbytes))
    local = mapped(b, ok(b.cuMemCreate(PIECE, memory_prop(1), 0)), PIECE, 2)
    assert run(b, "copy", local, at_b) == R.CUDA_SUCCESS
    np.testing.assert_array_equal(read(b, local, values), values)
    assert run(b, "copy", at_b + 4096, local) == R.CUDA_SUCCESS
    np.testing.assert_array_equal(read(a, at_a + 4096, values), values)


def test_access_is_set_by_each_process_for_its_own_mapping(machine: Machine, pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    handle, descriptor = exported(a)
    at_a = mapped(a, handle, PIECE, 2)
    ok(a.cuMemsetD8(at_a, 1, PIECE))
    at_b = ok(b.cuMemAddressReserve(PIECE, 0, 0, 0))
    ok(b.cuMemMap(at_b, PIECE, 0, imported(b, descriptor), 0))
    assert run(b, "copy", int(at_b), int(at_b)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[0].kind == "no_access"
    assert run(a, "copy", at_a, at_a) == R.CUDA_SUCCESS


def test_each_export_is_a_descriptor_of_its_own_that_does_not_survive_exec(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    handle, first = exported(a)
    second = ok(a.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0))
    assert first != second and not os.get_inheritable(first)
    os.close(first)
    ok(b.cuMemRelease(imported(b, second)))


def test_a_descriptor_travels_through_a_socket(pair: tuple[Process, Process], rng: np.random.Generator) -> None:
    a, b = (process.driver for process in pair)
    handle, descriptor = exported(a)
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [descriptor])
        os.close(descriptor)
        received = socket.recv_fds(other, 1, 1)[1][0]
    values = ints(rng)
    ok(a.cuMemcpyHtoD(mapped(a, handle, PIECE, 1), values, values.nbytes))
    np.testing.assert_array_equal(read(b, mapped(b, imported(b, received), PIECE, 2), values), values)


@pytest.mark.parametrize("last", ["handle", "mapping", "import", "descriptor", "copy"])
def test_memory_lives_until_nothing_holds_it(machine: Machine, pair: tuple[Process, Process], last: str) -> None:
    a, b = (process.driver for process in pair)
    before = machine.held()
    handle, descriptor = exported(a)
    address, holds = mapped(a, handle, PIECE, 1), {}
    holds["handle"] = lambda: ok(a.cuMemRelease(handle))
    holds["mapping"] = lambda: (ok(a.cuMemUnmap(address, PIECE)), ok(a.cuMemAddressFree(address, PIECE)))
    theirs = ok(b.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR))
    holds["import"] = lambda: ok(b.cuMemRelease(theirs))
    copy = os.dup(descriptor)
    holds["descriptor"] = lambda: os.close(descriptor)
    holds["copy"] = lambda: os.close(copy)
    for name in [name for name in holds if name != last]:
        holds[name]()
    assert machine.held()["physical"] == 1 and machine.held()["device_bytes"] == PIECE
    holds[last]()
    assert machine.held() == before


def test_memory_held_only_by_a_descriptor_is_freed_when_it_is_closed() -> None:
    with Machine(devices=1, memory_bytes=2 * PIECE) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        handle, descriptor = exported(cuda)
        ok(cuda.cuMemRelease(handle))
        assert code(cuda.cuMemAlloc(2 * PIECE)) == R.CUDA_ERROR_OUT_OF_MEMORY
        os.close(descriptor)
        ok(cuda.cuMemAlloc(2 * PIECE))


def test_memory_outlives_the_process_that_made_it(machine: Machine, pair: tuple[Process, Process]) -> None:
    (a, b), values = pair, np.arange(64, dtype=np.int32)
    handle, descriptor = exported(a.driver)
    ok(a.driver.cuMemcpyHtoD(mapped(a.driver, handle, PIECE, 1), values, values.nbytes))
    address = mapped(b.driver, imported(b.driver, descriptor), PIECE, 2)
    a.close()
    assert run(b.driver, "copy", address + 4096, address) == R.CUDA_SUCCESS
    np.testing.assert_array_equal(read(b.driver, address + 4096, values), values)
    assert machine.held()["physical"] == 1
    b.close()
    assert machine.held()["physical"] == machine.held()["device_bytes"] == 0


def test_imported_memory_has_the_properties_of_the_exported_memory(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    handle = imported(b, exported(a)[1])
    prop = ok(b.cuMemGetAllocationPropertiesFromHandle(handle))
    assert (prop.location.id, prop.requestedHandleTypes) == (0, DESCRIPTOR)
    attribute = types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    assert ok(b.cuPointerGetAttribute(attribute, mapped(b, handle, PIECE, 1))) == int(DESCRIPTOR)


def test_a_retained_handle_belongs_to_its_process(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    handle, descriptor = exported(a)
    mapped(a, handle, PIECE, 1)
    theirs = imported(b, descriptor)
    again = ok(b.cuMemRetainAllocationHandle(mapped(b, theirs, PIECE, 1)))
    assert int(again) == int(theirs) != int(handle)


def test_unrelated_file_descriptors_are_refused(pair: tuple[Process, Process], machine: Machine) -> None:
    cuda = pair[1].driver
    with open("/dev/null") as other:
        for wrong in (other.fileno(), 1 << 20, (1 << 32) - 1):
            assert code(cuda.cuMemImportFromShareableHandle(wrong, DESCRIPTOR)) == R.CUDA_ERROR_INVALID_VALUE
            assert machine.reports[-1].kind == "descriptor"
    with pytest.raises(TypeError, match="argument is of type <class 'int'>"):
        cuda.cuMemImportFromShareableHandle(-1, DESCRIPTOR)
    with Machine(devices=1) as elsewhere:
        ok(elsewhere.driver.cuInit(0))
        _, foreign = exported(elsewhere.driver)
        assert code(cuda.cuMemImportFromShareableHandle(foreign, DESCRIPTOR)) == R.CUDA_ERROR_INVALID_VALUE
        os.close(foreign)


def test_other_kinds_of_handles_are_refused_as_without_an_imex_channel(pair: tuple[Process, Process]) -> None:
    cuda = pair[0].driver
    fabric, windows, plain = memory_prop(0), memory_prop(0), ok(cuda.cuMemCreate(PIECE, memory_prop(0), 0))
    fabric.requestedHandleTypes, windows.requestedHandleTypes = FABRIC, KINDS.CU_MEM_HANDLE_TYPE_WIN32
    assert code(cuda.cuMemCreate(PIECE, fabric, 0)) == R.CUDA_ERROR_NOT_PERMITTED
    assert code(cuda.cuMemCreate(PIECE, windows, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    assert code(cuda.cuMemImportFromShareableHandle(0, FABRIC)) == R.CUDA_ERROR_NOT_PERMITTED
    assert code(cuda.cuMemExportToShareableHandle(plain, DESCRIPTOR, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    handle, descriptor = exported(cuda)
    assert code(cuda.cuMemExportToShareableHandle(handle, FABRIC, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    assert code(cuda.cuMemExportToShareableHandle(handle, DESCRIPTOR, 1)) == R.CUDA_ERROR_INVALID_VALUE
    os.close(descriptor)
    names = types.CUdevice_attribute
    assert ok(cuda.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0)) == 1


def test_a_closed_machine_keeps_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    machine = Machine(devices=1)
    ok(machine.driver.cuInit(0))
    for _ in range(3):
        os.close(exported(machine.driver)[1])
    _, kept = exported(machine.driver)
    machine.close()
    os.close(kept)
    assert len(os.listdir("/proc/self/fd")) == before


# Multicast -----------------------------------------------------------------------------------------------------------


def test_a_multicast_object_is_made_by_several_processes(
    machine: Machine, pair: tuple[Process, Process], rng: np.random.Generator
) -> None:
    """Each of two processes adds its device, binds its own memory and maps the object. A multicast store by one process
    reaches the memory of both.
    """
    prop = object_prop(2)
    prop.handleTypes = int(DESCRIPTOR)
    a, b = (process.driver for process in pair)
    handles = [ok(a.cuMulticastCreate(prop))]
    handles.append(imported(b, ok(a.cuMemExportToShareableHandle(handles[0], DESCRIPTOR, 0))))
    for device, (cuda, handle) in enumerate(zip((a, b), handles, strict=True)):
        ok(cuda.cuMulticastAddDevice(handle, device))
    memories, objects = [], []
    for device, (cuda, handle) in enumerate(zip((a, b), handles, strict=True)):
        memory = ok(cuda.cuMemCreate(PIECE, memory_prop(device), 0))
        ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0))
        address = ok(cuda.cuMemAddressReserve(PIECE, 0, 0, 0))
        ok(cuda.cuMemMap(address, PIECE, 0, handle, 0))
        ok(cuda.cuMemSetAccess(address, PIECE, access(device), 1))
        memories.append(mapped(cuda, memory, PIECE, 2))
        objects.append(int(address))
    values = ints(rng)
    source = ok(b.cuMemAlloc(values.nbytes))
    ok(b.cuMemcpyHtoD(source, values, values.nbytes))
    assert run(b, "broadcast", objects[1], int(source)) == R.CUDA_SUCCESS
    for cuda, memory in zip((a, b), memories, strict=True):
        np.testing.assert_array_equal(read(cuda, memory, values), values)
    assert machine.held()["multicast"] == 1 and machine.held()["binds"] == 2
    pair[0].close()
    ok(b.cuMemsetD8(memories[1], 0, PIECE))
    assert run(b, "broadcast", objects[1], int(source)) == R.CUDA_SUCCESS  # the bind of the ended process persists
    np.testing.assert_array_equal(read(b, memories[1], values), values)
    pair[1].close()
    assert not any(machine.held().values())


def test_a_multicast_object_of_another_process_is_inaccessible(pair: tuple[Process, Process], machine: Machine) -> None:
    a, b = (process.driver for process in pair)
    handle = ok(a.cuMulticastCreate(object_prop(1)))
    ok(a.cuMulticastAddDevice(handle, 0))
    memory = ok(a.cuMemCreate(PIECE, memory_prop(0), 0))
    ok(a.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0))
    address = mapped(a, handle, PIECE, 1)
    source = ok(b.cuMemAlloc(256))
    ok(b.cuMemsetD8(source, 1, 256))
    assert run(b, "broadcast", address, int(source)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "no_access"


# Shared host memory --------------------------------------------------------------------------------------------------


class SharedFile:
    """A file that exists in memory alone, and a mapping of it."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("test") if descriptor is None else os.dup(descriptor)
        os.ftruncate(self.descriptor, nbytes)
        self._memory = mmap.mmap(self.descriptor, nbytes)
        self.array = np.frombuffer(self._memory, np.int32)
        self.address = int(self.array.ctypes.data)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


@pytest.mark.parametrize("offset", [0, 4096, 70_000])
def test_processes_register_memory_of_one_file(
    pair: tuple[Process, Process], rng: np.random.Generator, offset: int
) -> None:
    """Each process has its own mapping, at an address that the driver returns, with bounds exact to the byte."""
    nbytes, values = 200_000, ints(rng)
    one = SharedFile(2 * nbytes)
    other = SharedFile(2 * nbytes, one.descriptor)
    pointers = []
    for process, memory in zip(pair, (one, other), strict=True):
        cuda = process.driver
        ok(cuda.cuMemHostRegister(memory.address + offset, nbytes, 0))
        memory.close()  # the registration no longer needs the mapping
        pointers.append(int(ok(cuda.cuMemHostGetDevicePointer(memory.address + offset + 400, 0))))
    a, b = (process.driver for process in pair)
    start = (offset + 400) // 4
    one.array[start : start + 64] = values
    assert run(b, "copy", pointers[1] + nbytes - 800, pointers[1]) == R.CUDA_SUCCESS
    end = (offset + nbytes - 400) // 4
    np.testing.assert_array_equal(other.array[end : end + 64], values)
    assert run(a, "copy", pointers[0], pointers[0] + nbytes - 400 - 256) == R.CUDA_SUCCESS
    assert run(a, "copy", pointers[0], pointers[0] + nbytes - 400 - 252) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert run(b, "copy", pointers[1], pointers[1] - 404) == R.CUDA_ERROR_ILLEGAL_ADDRESS


def test_a_registration_belongs_to_one_process(pair: tuple[Process, Process], machine: Machine) -> None:
    a, b = (process.driver for process in pair)
    memory = SharedFile(8192)
    ok(a.cuMemHostRegister(memory.address, 8192, 2))
    pointer = int(ok(a.cuMemHostGetDevicePointer(memory.address, 0)))
    assert code(b.cuMemHostGetDevicePointer(memory.address, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert run(b, "copy", pointer, pointer) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert run(a, "copy", pointer, pointer + 4096) == R.CUDA_SUCCESS
    memory.close()
    assert machine.held()["allocations"] == 1


def test_registered_memory_that_is_unregistered_faults(pair: tuple[Process, Process], machine: Machine) -> None:
    cuda, memory = pair[0].driver, SharedFile(8192)
    before = machine.held()
    ok(cuda.cuMemHostRegister(memory.address, 8192, 0))
    pointer = int(ok(cuda.cuMemHostGetDevicePointer(memory.address, 0)))
    assert code(cuda.cuMemHostRegister(memory.address, 10, 0)) == R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    assert code(cuda.cuMemFreeHost(pointer)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemHostUnregister(pointer)) == R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    ok(cuda.cuMemHostUnregister(memory.address))
    assert machine.held() == before
    assert run(cuda, "copy", pointer, pointer) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert machine.reports[-1].kind == "use_after_free"
    memory.array[:] = 5  # the mapping of the host is unchanged
    memory.close()


def test_registered_memory_has_two_addresses(pair: tuple[Process, Process]) -> None:
    cuda, memory = pair[0].driver, SharedFile(8192)
    ok(cuda.cuMemHostRegister(memory.address, 8192, 0))
    pointer = int(ok(cuda.cuMemHostGetDevicePointer(memory.address + 16, 0)))
    kind = types.CUpointer_attribute
    for address in (memory.address + 16, pointer):
        assert ok(cuda.cuPointerGetAttribute(kind.CU_POINTER_ATTRIBUTE_HOST_POINTER, address)) == memory.address + 16
        assert int(ok(cuda.cuPointerGetAttribute(kind.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address))) == pointer
    same = types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    assert ok(cuda.cuDeviceGetAttribute(same, 0)) == 0
    memory.close()


def test_copies_take_either_address_of_registered_memory(
    pair: tuple[Process, Process], rng: np.random.Generator
) -> None:
    cuda, memory, values = pair[0].driver, SharedFile(8192), ints(rng, 1024)
    ok(cuda.cuMemHostRegister(memory.address, 8192, 0))
    pointer = int(ok(cuda.cuMemHostGetDevicePointer(memory.address, 0)))
    device = int(ok(cuda.cuMemAlloc(4096)))
    memory.array[:1024] = values
    ok(cuda.cuMemcpyHtoDAsync(device, memory.address, 4096, 0))
    ok(cuda.cuMemcpyDtoDAsync(pointer + 4096, device, 4096, 0))
    ok(cuda.cuStreamSynchronize(0))
    np.testing.assert_array_equal(memory.array[1024:], values)
    memory.close()


def test_private_memory_is_mapped_to_the_device_on_request(
    pair: tuple[Process, Process], rng: np.random.Generator
) -> None:
    """Other data in the same pages keeps its bytes and can be registered too, and the mapping is unchanged."""
    cuda, room = pair[0].driver, ints(rng, 3000 + 1024)
    skipped = (0xE00 - room.ctypes.data) % 4096 // 4  # the second range lies in the last page of the first
    whole = room[skipped : skipped + 3000]
    wanted, address = whole.copy(), int(whole.ctypes.data)
    open_before = len(os.listdir("/proc/self/fd"))
    for first, last in ((5, 1500), (1500, 2100)):
        ok(cuda.cuMemHostRegister(address + 4 * first, 4 * (last - first), 2))
        pointer = int(ok(cuda.cuMemHostGetDevicePointer(address + 4 * first, 0)))
        ok(cuda.cuMemsetD32(pointer + 4, first, 3))
        ok(cuda.cuCtxSynchronize())
        wanted[first + 1 : first + 4] = first
        np.testing.assert_array_equal(whole, wanted)
        whole[first] = wanted[first] = 77
        found = np.zeros(1, whole.dtype)
        ok(cuda.cuMemcpyDtoH(found, pointer, 4))
        assert found[0] == 77
    assert code(cuda.cuMemHostUnregister(address + 24)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuMemHostRegister(address + 24, 4, 2)) == R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    for first in (5, 1500):
        ok(cuda.cuMemHostUnregister(address + 4 * first))
    assert len(os.listdir("/proc/self/fd")) == open_before
    np.testing.assert_array_equal(whole, wanted)


def test_memory_that_grew_in_place_after_a_registration_is_still_accessible(
    pair: tuple[Process, Process],
) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
    libc.realloc.argtypes, libc.free.argtypes = (ctypes.c_void_p, ctypes.c_size_t), (ctypes.c_void_p,)
    cuda, address = pair[0].driver, libc.malloc(1 << 20)
    ok(cuda.cuMemHostRegister(address, 1 << 20, 2))
    ok(cuda.cuMemHostUnregister(address))
    address = libc.realloc(address, 8 << 20)
    ctypes.memset(address, 7, 8 << 20)
    assert ctypes.string_at(address + (8 << 20) - 2, 2) == b"\7\7"
    libc.free(address)


@pytest.mark.parametrize("kind", ["anonymous", "read only", "no descriptor"])
def test_memory_registered_without_the_flag_is_not_on_the_device(pair: tuple[Process, Process], kind: str) -> None:
    cuda = pair[0].driver
    if kind == "anonymous":
        memory = mmap.mmap(-1, 4096)
    else:
        file = os.memfd_create("test")
        os.ftruncate(file, 4096)
        rights = mmap.PROT_READ if kind == "read only" else mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(file, 4096, mmap.MAP_SHARED, rights)
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    if kind == "no descriptor":
        part = pair[0].file_behind(address, 4096)
        assert part is not None
        os.close(part.descriptor)
        # As if no descriptor were open: mmap.mmap keeps one, but other ways of mapping need not.
        pair[0].file_behind = lambda address, nbytes: None
    assert code(cuda.cuMemHostRegister(address, 4096, 2)) == R.CUDA_ERROR_NOT_SUPPORTED
    ok(cuda.cuMemHostRegister(address, 4096, 0))
    assert code(cuda.cuMemHostGetDevicePointer(address, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    ok(cuda.cuMemHostUnregister(address))


def test_memory_beyond_the_end_of_its_file_is_not_mapped(pair: tuple[Process, Process]) -> None:
    """A kernel that accessed such memory would end the whole process."""
    file = os.memfd_create("short")
    os.ftruncate(file, 8192)
    memory = mmap.mmap(file, 8192)
    os.ftruncate(file, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cuda = pair[0].driver
    assert code(cuda.cuMemHostRegister(address, 8192, 2)) == R.CUDA_ERROR_NOT_SUPPORTED
    ok(cuda.cuMemHostRegister(address, 4096, 2))
    os.close(file)
