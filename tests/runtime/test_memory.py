# SPDX-License-Identifier: Apache-2.0
"""Arrays, pools with deferred frees, pinned and symmetric memory."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings.driver import CUdeviceptr

import drvfuse as df
from drvfuse import dtypes
from drvfuse.errors import ArgumentError, CaptureError, ClosedError, DriverError
from drvfuse.runtime import calls
from drvfuse.runtime.driver import get_driver, last_calls
from drvfuse.runtime.lifetime import launch_group
from drvfuse.runtime.pinned import PinnedBuffer
from drvfuse.runtime.stream import Stream
from drvfuse.runtime.vmm import AddressRange, Mapping, PhysicalMemory, SymmetricBuffer, Undo, granularity

SLOW_COPY = r"""
extern "C" __global__ void slow_copy(const int* from, int* to, int count) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < 500000);
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.fixture
def freed(driver: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses given to cuMemFreeAsync during the test. What was dropped before the test is freed already."""
    api = get_driver(driver)
    gc.collect()
    df.device(0, driver=driver).pool.flush()
    addresses: list[int] = []
    real = api.cuMemFreeAsync
    monkeypatch.setitem(api.__dict__, "cuMemFreeAsync", lambda ptr, s: (addresses.append(ptr), real(ptr, s))[1])
    return addresses


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_arrays_of_every_dtype_survive_a_round_trip(driver: str, name: str, rng: np.random.Generator) -> None:
    dtype = dtypes.get(name).numpy
    raw = rng.integers(0, 2 if name == "bool" else 256, 60 * dtype.itemsize, dtype=np.uint8)
    values = raw.view(dtype).reshape(3, 4, 5)
    array = df.device(0, driver=driver).empty((3, 4, 5), name)
    array.copy_from(values)
    assert (array.shape, array.size, array.nbytes, str(array.dtype)) == ((3, 4, 5), 60, 60 * dtype.itemsize, name)
    back = array.numpy()
    assert back.dtype == dtype and back.tobytes() == values.tobytes()


def test_zeros_copy_from_and_reshape_work_together(driver: str, rng: np.random.Generator) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((4, 6), "bfloat16")
    np.testing.assert_array_equal(array.numpy().astype(np.float32), 0)
    values = rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    array.copy_from(values.T.copy().T)  # the host array may have any layout
    np.testing.assert_array_equal(array.numpy(), values)
    flat = array.reshape((24,))
    del array
    gc.collect()
    np.testing.assert_array_equal(flat.numpy(), values.reshape(24))
    assert len(flat) == 24 and flat.ndim == 1


@pytest.mark.parametrize("shape", [0, (0,), (3, 0, 2)])
def test_arrays_may_have_no_elements(driver: str, shape: object) -> None:
    array = df.device(0, driver=driver).zeros(shape, "float16")
    assert array.ptr == 0 and array.nbytes == 0 and array.numpy().size == 0
    array.copy_from(np.empty(array.shape, np.float16))
    assert array.__cuda_array_interface__["data"] == (0, False)


@pytest.mark.parametrize(
    ("shape", "dtype", "argument"), [((2, -1), "int8", "shape"), ("ab", "int8", "shape"), (3, "complex64", "dtype")]
)
def test_wrong_shapes_and_dtypes_are_argument_errors(driver: str, shape: object, dtype: str, argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        df.device(0, driver=driver).empty(shape, dtype)


def test_copy_from_checks_shape_and_dtype(driver: str) -> None:
    array = df.device(0, driver=driver).zeros((4,), "float32")
    with pytest.raises(ArgumentError, match="shape"):
        array.copy_from(np.zeros(5, np.float32))
    with pytest.raises(ArgumentError, match="float64"):
        array.copy_from(np.zeros(4))
    with pytest.raises(ArgumentError, match=r"values\.dtype"):
        df.device(0, driver=driver).array(np.zeros(3, np.complex64))


def test_a_view_takes_the_pointers_of_cuda_python_and_refuses_other_objects(driver: str, refused) -> None:
    device = df.device(0, driver=driver)
    array = device.array(np.arange(4, dtype=np.int32))
    for pointer in (CUdeviceptr(array.ptr), np.uint64(array.ptr)):
        view = df.view(pointer, 4, "int32", device, stream=array.stream)
        assert view.ptr == array.ptr and view.numpy().tolist() == [0, 1, 2, 3]
    for wrong in (None, 1.5, np.float32(16), np.array([16.0]), "16", object(), array, -16, 1 << 64):
        refused(lambda wrong=wrong: df.view(wrong, 4, "int32", device), "ptr", "an address as an int or a CUdeviceptr")


def test_a_view_borrows_memory_and_keeps_its_owner_alive(driver: str, rng: np.random.Generator) -> None:
    device = df.device(0, driver=driver)
    values = rng.standard_normal(16).astype(np.float32)
    array = device.array(values)
    part = df.view(array.ptr + 16, (3, 2), "float32", device, owner=array)
    del array
    gc.collect()
    np.testing.assert_array_equal(part.numpy(), values[4:10].reshape(3, 2))
    with pytest.raises(ArgumentError, match="ptr"):
        df.view(part.ptr + 1, (2,), "float32", device)
    with pytest.raises(ArgumentError, match="ptr"):
        df.view(0, (2,), "float32", device)
    if not device.attribute("PAGEABLE_MEMORY_ACCESS"):
        with pytest.raises(ArgumentError, match="not of the host"):
            df.view(values.ctypes.data, (2,), "float32", device)


def test_dropped_arrays_are_freed_at_the_next_allocation(driver: str, freed: list[int]) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((100,), "float32")
    address = array.ptr
    del array
    gc.collect()
    assert freed == []
    device.empty((1,), "int8")
    assert freed == [address]


def test_nothing_is_freed_in_a_launch_group(driver: str, freed: list[int]) -> None:
    device = df.device(0, driver=driver)
    with launch_group():
        device.zeros((10,), "float32")
        gc.collect()
        device.synchronize()
        with launch_group():
            device.stream.synchronize()
        device.stream.synchronize()
        assert freed == []
    device.stream.synchronize()
    assert len(freed) == 1


def test_a_free_waits_for_other_streams_even_if_they_are_closed(driver: str, freed: list[int]) -> None:
    device = df.device(0, driver=driver)
    home, other = Stream(device), Stream(device)
    array = device.zeros((10,), "float32", stream=home)
    array.used_on(home)
    array.used_on(other)
    array.reshape((5, 2)).used_on(other)
    other.close()
    home.close()
    del array
    gc.collect()
    device.synchronize()
    assert len(freed) == 1
    assert sum(call.startswith("cuStreamWaitEvent") for call in last_calls(12)) == 2


def test_a_free_waits_for_a_destroyed_stream_that_was_given_as_an_integer(driver: str, freed: list[int]) -> None:
    device = df.device(0, driver=driver)
    array, foreign = device.zeros((4,), "int8"), Stream(device)
    for _ in range(3):
        array.used_on(Stream.wrap(device, foreign.handle))
    foreign.close()
    del array
    gc.collect()
    calls.ring.clear()
    device.synchronize()
    assert len(freed) == 1
    assert [entry[0] for entry in calls.ring].count("cuStreamWaitEvent") == 1


@pytest.mark.emulated
def test_a_copy_waits_for_the_work_of_other_streams(rng: np.random.Generator) -> None:
    with df.emu.Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        source, array = device.array(np.arange(1 << 16, dtype=np.int32)), device.zeros((1 << 16,), "int32")
        kernel = df.compile(SLOW_COPY, driver=machine)["slow_copy"].prepare(
            1, 32, source, array, 1 << 10, device=device
        )
        with Stream(device) as other:
            for stream in (other, Stream.wrap(device, other.handle)):
                array.copy_from(np.zeros(1 << 16, np.int32))
                kernel(stream)
                np.testing.assert_array_equal(array.numpy()[: 1 << 10], np.arange(1 << 10))
                kernel(stream)
                source.copy_from(np.full(1 << 16, 7, np.int32))
                assert (array.numpy()[: 1 << 10] == np.arange(1 << 10)).all()
                source.copy_from(np.arange(1 << 16, dtype=np.int32))
            with df.Graph.capture(other), pytest.raises(CaptureError):
                array.numpy()


def test_an_event_of_a_foreign_stream_covers_a_reused_handle(driver: str) -> None:
    device = df.device(0, driver=driver)
    with Stream(device) as stream:
        foreign = Stream.wrap(device, stream.handle)
        first = foreign.mark()
        calls.ring.clear()
        assert Stream.wrap(device, stream.handle).mark() is first
        names = [entry[0] for entry in calls.ring]
        assert names.index("cuStreamWaitEvent") < names.index("cuEventRecord")


def test_a_launch_records_one_event_for_all_its_arrays(driver: str) -> None:
    device = df.device(0, driver=driver)
    arrays = [device.zeros((8,), "int32") for _ in range(2)]
    launch = df.compile(SLOW_COPY, driver=driver)["slow_copy"].prepare(1, 32, *arrays, 8)
    device.synchronize()
    with Stream(device) as stream:
        foreign = Stream.wrap(device, stream.handle)
        for used, events in ((stream, 0), (foreign, 1), (foreign, 1)):
            calls.ring.clear()
            launch(used)
            assert [entry[0] for entry in calls.ring].count("cuEventRecord") == events
        device.synchronize()


def test_work_of_a_stream_whose_handle_was_reused_is_waited_for(driver: str) -> None:
    device = df.device(0, driver=driver)
    array, closed, recycled = device.zeros((4,), "int8"), Stream(device), Stream(device)
    array.used_on(closed)
    handle = closed.handle
    closed.close()
    recycled.handle, own = handle, recycled.handle
    array.used_on(recycled)
    users = list(array._block.users.values())  # type: ignore[union-attr]
    recycled.handle = own
    assert {id(user) for user in users} == {id(closed), id(recycled)}


def test_in_a_capture_allocations_are_refused_and_frees_wait_for_its_end(driver: str, freed: list[int]) -> None:
    device = df.device(0, driver=driver)
    with Stream(device) as stream:
        array = device.zeros((10,), "float32", stream=stream)
        address = array.ptr
        stream.synchronize()
        with df.Graph.capture([stream]):
            with pytest.raises(CaptureError, match="allocate"):
                device.empty((3,), "float32", stream=stream)
            with pytest.raises(CaptureError):
                array.numpy()
            with pytest.raises(CaptureError):
                array.copy_from(np.zeros(10, np.float32))
            del array
            gc.collect()
            device.empty((3,), "float32")  # allocations free deleted arrays, but not during a capture
            assert address not in freed
        device.empty((3,), "float32")
        assert address in freed


@pytest.mark.gpus(2)
def test_pool_memory_is_opened_to_peers(driver: str) -> None:
    from drvfuse.runtime.reach import readable_by

    a, b = df.device(0, driver=driver), df.device(1, driver=driver)
    if not b.can_access_peer(a):
        pytest.skip("device 1 cannot access the memory of device 0")
    a.allow_peers([a, b])
    a.allow_peers([b])
    assert readable_by(a.zeros((4,), "int8").ptr, 4, b)


def test_pinned_buffer_is_shared_by_host_and_device(driver: str) -> None:
    api = get_driver(driver)
    buffer = PinnedBuffer(api, 64)
    words = buffer.view(np.uint32)
    assert words.shape == (16,) and not words.any()
    words[:] = np.arange(16)
    device = df.device(0, driver=driver)
    np.testing.assert_array_equal(df.view(buffer.ptr, (16,), "uint32", device).numpy(), np.arange(16))
    fields = buffer.view(np.dtype([("a", "<u8"), ("b", "<u4"), ("c", "<u4")]))
    assert fields["b"][1] == 6
    buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.view(np.uint8)


def test_a_view_of_a_pinned_buffer_keeps_it_alive(driver: str) -> None:
    words = PinnedBuffer(get_driver(driver), 4096).view(np.int64)
    gc.collect()
    words[:] = 5
    assert words.sum() == 512 * 5


@pytest.mark.gpus(2)
def test_symmetric_buffer_is_reached_by_every_device(driver: str, rng: np.random.Generator) -> None:
    from drvfuse.runtime.reach import readable_by

    devices = [df.device(i, driver=driver) for i in range(2)]
    if not devices[0].can_access_peer(devices[1]):
        pytest.skip("device 0 cannot access the memory of device 1")
    buffer = SymmetricBuffer(devices, 100_000)
    assert buffer.nbytes >= 100_000 and len(set(buffer.ptrs)) == 2 and buffer.multicast_ptr is None
    values = rng.integers(0, 1 << 30, 64).astype(np.int32)
    for home, ptr in zip(devices, buffer.ptrs, strict=True):
        home.stream.fill(ptr, 0, buffer.nbytes)
        assert not df.view(ptr, (buffer.nbytes,), "uint8", home).numpy().any()
        for user in devices:
            assert readable_by(ptr, buffer.nbytes, user)
            df.view(ptr, (64,), "int32", user).copy_from(values + user.index)
            np.testing.assert_array_equal(df.view(ptr, (64,), "int32", home).numpy(), values + user.index)
    ptr = buffer.ptrs[0]
    buffer.close()
    buffer.close()
    assert not readable_by(ptr, 1, devices[0])


@pytest.mark.parametrize("nbytes", [0, -5])
def test_sizes_must_be_positive(driver: str, nbytes: int) -> None:
    device = df.device(0, driver=driver)
    with pytest.raises(ArgumentError, match="nbytes"):
        SymmetricBuffer([device], nbytes)
    with pytest.raises(ArgumentError, match="nbytes"):
        PinnedBuffer(device.driver, nbytes)
    with pytest.raises(ArgumentError, match="nbytes"):
        PhysicalMemory(device, nbytes)
    with pytest.raises(ArgumentError, match="devices"):
        SymmetricBuffer([], 64)


def test_two_mappings_of_one_memory_are_aliases(driver: str) -> None:
    device = df.device(0, driver=driver)
    unit = granularity(device)
    memory = PhysicalMemory(device, unit)
    addresses = AddressRange(device.driver, 2 * unit)
    low, high = Mapping(addresses, memory, [device]), Mapping(addresses, memory, [device], unit)
    device.stream.fill(low.ptr, 0xAB, 256)
    assert (df.view(high.ptr, (256,), "uint8", device).numpy() == 0xAB).all()
    with pytest.raises(ArgumentError, match="offset"):
        Mapping(addresses, memory, [device], 2 * unit)
    for owned in (high, low, addresses, memory):
        owned.close()


def test_a_failure_during_a_set_up_leaves_nothing(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = df.device(0, driver=driver)
    api = device.driver

    def refuse(*args: object) -> None:
        raise DriverError("cuMemSetAccess", "", 1, "CUDA_ERROR_INVALID_VALUE", "planted")

    monkeypatch.setitem(api.__dict__, "cuMemSetAccess", refuse)
    with pytest.raises(DriverError, match="planted"):
        SymmetricBuffer([device], 1 << 20)
    names = [call.split("(")[0] for call in last_calls(6)]
    assert names == ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


def test_an_undo_continues_after_a_failing_step() -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("fail")
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"), Undo() as undo:
        undo.append(done.append, "last")
        undo.append(fail)
        undo.append(done.append, "first")
    assert done == ["first", "fail", "last"]
    with Undo() as undo:
        undo.append(fail)
        undo.commit()
