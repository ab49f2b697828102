# SPDX-License-Identifier: Apache-2.0
"""Multicast objects of the emulated driver: the calls, their order and sizes, lifetimes, and failures on request."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from emu.driver_helpers import R, code, ok, primary
from emu.multicast_helpers import PIECE, access, mapped, memory_prop, object_prop, shared, team

from drvfuse import errors
from drvfuse.emu import Machine

INVALID = R.CUDA_ERROR_INVALID_VALUE
SUPPORTED = types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
MINIMUM, RECOMMENDED = (types.CUmulticastGranularity_flags(n) for n in (0, 1))


def _memory(cuda: Any, device: int, nbytes: int = PIECE) -> Any:
    return ok(cuda.cuMemCreate(nbytes, memory_prop(device), 0))


def _alone(machine: Machine) -> Any:
    """The driver API of a machine, after cuInit."""
    ok(machine.driver.cuInit(0))
    return machine.driver


# Support ------------------------------------------------------------------------------------------------------------


def test_devices_from_capability_9_on_support_multicast() -> None:
    for arch, supported in (("sm_90", 1), ("sm_100a", 1), ("sm_89", 0)):
        with Machine(devices=2, arch=arch) as machine:
            assert ok(_alone(machine).cuDeviceGetAttribute(SUPPORTED, 0)) == supported


def test_without_support_every_multicast_call_is_refused() -> None:
    for options in ({"arch": "sm_89"}, {"peers": False}):
        with Machine(devices=2, **options) as machine:
            cuda = _alone(machine)
            assert ok(cuda.cuDeviceGetAttribute(SUPPORTED, 0)) == 0
            assert code(cuda.cuMulticastGetGranularity(object_prop(2), MINIMUM)) == R.CUDA_ERROR_NOT_SUPPORTED
            assert code(cuda.cuMulticastCreate(object_prop(2))) == R.CUDA_ERROR_NOT_SUPPORTED


def test_a_device_that_does_not_reach_the_others_cannot_be_added() -> None:
    with Machine(devices=3, peers=lambda i, j: 2 not in (i, j)) as machine:
        cuda = _alone(machine)
        assert ok(cuda.cuDeviceGetAttribute(SUPPORTED, 0)) == 0
        assert code(cuda.cuMulticastCreate(object_prop(2))) == R.CUDA_ERROR_NOT_SUPPORTED


# Sizes and properties -----------------------------------------------------------------------------------------------


def test_the_minimum_granularity_divides_the_recommended_one(cuda: Any) -> None:
    least = ok(cuda.cuMulticastGetGranularity(object_prop(2), MINIMUM))
    advised = ok(cuda.cuMulticastGetGranularity(object_prop(2), RECOMMENDED))
    assert least == PIECE and advised > least and advised % least == 0
    with pytest.raises(TypeError, match="option"):
        cuda.cuMulticastGetGranularity(object_prop(2), None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": 0}, INVALID),
        ({"size": PIECE + 1}, INVALID),
        ({"size": PIECE // 2}, INVALID),
        ({"size": 1 << 60}, R.CUDA_ERROR_OUT_OF_MEMORY),
        ({"numDevices": 0}, INVALID),
        ({"numDevices": 5}, INVALID),
        ({"flags": 1}, INVALID),
        ({"handleTypes": 2}, R.CUDA_ERROR_NOT_SUPPORTED),
    ],
)
def test_an_object_with_wrong_or_unsupported_properties_is_refused(
    cuda: Any, machine: Machine, change: Any, expected: Any
) -> None:
    prop = object_prop(2)
    for name, value in change.items():
        setattr(prop, name, value)
    assert code(cuda.cuMulticastCreate(prop)) == expected
    assert code(cuda.cuMulticastCreate(None)) == INVALID
    assert machine.held()["multicast"] == 0


@pytest.mark.parametrize(
    ("offset", "at", "size"),
    [
        (0, 0, 0),
        (0, 0, PIECE // 2),
        (PIECE // 2, 0, PIECE),
        (0, PIECE // 2, PIECE),
        (0, 0, 4 * PIECE),
        (PIECE, 0, 2 * PIECE),
        (0, 2 * PIECE, 2 * PIECE),
    ],
)
def test_binds_that_are_not_aligned_to_the_granularity_or_out_of_range_are_refused(
    cuda: Any, offset: int, at: int, size: int
) -> None:
    handle, memory = team(cuda, 2, 2 * PIECE), _memory(cuda, 0, 3 * PIECE)
    assert code(cuda.cuMulticastBindMem(handle, offset, memory, at, size, 0)) == INVALID
    assert code(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 1)) == INVALID
    with pytest.raises(OverflowError, match="negative value to size_t"):
        cuda.cuMulticastBindMem(handle, -PIECE, memory, 0, PIECE, 0)


# Adding devices, and calls that wait for them -----------------------------------------------------------------------


def test_a_device_is_added_once_and_only_to_a_team_with_room(cuda: Any, machine: Machine) -> None:
    handle = ok(cuda.cuMulticastCreate(object_prop(2)))
    ok(cuda.cuMulticastAddDevice(handle, 0))
    assert code(cuda.cuMulticastAddDevice(handle, 0)) == INVALID
    assert code(cuda.cuMulticastAddDevice(handle, 4)) == R.CUDA_ERROR_INVALID_DEVICE
    ok(cuda.cuMulticastAddDevice(handle, 1))
    assert code(cuda.cuMulticastAddDevice(handle, 2)) == INVALID
    assert [r.kind for r in machine.reports] == ["multicast"] * 2 and "already" in machine.reports[0].message


CALLS = {
    "cuMulticastBindMem": lambda cuda, handle, memory, at: cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0),
    "cuMulticastBindAddr": lambda cuda, handle, memory, at: cuda.cuMulticastBindAddr(handle, 0, at, PIECE, 0),
    "cuMemMap": lambda cuda, handle, memory, at: cuda.cuMemMap(at + PIECE, PIECE, 0, handle, 0),
}


def _ready(cuda: Any) -> tuple[Any, Any, int]:
    """Returns a multicast object to which only device 0 of two is added, memory of device 0, and the memory's address.
    The reserved addresses that follow the memory are not mapped.
    """
    primary(cuda)
    handle = ok(cuda.cuMulticastCreate(object_prop(2)))
    ok(cuda.cuMulticastAddDevice(handle, 0))
    memory = _memory(cuda, 0)
    at = int(ok(cuda.cuMemAddressReserve(2 * PIECE, 0, 0, 0)))
    ok(cuda.cuMemMap(at, PIECE, 0, memory, 0))
    return handle, memory, at


@pytest.mark.parametrize("call", CALLS)
def test_a_bind_that_waits_for_a_device_that_no_thread_can_add_is_a_deadlock(
    cuda: Any, machine: Machine, call: str
) -> None:
    before = machine.threads.others
    machine.threads.others = lambda: False  # type: ignore[method-assign]
    try:
        ready = _ready(cuda)
        assert code(CALLS[call](cuda, *ready)) == R.CUDA_ERROR_TIMEOUT
    finally:
        machine.threads.others = before  # type: ignore[method-assign]
    (report,) = machine.reports
    assert report.kind == "deadlock" and call in report.message and "added: 0" in report.message
    ok(cuda.cuMulticastAddDevice(ready[0], 1))
    ok(CALLS[call](cuda, *ready))


@pytest.mark.parametrize("call", CALLS)
def test_another_thread_may_add_the_missing_device_meanwhile(cuda: Any, machine: Machine, call: str) -> None:
    handle, *ready = _ready(cuda)
    timer = threading.Timer(0.05, lambda: cuda.cuMulticastAddDevice(handle, 1))
    timer.start()
    ok(CALLS[call](cuda, handle, *ready))
    timer.join()
    assert not machine.reports


GONE = {
    "the object": lambda cuda, handle, memory, at: cuda.cuMemRelease(handle),
    "the memory": lambda cuda, handle, memory, at: (cuda.cuMemUnmap(at, PIECE), cuda.cuMemRelease(memory)),
}


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("call", ["cuMulticastBindMem", "cuMulticastBindAddr"])
def test_memory_freed_while_a_bind_waits_is_not_bound(cuda: Any, machine: Machine, call: str, gone: str) -> None:
    ready = _ready(cuda)

    def other() -> None:
        GONE[gone](cuda, *ready)
        cuda.cuMulticastAddDevice(ready[0], 1)

    timer = threading.Timer(0.05, other)
    timer.start()
    assert code(CALLS[call](cuda, *ready)) == INVALID
    timer.join()
    assert machine.held()["binds"] == 0


def test_if_all_threads_wait_each_of_them_reports_a_deadlock(cuda: Any, machine: Machine) -> None:
    handle, memory, at = _ready(cuda)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(CALLS["cuMemMap"](cuda, handle, memory, at)))
    thread.start()
    results.append(CALLS["cuMulticastBindMem"](cuda, handle, memory, at))
    with machine.threads.waiting():  # this thread counts as one that waits inside the driver
        thread.join()
    assert {code(r) for r in results} == {R.CUDA_ERROR_TIMEOUT}
    assert {r.kind for r in machine.reports} == {"deadlock"}


# Binds --------------------------------------------------------------------------------------------------------------


def test_memory_of_a_device_outside_the_team_cannot_be_bound(cuda: Any, machine: Machine) -> None:
    handle, memory = team(cuda, 2), _memory(cuda, 3)
    assert code(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0)) == R.CUDA_ERROR_INVALID_DEVICE
    assert machine.reports[0].device == 3


def test_binds_of_one_device_must_not_overlap(cuda: Any, machine: Machine) -> None:
    handle, memory = team(cuda, 2, 4 * PIECE), _memory(cuda, 0, 4 * PIECE)
    ok(cuda.cuMulticastBindMem(handle, PIECE, memory, 0, 2 * PIECE, 0))
    assert code(cuda.cuMulticastBindMem(handle, 2 * PIECE, memory, 0, 2 * PIECE, 0)) == INVALID
    assert "overlaps" in machine.reports[0].message
    ok(cuda.cuMulticastBindMem(handle, 3 * PIECE, memory, 3 * PIECE, PIECE, 0))
    ok(cuda.cuMulticastBindMem(handle, PIECE, _memory(cuda, 1, 2 * PIECE), 0, 2 * PIECE, 0))


def test_only_the_whole_range_of_a_bind_can_be_unbound(cuda: Any, machine: Machine) -> None:
    handle, memory = team(cuda, 2, 4 * PIECE), _memory(cuda, 0, 4 * PIECE)
    ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, 2 * PIECE, 0))
    for offset, size in ((0, PIECE), (PIECE, PIECE), (0, 4 * PIECE), (2 * PIECE, 2 * PIECE)):
        assert code(cuda.cuMulticastUnbind(handle, 0, offset, size)) == INVALID
    assert "[0x0, 0x400000)" in machine.reports[0].message
    assert code(cuda.cuMulticastUnbind(handle, 1, 0, 2 * PIECE)) == INVALID
    assert code(cuda.cuMulticastUnbind(handle, 3, 0, 2 * PIECE)) == R.CUDA_ERROR_INVALID_DEVICE
    for offset, size in ((0, 0), (0, PIECE // 2), (PIECE // 2, PIECE), (3 * PIECE, 2 * PIECE)):
        assert code(cuda.cuMulticastUnbind(handle, 0, offset, size)) == INVALID
    ok(cuda.cuMulticastUnbind(handle, 0, 0, 2 * PIECE))
    assert code(cuda.cuMulticastUnbind(handle, 0, 0, 2 * PIECE)) == INVALID
    assert machine.held()["binds"] == 0


def test_memory_is_bound_by_its_address(cuda: Any, machine: Machine) -> None:
    primary(cuda)
    handle = team(cuda, 2, 2 * PIECE)
    at = mapped(cuda, _memory(cuda, 0, 2 * PIECE), 2 * PIECE, 1)
    assert code(cuda.cuMulticastBindAddr(handle, 0, at + 4096, PIECE, 0)) == INVALID
    assert code(cuda.cuMulticastBindAddr(handle, 0, at + PIECE, 2 * PIECE, 0)) == INVALID
    ok(cuda.cuMulticastBindAddr(handle, 0, at + PIECE, PIECE, 0))
    plain = ok(cuda.cuMemAlloc(4 * PIECE))
    assert code(cuda.cuMulticastBindAddr(handle, PIECE, -(-int(plain) // PIECE) * PIECE, PIECE, 0)) == INVALID
    pool = int(ok(cuda.cuMemAllocAsync(4 * PIECE, 0)))
    ok(cuda.cuMulticastBindAddr(handle, PIECE, -(-pool // PIECE) * PIECE, PIECE, 0))
    assert machine.held()["binds"] == 2


def test_the_second_form_of_bind_names_the_device(cuda: Any) -> None:
    if not hasattr(types, "cuMulticastBindMem_v2"):
        with pytest.raises(AttributeError):
            cuda.cuMulticastBindMem_v2  # noqa: B018
        return
    handle, memory = team(cuda, 2), _memory(cuda, 1)
    assert code(cuda.cuMulticastBindMem_v2(handle, 0, 0, memory, 0, PIECE, 0)) == R.CUDA_ERROR_INVALID_DEVICE
    ok(cuda.cuMulticastBindMem_v2(handle, 1, 0, memory, 0, PIECE, 0))
    ok(cuda.cuMulticastUnbind(handle, 1, 0, PIECE))
    at = mapped(cuda, memory, PIECE, 1)
    ok(cuda.cuMulticastBindAddr_v2(handle, 1, 0, at, PIECE, 0))


# Mappings and lifetimes ---------------------------------------------------------------------------------------------


def test_access_is_for_devices_of_the_team(cuda: Any, machine: Machine) -> None:
    handle = team(cuda, 2, 2 * PIECE)
    address = ok(cuda.cuMemAddressReserve(2 * PIECE, 0, 0, 0))
    assert code(cuda.cuMemMap(address, 2 * PIECE, PIECE, handle, 0)) == INVALID
    assert code(cuda.cuMemMap(address, PIECE // 2, 0, handle, 0)) == INVALID
    ok(cuda.cuMemMap(address, 2 * PIECE, 0, handle, 0))
    assert code(cuda.cuMemMap(address, 2 * PIECE, 0, handle, 0)) == INVALID
    assert machine.window.access(int(address)) == (0, 0)
    outside = cuda.cuMemSetAccess(address, 2 * PIECE, access(0, 2), 2)
    assert code(outside) == R.CUDA_ERROR_ILLEGAL_STATE
    assert machine.window.access(int(address)) == (0, 0)
    ok(cuda.cuMemSetAccess(address, 2 * PIECE, access(0, 1), 2))
    assert machine.window.access(int(address)) == (0b11, 0b11)
    assert ok(cuda.cuMemGetAccess(access(1)[0].location, address)) == 3


def test_a_released_object_lives_on_in_its_mapping_and_its_binds_with_it(cuda: Any, machine: Machine) -> None:
    primary(cuda)
    before = machine.held()
    handle, memory = team(cuda, 2), _memory(cuda, 0)
    address = mapped(cuda, handle, PIECE, 2)
    ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0))
    ok(cuda.cuMemRelease(memory))
    ok(cuda.cuMemRelease(handle))
    assert code(cuda.cuMemRelease(handle)) == INVALID
    assert machine.held() == {
        **before,
        "device_bytes": before["device_bytes"] + PIECE,
        **dict.fromkeys(("physical", "multicast", "binds", "mappings", "reservations"), 1),
    }
    again = ok(cuda.cuMemRetainAllocationHandle(address))
    assert int(again) == int(handle)
    ok(cuda.cuMemRelease(again))
    ok(cuda.cuMemUnmap(address, PIECE))
    ok(cuda.cuMemAddressFree(address, PIECE))
    assert machine.held() == before


def test_a_set_up_and_its_teardown_leave_nothing(cuda: Any, machine: Machine) -> None:
    before = machine.held()
    shared(cuda, 4, 2 * PIECE).close(cuda)
    assert machine.held() == before and not machine.reports


def test_handles_of_multicast_objects_and_memory_are_not_interchangeable(cuda: Any) -> None:
    handle, memory = team(cuda, 2), _memory(cuda, 0)
    assert code(cuda.cuMulticastBindMem(memory, 0, memory, 0, PIECE, 0)) == INVALID
    assert code(cuda.cuMulticastBindMem(handle, 0, handle, 0, PIECE, 0)) == INVALID
    assert code(cuda.cuMulticastAddDevice(memory, 0)) == INVALID
    assert code(cuda.cuMemGetAllocationPropertiesFromHandle(handle)) == INVALID
    kind = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert code(cuda.cuMemExportToShareableHandle(handle, kind, 0)) == R.CUDA_ERROR_NOT_SUPPORTED


def test_copies_of_the_host_to_a_multicast_address_are_refused(cuda: Any, machine: Machine) -> None:
    made = shared(cuda, 2)
    for call in (
        lambda: cuda.cuMemcpyDtoH(np.zeros(16, np.uint8), made.multicast, 16),
        lambda: cuda.cuMemcpyHtoD(made.multicast, np.zeros(16, np.uint8), 16),
        lambda: cuda.cuMemsetD8(made.multicast, 1, 16),
        lambda: cuda.cuMemcpyDtoD(made.own[0], made.multicast, 16),
    ):
        assert code(call()) == INVALID
    assert [r.kind for r in machine.reports] == ["multicast"] * 4
    assert code(cuda.cuMemFree(made.multicast)) == INVALID
    with pytest.raises(errors.ArgumentError, match="memory"):
        machine.declare_polled(made.multicast, 16)


def test_multicast_calls_invalidate_a_capture(cuda: Any) -> None:
    primary(cuda)
    stream = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamBeginCapture(stream, types.CUstreamCaptureMode(0)))
    assert code(cuda.cuMulticastCreate(object_prop(2))) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


# Failures on request ------------------------------------------------------------------------------------------------


def test_an_injected_failure_occurs_the_requested_number_of_times(cuda: Any, machine: Machine) -> None:
    handle, memory = team(cuda, 2), _memory(cuda, 0)
    rule = machine.inject("cuMulticastBindMem", R.CUDA_ERROR_SYSTEM_NOT_READY, times=2)
    for left in (1, 0):
        assert code(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0)) == R.CUDA_ERROR_SYSTEM_NOT_READY
        assert rule.left == left and machine.held()["binds"] == 0
    ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0))
    assert not machine.reports


def test_an_injected_failure_can_select_a_device_and_a_call(cuda: Any, machine: Machine) -> None:
    handle = ok(cuda.cuMulticastCreate(object_prop(3, 2 * PIECE)))
    machine.inject("cuMulticastAddDevice", 401, device=1)
    ok(cuda.cuMulticastAddDevice(handle, 0))
    assert code(cuda.cuMulticastAddDevice(handle, 1)) == R.CUDA_ERROR_ILLEGAL_STATE
    for device in (1, 2):
        ok(cuda.cuMulticastAddDevice(handle, device))
    memories = [_memory(cuda, device, 2 * PIECE) for device in range(3)]
    machine.inject("cuMulticastBindMem", R.CUDA_ERROR_NOT_PERMITTED, device=2, after=1)
    for offset in (0, PIECE):
        for device, memory in enumerate(memories):
            result = code(cuda.cuMulticastBindMem(handle, offset, memory, offset, PIECE, 0))
            assert (result == R.CUDA_ERROR_NOT_PERMITTED) == ((offset, device) == (PIECE, 2))
    address = ok(cuda.cuMemAddressReserve(PIECE, 0, 0, 0))
    ok(cuda.cuMemMap(address, PIECE, 0, handle, 0))
    machine.inject("cuMemSetAccess", R.CUDA_ERROR_ILLEGAL_STATE, device=1)
    ok(cuda.cuMemSetAccess(address, PIECE, access(0), 1))
    assert code(cuda.cuMemSetAccess(address, PIECE, access(0, 1), 2)) == R.CUDA_ERROR_ILLEGAL_STATE


def test_an_injected_failure_takes_calls_without_a_device_for_the_current_device(cuda: Any, machine: Machine) -> None:
    primary(cuda, 1)
    machine.inject("cuMulticastCreate", R.CUDA_ERROR_INVALID_VALUE, device=0)
    ok(cuda.cuMulticastCreate(object_prop(2)))
    primary(cuda, 0)
    assert code(cuda.cuMulticastCreate(object_prop(2))) == INVALID


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("function", {"function": "cuNoSuchThing", "code": 1}),
        ("code", {"function": "cuMemMap", "code": 123456}),
        ("code", {"function": "cuMemMap", "code": R.CUDA_SUCCESS}),
        ("device", {"function": "cuMemMap", "code": 1, "device": 4}),
        ("times", {"function": "cuMemMap", "code": 1, "times": 0}),
        ("after", {"function": "cuMemMap", "code": 1, "after": -1}),
    ],
)
def test_impossible_injected_failures_are_refused(machine: Machine, argument: str, arguments: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=argument):
        machine.inject(**arguments)
    assert not machine.injected
