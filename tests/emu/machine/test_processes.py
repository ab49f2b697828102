# SPDX-License-Identifier: Apache-2.0
"""Several processes on one machine: the state of each process, the owner of an address, and the end of a process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from emu.driver_helpers import R, code, function, ok, primary
from emu.multicast_helpers import access, located, mapped, memory_prop

import drvfuse as df
from drvfuse.emu import Machine, Process

GRANULARITY = 2 << 20
SOURCE = """
extern "C" __global__ void copy(int* to, const int* from) { to[threadIdx.x] = from[threadIdx.x]; }
extern "C" __global__ void wait(volatile int* flag) { while (!*flag); }
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(devices=2) as made:
        yield made


@pytest.fixture
def pair(machine: Machine) -> tuple[Process, Process]:
    """Two processes, initialised."""
    found = machine.process("a"), machine.process("b")
    for process in found:
        ok(process.driver.cuInit(0))
    return found


def device_array(cuda: Any, values: np.ndarray) -> int:
    """Values in memory of the current device."""
    pointer = ok(cuda.cuMemAlloc(values.nbytes))
    ok(cuda.cuMemcpyHtoD(pointer, values, values.nbytes))
    return int(pointer)


def launch(cuda: Any, kernel: Any, *pointers: int, threads: int = 32) -> Any:
    return cuda.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, (pointers, (ctypes.c_void_p,) * len(pointers)), 0)[
        0
    ]


# Handles and state ---------------------------------------------------------------------------------------------------


def test_each_process_is_initialised_by_its_own_first_call(machine: Machine) -> None:
    a, b = machine.process(), machine.process()
    ok(a.driver.cuInit(0))
    assert code(b.driver.cuDeviceGetCount()) == R.CUDA_ERROR_NOT_INITIALIZED
    assert code(machine.driver.cuDeviceGetCount()) == R.CUDA_ERROR_NOT_INITIALIZED
    assert ok(a.driver.cuDeviceGetCount()) == 2


