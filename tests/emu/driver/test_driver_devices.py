# SPDX-License-Identifier: Apache-2.0
"""Devices, contexts, streams and events of the emulated driver."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary

from drvfuse import errors
from drvfuse.emu import Machine

A = types.CUdevice_attribute


# Machines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        *({"devices": value} for value in (0, 9, True, 2.0, "2", None)),
        *({"arch": value} for value in ("sm_42", "hopper", 90, None)),
        *({"seed": value} for value in ("a", 1.5, None, True)),
        *({"race": value} for value in ("lenient", 1, None, ["strict"])),
        *({"peers": value} for value in (5, "yes", [[True]], [True, True])),
        *({"sm_count": value} for value in (0, 1.5, None)),
        *({"memory_bytes": value} for value in (0, 1e9, None)),
        *({"check_initialised": value} for value in ("no", 1, None)),
        *({"delay_stores": value} for value in ("yes", 1, None)),
    ],
    ids=repr,
)
def test_impossible_options_of_a_machine_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^{next(iter(wrong))} is "):
        Machine(**wrong)


def test_a_machine_takes_integers_of_any_type() -> None:
    with Machine(devices=np.int64(2), seed=np.uint8(3), sm_count=np.int32(4)) as machine:
        assert (len(machine.devices), machine.seed, machine.sm_count) == (2, 3, 4)
    with Machine(devices=1, seed=-(2**80)) as machine:
        assert machine.engine.seed == -(2**80)


def test_an_unknown_profile_of_the_race_detector_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="'hardware', 'strict'"):
        Machine(race="lenient")


def test_two_machines_do_not_know_each_others_handles() -> None:
    with Machine(devices=1) as one, Machine(devices=1) as two:
        for machine in (one, two):
            ok(machine.driver.cuInit(0))
            primary(machine.driver)
        stream = ok(one.driver.cuStreamCreate(0))
        assert code(two.driver.cuStreamSynchronize(stream)) == R.CUDA_ERROR_INVALID_HANDLE
        pointer = ok(one.driver.cuMemAlloc(64))
        assert code(two.driver.cuMemFree(pointer)) == R.CUDA_ERROR_INVALID_VALUE


def test_calls_on_a_closed_machine_fail_with_a_clear_error() -> None:
    machine = Machine(devices=1)
    ok(machine.driver.cuInit(0))
    machine.close()
    machine.close()
    cuda = machine.driver
    for call in (cuda.cuDeviceGetCount(), cuda.cuInit(0), cuda.cuMemAlloc(16)):
        assert code(call) == R.CUDA_ERROR_DEINITIALIZED
    assert ok(cuda.cuGetErrorName(R.CUDA_ERROR_DEINITIALIZED)) == b"CUDA_ERROR_DEINITIALIZED"
    assert b"machine was closed" in ok(cuda.cuGetErrorString(R.CUDA_ERROR_DEINITIALIZED))


def test_calls_of_a_forked_child_fail_and_the_reason_is_logged_once(
    cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    child = os.fork()
    if child == 0:
        codes = {cuda.cuDeviceGetCount()[0] for _ in range(2)}
        messages = [record.getMessage() for record in caplog.records]
        right = codes == {R.CUDA_ERROR_NOT_INITIALIZED} and len(messages) == 1 and '"spawn"' in messages[0]
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Devices ------------------------------------------------------------------------------------------------------------


def test_devices_have_the_attributes_of_their_architecture() -> None:
    with Machine(devices=3, arch="sm_100a", sm_count=148) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        assert ok(cuda.cuDeviceGetCount()) == 3
        device = ok(cuda.cuDeviceGet(2))
        assert ok(cuda.cuDeviceGetName(64, device)).split(b"\0")[0] == b"drvfuse emulated sm_100a"
        assert len(ok(cuda.cuDeviceGetName(8, device))) == 8
        assert ok(cuda.cuDeviceGetAttribute(A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)) == 148
        assert ok(cuda.cuDeviceGetAttribute(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)) == 10
        assert ok(cuda.cuDeviceGetAttribute(A.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device)) == 1
        assert code(cuda.cuDeviceGet(3)) == R.CUDA_ERROR_INVALID_DEVICE
        uuids = {bytes(ok(cuda.cuDeviceGetUuid(i)).bytes) for i in range(3)}
        assert len(uuids) == 3
        bus = ok(cuda.cuDeviceGetPCIBusId(20, device)).rstrip(b"\0")
        assert int(ok(cuda.cuDeviceGetByPCIBusId(bus))) == 2


def test_every_attribute_has_a_value(cuda: Any) -> None:
    for attribute in A:
        if attribute.name != "CU_DEVICE_ATTRIBUTE_MAX":
            assert isinstance(ok(cuda.cuDeviceGetAttribute(attribute, 0)), int)


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        (None, {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}),
        (False, set()),
        ([[0, 1, 0], [1, 0, 0], [0, 0, 0]], {(0, 1), (1, 0)}),
        (lambda a, b: a < b, {(0, 1), (0, 2), (1, 2)}),
    ],
)
def test_peer_access_follows_the_options_of_the_machine(peers: Any, expected: set[tuple[int, int]]) -> None:
    with Machine(devices=3, peers=peers) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        reach = {(i, j) for i in range(3) for j in range(3) if ok(cuda.cuDeviceCanAccessPeer(i, j))}
        assert reach == expected


# Contexts -----------------------------------------------------------------------------------------------------------


def test_uses_of_the_primary_context_are_counted(cuda: Any) -> None:
    assert ok(cuda.cuDevicePrimaryCtxGetState(1)) == (0, 0)
    first, second = ok(cuda.cuDevicePrimaryCtxRetain(1)), ok(cuda.cuDevicePrimaryCtxRetain(1))
    assert int(first) == int(second)
    ok(cuda.cuDevicePrimaryCtxRelease(1))
    assert ok(cuda.cuDevicePrimaryCtxGetState(1)) == (0, 1)
    ok(cuda.cuDevicePrimaryCtxRelease(1))
    assert ok(cuda.cuDevicePrimaryCtxGetState(1)) == (0, 0)
    assert code(cuda.cuDevicePrimaryCtxRelease(1)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert code(cuda.cuCtxSetCurrent(first)) == R.CUDA_ERROR_INVALID_CONTEXT


def test_each_thread_has_its_own_stack_of_contexts(cuda: Any) -> None:
    context = primary(cuda, 0)
    other = ok(cuda.cuDevicePrimaryCtxRetain(1))
    ok(cuda.cuCtxPushCurrent(other))
    assert int(ok(cuda.cuCtxGetDevice())) == 1
    assert int(ok(cuda.cuCtxPopCurrent())) == int(other)
    assert int(ok(cuda.cuCtxGetCurrent())) == int(context)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(cuda.cuCtxGetDevice()))
    thread.start()
    thread.join()
    assert seen == [(R.CUDA_ERROR_INVALID_CONTEXT, None)]


def test_calls_without_a_context_fail_as_invalid_context(cuda: Any) -> None:
    assert code(cuda.cuMemAlloc(16)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert code(cuda.cuStreamCreate(0)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_INVALID_CONTEXT


def test_a_created_context_owns_its_memory(cuda: Any) -> None:
    create = getattr(cuda, "cuCtxCreate_v4", cuda.cuCtxCreate)
    context = ok(create(None, 0, 0))
    free, total = ok(cuda.cuMemGetInfo())
    pointer = ok(cuda.cuMemAlloc(1 << 20))
    assert ok(cuda.cuMemGetInfo()) == (free - (1 << 20), total)
    stream = ok(cuda.cuStreamCreate(0))
    ok(cuda.cuCtxDestroy(context))
    primary(cuda)
    assert ok(cuda.cuMemGetInfo()) == (free, total)
    assert code(cuda.cuMemFree(pointer)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_INVALID_HANDLE


def test_limits_of_a_context_are_stored(cuda: Any) -> None:
    primary(cuda)
    limit = types.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE
    assert ok(cuda.cuCtxGetLimit(limit)) == 8 << 20
    ok(cuda.cuCtxSetLimit(limit, 1 << 20))
    assert ok(cuda.cuCtxGetLimit(limit)) == 1 << 20


# Streams and events -------------------------------------------------------------------------------------------------


def test_a_stream_reports_its_priority_flags_and_context(cuda: Any) -> None:
    context = primary(cuda, 2)
    least, greatest = ok(cuda.cuCtxGetStreamPriorityRange())
    assert greatest < least
    stream = ok(cuda.cuStreamCreateWithPriority(1, greatest - 100))
    assert ok(cuda.cuStreamGetPriority(stream)) == greatest
    assert ok(cuda.cuStreamGetFlags(stream)) == 1
    assert int(ok(cuda.cuStreamGetCtx(stream))) == int(context)
    assert ok(cuda.cuStreamGetId(stream)) != ok(cuda.cuStreamGetId(0))
    ok(cuda.cuStreamQuery(stream))
    ok(cuda.cuStreamDestroy(stream))
    assert code(cuda.cuStreamQuery(stream)) == R.CUDA_ERROR_INVALID_HANDLE


def test_an_event_that_was_not_recorded_is_complete(cuda: Any) -> None:
    primary(cuda)
    event = ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventQuery(event))
    ok(cuda.cuEventSynchronize(event))
    ok(cuda.cuStreamWaitEvent(0, event, 0))
    assert code(cuda.cuEventElapsedTime(event, event)) == R.CUDA_ERROR_INVALID_HANDLE


def test_an_event_belongs_to_the_context_of_its_stream(cuda: Any) -> None:
    primary(cuda, 0)
    event = ok(cuda.cuEventCreate(0))
    primary(cuda, 1)
    stream = ok(cuda.cuStreamCreate(0))
    assert code(cuda.cuEventRecord(event, stream)) == R.CUDA_ERROR_INVALID_HANDLE
    ok(cuda.cuStreamWaitEvent(stream, event, 0))


def test_elapsed_time_needs_timing_and_completion(cuda: Any) -> None:
    primary(cuda)
    untimed, start, end = (ok(cuda.cuEventCreate(flags)) for flags in (2, 0, 0))
    for event in (untimed, start, end):
        ok(cuda.cuEventRecord(event, 0))
    assert code(cuda.cuEventElapsedTime(start, end)) == R.CUDA_ERROR_NOT_READY
    ok(cuda.cuEventSynchronize(end))
    assert ok(cuda.cuEventElapsedTime(start, end)) >= 0
    assert code(cuda.cuEventElapsedTime(untimed, end)) == R.CUDA_ERROR_INVALID_HANDLE


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_host_functions_run_in_stream_order_across_devices(cuda: Any) -> None:
    order: list[int] = []
    note = CALLBACK(lambda number: order.append(int(number or 0)))
    address = ctypes.cast(note, ctypes.c_void_p).value
    primary(cuda, 0)
    first = ok(cuda.cuStreamCreate(1))
    event = ok(cuda.cuEventCreate(2))
    primary(cuda, 1)
    second = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuLaunchHostFunc(first, address, 1))
    ok(cuda.cuEventRecord(event, first))
    ok(cuda.cuLaunchHostFunc(first, address, 2))
    ok(cuda.cuStreamWaitEvent(second, event, 0))
    ok(cuda.cuLaunchHostFunc(second, address, 3))
    assert order == []
    ok(cuda.cuStreamSynchronize(second))
    assert order.index(1) < order.index(3)
    ok(cuda.cuStreamSynchronize(first))
    assert sorted(order) == [1, 2, 3]


def test_a_host_function_may_not_call_the_driver(cuda: Any) -> None:
    primary(cuda)
    seen: list[Any] = []
    call = CALLBACK(lambda _: seen.append(cuda.cuCtxSynchronize()))
    ok(cuda.cuLaunchHostFunc(0, ctypes.cast(call, ctypes.c_void_p).value, 0))
    ok(cuda.cuCtxSynchronize())
    assert seen == [(R.CUDA_ERROR_NOT_PERMITTED,)]


def test_the_legacy_stream_waits_for_blocking_streams_only(cuda: Any) -> None:
    order: list[int] = []
    note = CALLBACK(lambda number: order.append(int(number or 0)))
    address = ctypes.cast(note, ctypes.c_void_p).value
    primary(cuda)
    blocking, free = ok(cuda.cuStreamCreate(0)), ok(cuda.cuStreamCreate(1))
    event = ok(cuda.cuEventCreate(2))
    ok(cuda.cuLaunchHostFunc(blocking, address, 1))
    ok(cuda.cuLaunchHostFunc(0, address, 2))
    ok(cuda.cuEventRecord(event, blocking))
    ok(cuda.cuLaunchHostFunc(free, address, 3))
    ok(cuda.cuEventSynchronize(event))
    assert order.index(1) < order.index(2)
    ok(cuda.cuCtxSynchronize())
    assert sorted(order) == [1, 2, 3]


def test_other_threads_can_queue_work_while_one_waits(cuda: Any) -> None:
    """One thread waits for an event; another thread queues the host function that completes it."""
    primary(cuda)
    reached = threading.Event()
    call = CALLBACK(lambda _: reached.wait(5))
    stream = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuLaunchHostFunc(stream, ctypes.cast(call, ctypes.c_void_p).value, 0))

    def other() -> None:
        primary(cuda)
        ok(cuda.cuMemAlloc(64))
        reached.set()

    thread = threading.Thread(target=other)
    thread.start()
    ok(cuda.cuStreamSynchronize(stream))
    thread.join()
    assert reached.is_set()
