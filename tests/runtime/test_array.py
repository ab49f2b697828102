# SPDX-License-Identifier: Apache-2.0
"""Parts and shapes of arrays, copies between arrays, and arrays in symmetric memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import drvfuse as df
from drvfuse.errors import CaptureError, ClosedError
from drvfuse.runtime.driver import last_calls

Refused = Callable[..., None]


@pytest.fixture
def device(driver: str) -> df.Device:
    return df.device(0, driver=driver)


@pytest.mark.parametrize(
    "index", [slice(2, 5), slice(None), slice(-3, None), slice(4, 2), slice(0, 99), 3, -1, np.int64(0)]
)
def test_a_slice_is_a_view_of_the_first_dimension(device: df.Device, index: Any, rng: np.random.Generator) -> None:
    values = rng.standard_normal((6, 2, 3)).astype(ml_dtypes.bfloat16)
    array = device.array(values)
    part = array[index]
    assert part.shape == values[index].shape and part.dtype == array.dtype and part.stream is array.stream
    assert part.numpy().tobytes() == values[index].tobytes()
    if part.size:
        assert part.ptr == array.ptr + (values[index].ctypes.data - values.ctypes.data) and part.pooled
        part.copy_from(np.zeros_like(values[index]))
        values[index] = 0
        assert array.numpy().tobytes() == values.tobytes()


def test_an_array_can_be_iterated_over_its_rows(device: df.Device) -> None:
    array = device.array(np.arange(6, dtype=np.int32).reshape(3, 2))
    assert len(array) == 3
    assert [row.numpy().tolist() for row in array] == [[0, 1], [2, 3], [4, 5]]
    assert [one.numpy().item() for one in array[1]] == [2, 3] and array[1][0].shape == ()


def test_a_slice_keeps_the_memory_alive(device: df.Device) -> None:
    array = device.array(np.arange(6, dtype=np.int32))
    alive, part = weakref.ref(array), array[1:][1:].reshape((2, 2))[1]
    del array
    gc.collect()
    device.synchronize()
    assert alive() is not None and part.numpy().tolist() == [4, 5]
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("index", [slice(None, None, 2), slice(None, None, -1), (1, 2), ..., None, True, [0], "a", 1.0])
def test_unsupported_slices_are_refused(device: df.Device, refused: Refused, index: Any) -> None:
    refused(lambda: device.zeros((4, 4), "float32")[index], "index")


def test_an_index_outside_is_an_index_error(device: df.Device) -> None:
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"index {index} is outside the first dimension of <Array float32"):
            device.zeros((4, 4), "float32")[index]
    with pytest.raises(TypeError, match="0-dimensional"):
        device.zeros((), "float32")[0]


@pytest.mark.parametrize(
    "shape,expected", [(-1, (24,)), ((-1, 6), (4, 6)), ((2, -1, 3), (2, 4, 3)), ([4, 6, -1], (4, 6, 1)), ((24,), (24,))]
)
def test_reshape_infers_one_length(device: df.Device, shape: Any, expected: tuple[int, ...]) -> None:
    array = device.zeros((2, 3, 4), "float32")
    assert array.reshape(shape).shape == expected and array.reshape(shape).ptr == array.ptr


@pytest.mark.parametrize("shape", [(-1, -1), (-1, 5), (0, -1), -2, (-2, -12), 25, "a"])
def test_reshape_refuses_a_different_number_of_elements(device: df.Device, refused: Refused, shape: Any) -> None:
    refused(lambda: device.zeros((2, 3, 4), "float32").reshape(shape), "shape")
    assert device.zeros((0, 4), "float32").reshape((-1, 2)).shape == (0, 2)


class Foreign:
    """An array of another framework, by DLPack or the array interface."""

    def __init__(self, array: df.Array, interface: bool, **changes: Any) -> None:
        self.array = array
        if interface:
            self.__cuda_array_interface__ = array.__cuda_array_interface__ | changes
            self.dtype = str(array.dtype)
        else:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def _foreign(kind: str, array: df.Array) -> Any:
    if kind == "array":
        return array
    return Foreign(array, kind != "dlpack", **({"stream": None} if kind == "without stream" else {}))


@pytest.mark.parametrize("kind", ["array", "dlpack", "interface", "without stream"])
def test_a_device_array_is_copied(device: df.Device, kind: str, rng: np.random.Generator) -> None:
    values = rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16)
    array, source = device.zeros((5, 7), "bfloat16"), device.array(values)
    device.synchronize()
    array.copy_from(_foreign(kind, source))
    names = [text.partition("(")[0] for text in last_calls(16)]
    assert "cuMemcpyDtoDAsync" in names
    assert array.numpy().tobytes() == values.tobytes()
    array[1:3].copy_from(_foreign(kind, source[:2]))
    assert array.numpy()[1:3].tobytes() == values[:2].tobytes()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("kind", ["array", "dlpack", "interface"])
def test_an_array_of_another_device_is_copied(driver: str, kind: str, rng: np.random.Generator) -> None:
    devices = [df.device(i, driver=driver) for i in range(2)]
    values = rng.integers(0, 99, (3, 5)).astype(np.int32)
    array = devices[0].zeros((3, 5), "int32")
    array.copy_from(_foreign(kind, devices[1].array(values)))
    np.testing.assert_array_equal(array.numpy(), values)


SLOW = r"""
extern "C" __global__ void slow(int* to, int value) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < 500000);
    to[threadIdx.x] = value;
}
"""


def _slow(array: df.Array, value: int) -> df.Launch:
    return df.compile(SLOW, driver=array.device.driver)["slow"].prepare(1, 32, array, value)


@pytest.mark.parametrize("kind", ["array", "dlpack"])
@pytest.mark.gpus(2)
def test_a_copy_is_ordered_after_earlier_and_before_later_writes(driver: str, kind: str) -> None:
    devices = [df.device(i, driver=driver) for i in range(2)]
    for home in devices:
        source, array = home.zeros(32, "int32", stream=df.Stream(home)), devices[0].zeros(32, "int32")
        write = _slow(source, 1)
        with df.Stream(home) as other, df.Stream(devices[0]) as third:
            write(other if kind == "array" else source.stream)
            for _ in range(3):
                _slow(array, 7)(third)
            array.copy_from(_foreign(kind, source))
            write.set(1, 2)
            write(source.stream)
            assert array.numpy().tolist() == [1] * 32


def test_the_source_of_a_copy_may_be_dropped_and_its_stream_closed(device: df.Device) -> None:
    array = device.zeros(32, "int32", stream=df.Stream(device))
    with df.Stream(device) as home:
        source = device.zeros(32, "int32", stream=home)
        _slow(source, 5)(home)
    for _ in range(3):
        _slow(array, 7)(array.stream)
    array.copy_from(source)
    del source
    gc.collect()
    fresh = device.array(np.full(32, 9, np.int32))
    assert array.numpy().tolist() == [5] * 32 and fresh.numpy().tolist() == [9] * 32


def test_copies_of_other_shapes_dtypes_and_drivers_are_refused(
    device: df.Device, driver: str, refused: Refused
) -> None:
    array = device.zeros((4, 4), "float32")
    refused(lambda: array.copy_from(device.zeros((4, 5), "float32")), "values", "of shape (4, 5)")
    refused(lambda: array.copy_from(device.zeros((4, 4), "int32")), "values", "of dtype int32")
    refused(lambda: array[:3].copy_from(array[1:]), "values", "overlaps")
    refused(lambda: array.copy_from(object()), "values")  # type: ignore[arg-type]
    with df.emu.Machine(devices=1) as machine:
        refused(lambda: array.copy_from(df.device(0, driver=machine).zeros((4, 4), "float32")), "values", "driver")
    source = device.zeros((4, 4), "float32", stream=df.Stream(device))
    for stream in (array.stream, source.stream):
        with df.Graph.capture(stream) as graph, pytest.raises(CaptureError):
            array.copy_from(source)
        graph.close()
    array.copy_from(source)


def test_arrays_in_symmetric_memory_keep_it_alive(driver: str) -> None:
    devices = [df.device(0, driver=driver)]
    buffer = df.SymmetricBuffer(devices, 4096)
    first, second = buffer.arrays((8, 4), "float32")[0], buffer.arrays(3, ml_dtypes.bfloat16, offset=128)[0]
    assert (first.ptr, first.shape, first.device) == (buffer.ptrs[0], (8, 4), devices[0])
    assert (second.ptr, second.dtype) == (buffer.ptrs[0] + 128, "bfloat16")
    first.copy_from(np.ones((8, 4), np.float32))
    assert first[3:].numpy().sum() == 20
    alive = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert alive() is not None and first[0].numpy().tolist() == [1] * 4


def test_symmetric_arrays_lie_inside_the_buffer_and_are_aligned(device: df.Device, refused: Refused) -> None:
    with df.SymmetricBuffer([device], 4096) as buffer:
        refused(lambda: buffer.arrays(4, "float32", offset=2), "offset", "a multiple of 4")
        refused(lambda: buffer.arrays(4, "float32", offset=-4), "offset")
        refused(lambda: buffer.arrays(buffer.nbytes, "uint8", offset=1), "shape", str(buffer.nbytes))


@pytest.mark.gpus(2)
def test_symmetric_arrays_of_several_devices_are_on_their_devices(driver: str) -> None:
    with df.Group.local(2, driver=driver) as group, group.symmetric(1 << 10) as buffer:
        arrays = buffer.arrays((16, 16), "float32")
        assert [array.device for array in arrays] == [rank.device for rank in group]
        arrays[0].copy_from(np.full((16, 16), 3, np.float32))
        arrays[1].copy_from(arrays[0])
        assert (arrays[1].numpy() == 3).all()


def test_arrays_of_a_closed_buffer_are_refused_everywhere(device: df.Device) -> None:
    buffer = df.SymmetricBuffer([device], 4096)
    (array,) = buffer.arrays(32, "int32")
    other, part = device.zeros(32, "int32"), array[:]
    kernel = df.compile(SLOW, driver=device.driver)["slow"]
    buffer.close()
    uses: list[Callable[[], object]] = [
        array.numpy,
        part.numpy,
        lambda: array.copy_from(np.zeros(32, np.int32)),
        lambda: array.copy_from(other),
        lambda: other.copy_from(part),
        lambda: array.__dlpack__(),
        lambda: array.__cuda_array_interface__,
        lambda: kernel.prepare(1, 32, array, 1),
        lambda: buffer.arrays(32, "int32"),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
            use()