def test_handles_of_another_process_are_invalid(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    context, _ = primary(a), primary(b)
    stream, event = ok(a.cuStreamCreate(1)), ok(a.cuEventCreate(0))
    pool = ok(a.cuDeviceGetDefaultMemPool(0))
    memory = ok(a.cuMemCreate(GRANULARITY, memory_prop(0), 0))
    kernel = function(a, SOURCE, "copy")
    assert code(b.cuCtxSetCurrent(context)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert code(b.cuStreamSynchronize(stream)) == R.CUDA_ERROR_INVALID_HANDLE
    assert code(b.cuEventSynchronize(event)) == R.CUDA_ERROR_INVALID_HANDLE
    assert code(b.cuMemAllocFromPoolAsync(64, pool, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(b.cuMemRelease(memory)) == R.CUDA_ERROR_INVALID_VALUE
    assert launch(b, kernel, 0, 0) == R.CUDA_ERROR_INVALID_HANDLE
    assert int(ok(b.cuDeviceGetDefaultMemPool(0))) != int(pool)
    assert int(ok(b.cuCtxGetCurrent())) != int(context)


def test_primary_contexts_are_counted_by_each_process(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    primary(a)
    assert ok(a.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    assert ok(b.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    primary(b)
    ok(a.cuDevicePrimaryCtxRelease(0))
    assert ok(a.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    ok(b.cuCtxSynchronize())


def test_peer_access_of_one_process_gives_another_none(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    contexts = [[ok(cuda.cuDevicePrimaryCtxRetain(d)) for d in range(2)] for cuda in (a, b)]
    for cuda, own in zip((a, b), contexts, strict=True):
        ok(cuda.cuCtxSetCurrent(own[0]))
    assert code(b.cuCtxEnablePeerAccess(contexts[0][1], 0)) == R.CUDA_ERROR_INVALID_CONTEXT
    ok(a.cuCtxEnablePeerAccess(contexts[0][1], 0))
    assert code(b.cuCtxDisablePeerAccess(contexts[1][1])) == R.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
    ok(b.cuCtxEnablePeerAccess(contexts[1][1], 0))


def test_an_illegal_call_invalidates_captures_of_its_own_process_alone(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    primary(a), primary(b)
    stream = ok(a.cuStreamCreate(1))
    ok(a.cuStreamBeginCapture(stream, a.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ok(b.cuMemAlloc(64))
    ok(a.cuStreamEndCapture(stream))


def test_injected_failures_affect_one_process_only(pair: tuple[Process, Process], machine: Machine) -> None:
    a, b = pair
    rule = a.inject("cuMemAlloc", R.CUDA_ERROR_OUT_OF_MEMORY)
    primary(a.driver), primary(b.driver)
    ok(b.driver.cuMemAlloc(64))
    assert rule.left == 1 and not machine.injected
    assert code(a.driver.cuMemAlloc(64)) == R.CUDA_ERROR_OUT_OF_MEMORY


def test_a_refusal_is_reported_to_the_refused_process(pair: tuple[Process, Process], machine: Machine) -> None:
    a, b = pair
    primary(a.driver)
    assert code(a.driver.cuMemFree(12345)) == R.CUDA_ERROR_INVALID_VALUE
    assert a.refusal is not None and b.refusal is None and machine.refusal is None


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", 7])
def test_a_name_is_a_printable_string(machine: Machine, name: Any, refused: Callable[..., None]) -> None:
    refused(lambda: machine.process(name), "name", "a printable string")


def test_two_live_processes_cannot_have_the_same_name(machine: Machine, refused: Callable[..., None]) -> None:
    with machine.process("worker"):
        refused(lambda: machine.process("worker"), "name", "no other live process")
    machine.process("worker")


def test_a_closed_machine_has_no_new_processes(machine: Machine) -> None:
    process = machine.process()
    machine.close()
    assert process.closed
    with pytest.raises(df.errors.ClosedError):
        machine.process()


# Addresses -----------------------------------------------------------------------------------------------------------


def test_processes_share_a_device(pair: tuple[Process, Process], rng: np.random.Generator) -> None:
    values = [rng.integers(-(2**31), 2**31, 32, np.int32) for _ in pair]
    found = []
    for process, given in zip(pair, values, strict=True):
        cuda = process.driver
        primary(cuda)
        pointers = device_array(cuda, np.zeros_like(given)), device_array(cuda, given)
        assert launch(cuda, function(cuda, SOURCE, "copy"), *pointers) == R.CUDA_SUCCESS
        found.append(pointers[0])
    for process, given, pointer in zip(pair, values, found, strict=True):
        out = np.empty_like(given)
        ok(process.driver.cuMemcpyDtoH(out, pointer, out.nbytes))
        np.testing.assert_array_equal(out, given)
    assert [record.process for record in pair[0].launches] == ["a", "b"]


@pytest.mark.parametrize("kind", ["cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc", "cuMemMap"])
@pytest.mark.parametrize("later", [False, True])
def test_a_kernel_faults_at_an_address_of_another_process(machine: Machine, kind: str, later: bool) -> None:
    """The owner allocates the memory before or (`later`) after the process of the kernel is made."""

    def allocate() -> int:
        if kind == "cuMemAllocAsync":
            return int(ok(cuda.cuMemAllocAsync(256, 0)))
        if kind == "cuMemMap":
            return mapped(cuda, ok(cuda.cuMemCreate(GRANULARITY, memory_prop(0), 0)), GRANULARITY, 2)
        return int(ok(cuda.cuMemAlloc(256) if kind == "cuMemAlloc" else cuda.cuMemHostAlloc(256, 0)))

    owner = machine.process("owner")
    cuda = owner.driver
    ok(cuda.cuInit(0))
    primary(cuda)
    theirs = 0 if later else allocate()
    stranger = machine.process("stranger")
    ok(stranger.driver.cuInit(0))
    primary(stranger.driver)
    theirs = theirs or allocate()
    mine = device_array(stranger.driver, np.arange(32, dtype=np.int32))
    kernel = function(stranger.driver, SOURCE, "copy")
    assert launch(stranger.driver, kernel, theirs, mine) == R.CUDA_SUCCESS
    assert code(stranger.driver.cuCtxSynchronize()) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    (report,) = machine.reports
    assert (report.kind, report.address) == ("no_access", theirs)
    assert "of process owner" in report.message
    ok(cuda.cuCtxSynchronize())
    assert owner.finding(0) is None
    assert stranger.finding(0) == report


def test_copies_and_fills_refuse_an_address_of_another_process(machine: Machine, pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    primary(a), primary(b)
    theirs, mine = device_array(a, np.arange(16, dtype=np.int32)), device_array(b, np.arange(16, dtype=np.int32))
    host = np.zeros(16, np.int32)
    for call in (
        lambda: b.cuMemcpyDtoD(mine, theirs, 64),
        lambda: b.cuMemcpyDtoDAsync(theirs, mine, 64, 0),
        lambda: b.cuMemcpyDtoH(host, theirs, 64),
        lambda: b.cuMemcpyHtoD(theirs, host, 64),
        lambda: b.cuMemcpy(theirs, mine, 64),
        lambda: b.cuMemsetD32(theirs, 0, 16),
        lambda: b.cuMemFree(theirs),
    ):
        assert code(call()) == R.CUDA_ERROR_INVALID_VALUE
        assert machine.reports[-1].kind == "out_of_bounds" and "of process a" in machine.reports[-1].message
    assert code(b.cuPointerGetAttribute(b.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, theirs))
    ok(a.cuMemcpyDtoH(host, theirs, 64))
    np.testing.assert_array_equal(host, np.arange(16))


def test_a_reservation_belongs_to_the_process_that_made_it(pair: tuple[Process, Process]) -> None:
    a, b = (process.driver for process in pair)
    primary(a), primary(b)
    address = int(ok(a.cuMemAddressReserve(GRANULARITY, 0, 0, 0)))
    memory = ok(b.cuMemCreate(GRANULARITY, memory_prop(0), 0))
    assert code(b.cuMemMap(address, GRANULARITY, 0, memory, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(b.cuMemAddressFree(address, GRANULARITY)) == R.CUDA_ERROR_INVALID_VALUE
    own = ok(a.cuMemCreate(GRANULARITY, memory_prop(0), 0))
    ok(a.cuMemMap(address, GRANULARITY, 0, own, 0))
    assert code(b.cuMemSetAccess(address, GRANULARITY, access(0), 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(b.cuMemUnmap(address, GRANULARITY)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(b.cuMemGetAccess(located(0), address)) == R.CUDA_ERROR_INVALID_VALUE


def test_device_memory_is_one_budget_for_all_processes() -> None:
    with Machine(devices=1, memory_bytes=8 << 20) as machine:
        a, b = machine.process("a"), machine.process("b")
        for process in (a, b):
            ok(process.driver.cuInit(0))
            primary(process.driver)
        ok(a.driver.cuMemAlloc(6 << 20))
        assert ok(b.driver.cuMemGetInfo()) == (2 << 20, 8 << 20)
        assert code(b.driver.cuMemAlloc(4 << 20)) == R.CUDA_ERROR_OUT_OF_MEMORY
        assert b.refusal is not None and "in process a" in b.refusal.message
        a.close()
        ok(b.driver.cuMemAlloc(4 << 20))


# The runtime ---------------------------------------------------------------------------------------------------------


def test_each_process_has_a_driver_object_of_its_own(machine: Machine) -> None:
    a, b = machine.process("a"), machine.process("b")
    devices = [df.device(0, driver=process) for process in (a, b)]
    assert devices[0].driver is not devices[1].driver and devices[0] is df.device(0, driver=a)
    arrays = [device.array(np.full(8, i, np.int32)) for i, device in enumerate(devices)]
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array.numpy(), np.full(8, i))
    a.close()
    with pytest.raises(df.errors.ClosedError):
        arrays[0].numpy()
    np.testing.assert_array_equal(arrays[1].numpy(), np.full(8, 1))


# Death ---------------------------------------------------------------------------------------------------------------


def test_a_process_that_ends_leaves_nothing(machine: Machine) -> None:
    before = machine.held()
    process = machine.process()
    cuda = process.driver
    ok(cuda.cuInit(0))
    primary(cuda)
    device_array(cuda, np.zeros(100))
    ok(cuda.cuMemAllocAsync(1000, 0))
    ok(cuda.cuMemHostAlloc(1000, 0))
    handle = ok(cuda.cuMemCreate(GRANULARITY, memory_prop(1), 0))
    mapped(cuda, handle, GRANULARITY, 2)
    function(cuda, SOURCE, "copy")
    process.close()
    process.close()
    assert machine.held() == before
    for result in (cuda.cuMemAlloc(64), cuda.cuCtxSynchronize(), cuda.cuInit(0)):
        assert code(result) == R.CUDA_ERROR_DEINITIALIZED
    assert not machine.reports


def test_a_kernel_ends_with_its_process(machine: Machine, pair: tuple[Process, Process]) -> None:
    a, b = pair
    primary(a.driver), primary(b.driver)
    flag = device_array(a.driver, np.zeros(1, np.int32))
    assert launch(a.driver, function(a.driver, SOURCE, "wait"), flag, threads=1) == R.CUDA_SUCCESS
    given = np.arange(32, dtype=np.int32)
    pointers = device_array(b.driver, np.zeros_like(given)), device_array(b.driver, given)
    a.close()
    assert launch(b.driver, function(b.driver, SOURCE, "copy"), *pointers) == R.CUDA_SUCCESS
    out = np.empty_like(given)
    ok(b.driver.cuMemcpyDtoH(out, pointers[0], out.nbytes))
    np.testing.assert_array_equal(out, given)
    assert not machine.reports


def test_a_call_that_waits_returns_when_its_process_is_closed(machine: Machine) -> None:
    process = machine.process()
    cuda, results, begun = process.driver, [], threading.Event()
    ok(cuda.cuInit(0))

    def run() -> None:
        primary(cuda)
        flag = device_array(cuda, np.zeros(1, np.int32))
        assert launch(cuda, function(cuda, SOURCE, "wait"), flag, threads=1) == R.CUDA_SUCCESS
        begun.set()
        results.append(cuda.cuMemFree(flag))

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    process.close()
    thread.join()
    assert code(results[0]) == R.CUDA_ERROR_DEINITIALIZED
    assert not machine.reports
