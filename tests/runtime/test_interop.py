# SPDX-License-Identifier: Apache-2.0
"""Foreign arrays: DLPack, the CUDA array interface, and which device can read which memory."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import drvfuse as df
from drvfuse import dtypes
from drvfuse.errors import ArgumentError
from drvfuse.runtime import dlpack
from drvfuse.runtime.array import Array
from drvfuse.runtime.driver import get_driver
from drvfuse.runtime.interop import as_array
from drvfuse.runtime.reach import copyable_by, readable_by
from drvfuse.runtime.stream import Stream


class Producer:
    """An array of another framework that supports DLPack only."""

    def __init__(self, array: Array, version: tuple[int, int] | None = (1, 1)) -> None:
        self.array, self.version, self.asked = array, version, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
        if self.version is None and more:
            raise TypeError("unexpected keyword max_version")
        self.asked.append(stream)
        if self.version is None:
            return self.array.__dlpack__(stream=stream)
        return self.array.__dlpack__(stream=stream, **more)


@pytest.mark.parametrize("version", [None, (1, 1)])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", dtypes.FP4, "int64", "bool"])
def test_arrays_survive_a_dlpack_round_trip(
    driver: str, name: str, version: tuple[int, int] | None, rng: np.random.Generator
) -> None:
    device = df.device(0, driver=driver)
    dtype = dtypes.get(name).numpy
    values = rng.integers(0, 2, (5, 1, 7)).astype(dtype)
    made = device.empty(values.shape, name)
    made.copy_from(values)
    foreign = Producer(made, version)
    array, stream = as_array(foreign, driver=get_driver(driver), argument="inputs[0]")
    assert stream is device.stream and foreign.asked == [device.stream.handle]
    assert (array.ptr, array.shape, str(array.dtype), array.device) == (foreign.array.ptr, (5, 1, 7), name, device)
    del foreign
    gc.collect()
    assert array.numpy().tobytes() == values.tobytes()


def test_dropped_capsules_release_their_arrays(driver: str) -> None:
    device = df.device(0, driver=driver)
    device.synchronize()
    held = len(dlpack._exported)
    array = device.zeros((4,), "float32")
    capsules = [array.__dlpack__(stream=-1), array.__dlpack__(stream=-1, max_version=(1, 0))]
    assert len(dlpack._exported) == held + 2
    device.synchronize()
    assert len(dlpack._exported) == held + 2 and dlpack.read(capsules[0]).ptr == array.ptr
    del capsules
    device.synchronize()
    assert len(dlpack._exported) == held


def test_a_refusing_consumer_raises_its_own_error_and_holds_nothing(driver: str) -> None:
    device = df.device(0, driver=driver)
    device.synchronize()
    held = len(dlpack._exported), len(dlpack._capsules)
    array = device.zeros((4,), "float32")
    for _ in range(3):
        with pytest.raises((RuntimeError, BufferError), match="emulated device" if driver == "emu" else "(?i)device"):
            np.from_dlpack(array)
    gone = weakref.ref(array)
    del array
    device.synchronize()
    assert gone() is None and (len(dlpack._exported), len(dlpack._capsules)) == held


def test_numpy_is_refused_instead_of_getting_an_array_of_objects(driver: str) -> None:
    array = df.device(0, driver=driver).zeros((4,), "float32")
    for convert in (np.asarray, np.array, lambda a: np.zeros(4, np.float32) + a):
        with pytest.raises(TypeError, match=r"\.numpy\(\)"):
            convert(array)


def test_the_consumer_calls_the_deleter(driver: str) -> None:
    import ctypes

    device = df.device(0, driver=driver)
    capsule = device.zeros((4,), "float32").__dlpack__(stream=-1)
    address = dlpack._get_pointer(capsule, b"dltensor")
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    rename(capsule, b"used_dltensor")
    with pytest.raises(ArgumentError, match="unconsumed"):
        dlpack.read(capsule)
    del capsule
    assert address in dlpack._exported
    managed = dlpack._Managed.from_address(address)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address)
    assert address not in dlpack._exported


def test_an_export_orders_the_stream_of_the_consumer(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((4,), "float32")
    with Stream(device) as consumer:
        array.__dlpack__(stream=consumer.handle)
        waits = [call for call in df.last_calls(6) if call.startswith("cuStreamWaitEvent(")]
        assert len(waits) == 1 and hex(consumer.handle) in waits[0]
    with pytest.raises(ArgumentError, match="ambiguous"):
        array.__dlpack__(stream=0)
    with pytest.raises(BufferError):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(1, 0))


def test_emulated_memory_is_not_announced_as_cuda_memory(driver: str) -> None:
    array = df.device(0, driver=driver).zeros((2,), "int8")
    assert array.__dlpack_device__() == ((2, 0) if driver == "cuda" else (12, 0))


def test_arrays_of_drvfuse_are_used_as_they_are(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((3,), "float32")
    assert as_array(array, driver=device.driver, argument="x") == (array, array.stream)


def test_arrays_of_another_driver_are_refused(driver: str) -> None:
    other = df.device(0, driver=df.emu.Machine(devices=1))
    with pytest.raises(ArgumentError, match="x is an array of the emu driver"):
        as_array(other.zeros((3,), "int8"), driver=get_driver(driver), argument="x")


def test_an_array_of_another_machine_is_refused_with_both_machines() -> None:
    with df.emu.Machine(devices=1) as mine, df.emu.Machine(devices=2, seed=3) as theirs:
        array = df.device(0, driver=theirs).zeros((3,), "int8")
        with pytest.raises(ArgumentError) as caught:
            as_array(array, driver=get_driver(mine), argument="x")
    assert str(caught.value) == (
        "x is an array of the emu driver, on another machine, <Machine of 2 x sm_90a, seed 3>; "
        "it must be of the emu driver in use, on <Machine of 1 x sm_90a, seed 0>"
    )


@pytest.mark.parametrize("host", [np.zeros(3, np.float32), [1.0, 2.0]])
def test_host_memory_is_refused(driver: str, host: object) -> None:
    with pytest.raises(ArgumentError, match="inputs is host memory"):
        as_array(host, driver=get_driver(driver), argument="inputs")


def test_objects_without_an_array_interface_are_refused(driver: str) -> None:
    with pytest.raises(ArgumentError, match="__cuda_array_interface__"):
        as_array(object(), driver=get_driver(driver), argument="inputs")


def interface(array: Array, **changes: Any) -> Any:
    return SimpleNamespace(owner=array, __cuda_array_interface__={**array.__cuda_array_interface__, **changes})


def test_arrays_survive_a_round_trip_by_the_array_interface(driver: str, rng: np.random.Generator) -> None:
    device = df.device(0, driver=driver)
    values = rng.standard_normal((4, 3)).astype(np.float32)
    with Stream(device) as stream:
        foreign = interface(device.array(values, stream=stream), strides=(12, 4))
        array, producer = as_array(foreign, driver=device.driver, argument="x")
        assert producer is not None and producer.handle == stream.handle
        np.testing.assert_array_equal(array.numpy(), values)


@pytest.mark.gpus(2)
def test_a_foreign_pointer_is_found_on_the_device_that_holds_it(driver: str) -> None:
    for index in (1, 0):
        device = df.device(index, driver=driver)
        array, _ = as_array(interface(device.zeros((4,), "int32")), driver=device.driver, argument="x")
        assert array.device is device
        with df.SymmetricBuffer([device], 4096) as buffer:
            assert device.driver.pointer_device(buffer.ptrs[0]) == index
    assert device.driver.pointer_device(16) is None


def test_an_array_interface_without_a_stream_is_not_ordered(driver: str) -> None:
    device = df.device(0, driver=driver)
    foreign = interface(device.zeros((3,), "int32"), stream=None)
    assert as_array(foreign, driver=device.driver, argument="x")[1] is None
    version2 = interface(device.zeros((3,), "int32"), version=2)
    del version2.__cuda_array_interface__["stream"]
    assert as_array(version2, driver=device.driver, argument="x")[1] is None


def test_array_interface_of_bfloat16_needs_the_objects_own_dtype(driver: str) -> None:
    device = df.device(0, driver=driver)
    foreign = interface(device.zeros((3,), "bfloat16"))
    with pytest.raises(ArgumentError, match="use DLPack"):
        as_array(foreign, driver=device.driver, argument="x")
    foreign.dtype = "torch.bfloat16"
    assert str(as_array(foreign, driver=device.driver, argument="x")[0].dtype) == "bfloat16"


@pytest.mark.parametrize("name", dtypes.WITHOUT_TYPESTR)
def test_array_interface_of_a_type_without_a_code_takes_any_bytes_of_its_size(driver: str, name: str) -> None:
    device = df.device(0, driver=driver)
    array, dtype = device.zeros((4,), name), dtypes.get(name)
    assert array.__cuda_array_interface__["typestr"] == f"<V{dtype.itemsize}"
    for code in ("|V", "<V", "|u" if dtype.itemsize == 1 else "<u"):
        foreign = interface(array, typestr=f"{code}{dtype.itemsize}")
        of_numpy = (dtype.numpy, dtype.numpy.type) if name != dtypes.FP4 else ()  # numpy has no FP4 dtype
        for own in (name, f"torch.{name}", *of_numpy):
            foreign.dtype = own
            assert as_array(foreign, driver=device.driver, argument="x")[0].dtype is dtype
        foreign.dtype = "float32"  # a dtype of another size
        if code[1] == "V":
            with pytest.raises(ArgumentError, match="use DLPack"):
                as_array(foreign, driver=device.driver, argument="x")
    foreign = interface(array, typestr=dtype.numpy.str)  # the type string of e5m2 is "<f1"
    foreign.dtype = name
    assert as_array(foreign, driver=device.driver, argument="x")[0].dtype is dtype


def test_array_interface_of_integers_is_of_integers(driver: str) -> None:
    device = df.device(0, driver=driver)
    foreign = interface(device.zeros((4,), "uint8"))
    for own in ("uint8", "int8", "bool", "bfloat16", None):
        foreign.dtype = own
        assert str(as_array(foreign, driver=device.driver, argument="x")[0].dtype) == "uint8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": (4, 16)}, "x is an array of shape .* with strides .*; it must be C-contiguous"),
        ({"strides": (3, 1)}, "C-contiguous"),
        ({"mask": object()}, "mask"),
        ({"typestr": "<c8"}, r"x\.dtype"),
        ({"typestr": ">f4"}, r"x\.dtype is '>f4', big-endian"),
        ({"typestr": "nonsense"}, r"x\.dtype is 'nonsense'"),
        ({"typestr": None}, r"x\.dtype"),
        ({"data": (4096, False)}, "not device memory"),
        ({"data": (0, False)}, r"x is of shape \(4, 4\) at address 0"),
        ({"data": (None, False)}, r"x is of shape \(4, 4\) at address 0"),
        ({"data": 4096}, r"\['data'\] is 4096"),
        ({"data": ("x", False)}, r"\['data'\]"),
        ({"version": 4}, r"\['version'\] is 4; it must be 3 or older"),
        ({"version": "3"}, r"\['version'\]"),
        ({"shape": 4}, r"\['shape'\]"),
        ({"shape": (4, -1)}, r"\['shape'\]"),
        ({"shape": (4, 4.0)}, r"\['shape'\]"),
        ({"strides": (4,)}, r"\['strides'\]"),
        ({"strides": 4}, r"\['strides'\]"),
        ({"stream": 0}, r"\['stream'\] is 0"),
        ({"stream": "1"}, r"\['stream'\] is '1'"),
    ],
)
def test_malformed_array_interfaces_are_refused(driver: str, changes: dict[str, Any], message: str) -> None:
    device = df.device(0, driver=driver)
    with pytest.raises(ArgumentError, match=message):
        as_array(interface(device.zeros((4, 4), "float32"), **changes), driver=device.driver, argument="x")


@pytest.mark.parametrize("key", ["shape", "typestr", "data", "version"])
def test_an_array_interface_without_a_key_is_refused(driver: str, key: str) -> None:
    foreign = interface(df.device(0, driver=driver).zeros((4,), "float32"))
    del foreign.__cuda_array_interface__[key]
    with pytest.raises(ArgumentError, match=f"x.__cuda_array_interface__ is without '{key}'"):
        as_array(foreign, driver=get_driver(driver), argument="x")


def test_the_emulated_driver_checks_sizes_and_streams_of_foreign_arrays() -> None:
    device = df.device(0, driver="emu")
    array = device.zeros((4, 4), "float32")
    with pytest.raises(ArgumentError, match="x is 80 bytes at .* inside its allocation, which ends 16 bytes before"):
        as_array(interface(array, shape=(4, 5)), driver=device.driver, argument="x")
    with pytest.raises(ArgumentError, match="stream of x is 0xdead0"):
        as_array(interface(array, stream=0xDEAD0), driver=device.driver, argument="x")


def test_foreign_arrays_beyond_the_end_of_their_allocation_are_refused(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((64,), "float32")
    tail = interface(array, data=(array.ptr + 128, False), shape=(32,))
    assert as_array(tail, driver=device.driver, argument="x")[0].ptr == array.ptr + 128
    with pytest.raises(ArgumentError, match="inside its allocation"):
        as_array(interface(array, data=(array.ptr + 128, False), shape=(1 << 26,)), driver=device.driver, argument="x")


def test_read_only_memory_is_refused_as_an_output(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((4,), "float32")
    foreign = interface(array, data=(array.ptr, True))
    as_array(foreign, driver=device.driver, argument="x")
    with pytest.raises(ArgumentError, match="outputs is read-only"):
        as_array(foreign, driver=device.driver, argument="outputs", writable=True)


def test_misaligned_memory_is_refused(driver: str) -> None:
    device = df.device(0, driver=driver)
    array = device.zeros((8,), "float32")
    with pytest.raises(ArgumentError, match="aligned"):
        as_array(interface(array, data=(array.ptr + 2, False), shape=(4,)), driver=device.driver, argument="x")


def test_empty_foreign_arrays_are_allowed(driver: str) -> None:
    device = df.device(0, driver=driver)
    array, _ = as_array(interface(device.zeros((0, 3), "float32")), driver=device.driver, argument="x")
    assert array.shape == (0, 3) and array.ptr == 0
    array, _ = as_array(Producer(device.zeros((0, 3), "float32")), driver=device.driver, argument="x")
    assert array.shape == (0, 3)


@pytest.mark.gpus(2)
def test_wrong_device_is_refused(driver: str) -> None:
    a, b = df.device(0, driver=driver), df.device(1, driver=driver)
    lying = Producer(a.zeros((3,), "float32"))
    lying.__class__ = type(
        "Lying", (Producer,), {"__dlpack_device__": lambda self: (dlpack.device_of(self.array)[0], 1)}
    )
    with pytest.raises(ArgumentError, match="x is memory of device 0"):
        as_array(lying, driver=b.driver, argument="x")


@pytest.mark.gpus(2)
def test_peers_can_read_memory_depending_on_its_kind(driver: str) -> None:
    from drvfuse.runtime.vmm import AddressRange, Mapping, PhysicalMemory, granularity

    spec: Any = df.emu.Machine(devices=2) if driver == "emu" else driver
    a, b = df.device(0, driver=spec), df.device(1, driver=spec)
    if not b.can_access_peer(a):
        pytest.skip("device 1 cannot access the memory of device 0")
    api = a.driver
    assert readable_by(0, 0, b) and not readable_by(0x1000, 4, b)

    with a.use():
        plain = int(api.cuMemAlloc(4096))
    assert readable_by(plain, 4096, a)
    assert copyable_by(plain, 4096, b)
    if driver == "emu":  # on a GPU another test may have enabled peer access
        assert not readable_by(plain, 4096, b)
    b.enable_peer(a)
    assert readable_by(plain, 4096, b)

    pooled = a.zeros((1000,), "float32")
    if driver == "emu":
        assert not readable_by(pooled.ptr, pooled.nbytes, b) and not copyable_by(pooled.ptr, pooled.nbytes, b)
    a.allow_peers([b])
    assert readable_by(pooled.ptr, pooled.nbytes, b) and readable_by(pooled.ptr, pooled.nbytes, a)

    unit = granularity(a)
    addresses = AddressRange(api, 2 * unit)
    first, second = PhysicalMemory(a, unit), PhysicalMemory(a, unit)
    both, own = Mapping(addresses, first, [a, b]), Mapping(addresses, second, [a], unit)
    assert readable_by(both.ptr, unit, b) and not readable_by(own.ptr, 16, b)
    assert not readable_by(both.ptr, unit + 1, b) and readable_by(both.ptr, 2 * unit, a)
    assert copyable_by(both.ptr, unit, b) and not copyable_by(own.ptr, 16, b)
    for owned in (own, both, addresses, first, second):
        owned.close()
    with a.use():
        api.cuMemFree(plain)


def test_the_current_stream_of_a_framework_is_read_from_its_exchange_table() -> None:
    import ctypes

    def current(kind: int, index: int, out: Any) -> int:
        out[0] = 0x1230 + index
        return 0

    table = dlpack._ExchangeApi()
    table.major, table.minor = 1, 3
    callback = dlpack._CurrentStream(current)
    table.current_work_stream = ctypes.cast(callback, ctypes.c_void_p).value
    capsule = dlpack._capsule_new(ctypes.addressof(table), b"dlpack_exchange_api", None)
    tensor = type("Tensor", (), {"__dlpack_c_exchange_api__": capsule})()
    assert dlpack.current_stream(tensor, 2, 3) == 0x1233
    assert dlpack.current_stream(object(), 2, 0) is None
