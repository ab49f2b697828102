# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, taken as drvfuse's own over the same memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsIndex

import numpy as np

from .. import dtypes
from ..errors import ArgumentError, CaptureError, DrvfuseError, counted, foreign, kind_of, shown
from . import dlpack
from .array import Array, view
from .device import Device, device
from .dlpack import Description
from .driver import Driver
from .reach import is_virtual, owner_index
from .stream import Stream
from .vmm import buffer_at


class SupportsDLPack(Protocol):
    """An array of another library that shares its memory by DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array of another library that describes its memory by `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


ArrayLike = Array | SupportsDLPack | SupportsCudaArrayInterface
"""A device array: an `Array`, or an object of another library with DLPack or `__cuda_array_interface__`."""

_INTERFACE_VERSION = 3
_IMMUTABLE = ("jax", "jaxlib")
"""Packages whose arrays are never written, though their DLPack does not say so."""


def as_array(obj: ArrayLike, *, driver: Driver, argument: str, writable: bool = False) -> tuple[Array, Stream | None]:
    """`obj` as an Array over the same memory, and the stream whose work writes it (None if its contents are complete).

    Takes an Array, an object with DLPack, or one with `__cuda_array_interface__`; the result keeps `obj` alive. For an
    Array the stream is its own. For a foreign object it is the current stream of its framework, if the framework gives
    access to it. Otherwise the producer is asked to order its work before the device's own stream, which is returned.

    Raises ArgumentError, naming `argument`, for host memory, strides, unknown dtypes, memory of another driver, and, if
    `writable`, read-only memory.
    """
    if isinstance(obj, Array):
        if obj.device.driver is not driver:
            theirs, expected = obj.device.driver, f"of the {driver.name} driver in use"
            given = f"an array of the {theirs.name} driver"
            if theirs.name == driver.name:
                given += f", on another machine, {theirs.machine!r}"
                expected += f", on {driver.machine!r}"
            raise ArgumentError(argument, given, expected)
        obj.require_open()
        return obj, obj.stream
    found, where, producer, owner = _describe(obj, driver, argument)
    return _checked(found, where, producer, owner, argument, writable), producer


@dataclass(frozen=True)
class Rows:
    """An array [..., columns]. The elements of a row are contiguous, and the distance from each row to the next is the
    same.

    `span` is a one-dimensional array from the first element to the last; `stride` is the distance of rows in elements.
    """

    span: Array
    shape: tuple[int, ...]
    stride: int
    producer: Stream | None


def as_rows(obj: ArrayLike, *, driver: Driver, argument: str) -> Rows:
    """`obj` as rows for reading. Unlike for `as_array`, there may be a gap between rows, as in a slice of columns.

    Raises ArgumentError for transposed, expanded or otherwise strided arrays.
    """
    if isinstance(obj, Array):
        array, producer = as_array(obj, driver=driver, argument=argument)
        return Rows(array.reshape(array.size), array.shape, array.shape[-1] if array.shape else 1, producer)
    found, where, producer, owner = _describe(obj, driver, argument)
    columns = found.shape[-1] if found.shape else 1
    if found.contiguous:
        array = _checked(found, where, producer, owner, argument, False)
        return Rows(array.reshape(array.size), found.shape, columns, producer)
    assert found.strides is not None
    rows, stride = 1, 0
    for length, step in zip(reversed(found.shape[:-1]), reversed(found.strides[:-1]), strict=True):
        if length == 1:
            continue
        stride = stride or step
        if step != stride * rows:
            stride = -1
            break
        rows *= length
    if stride < columns or (columns > 1 and found.strides[-1] != 1):
        shown = f"an array of shape {found.shape} with strides {found.strides}"
        raise ArgumentError(argument, shown, "of contiguous rows at equal distances")
    flat = replace(found, shape=((rows - 1) * stride + columns,), strides=None)
    return Rows(_checked(flat, where, producer, owner, argument, False), found.shape, stride, producer)


_Described = tuple[Description, Device, Stream | None, object]


def _describe(obj: Any, driver: Driver, argument: str) -> _Described:
    """The description of a foreign object, its device, the stream whose work writes it, and the object that owns it."""
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _from_dlpack(obj, driver, argument)
    interface = getattr(obj, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        return _from_interface(obj, interface, driver, argument)
    refuse_host(obj, argument)
    raise ArgumentError(argument, kind_of(obj), "a drvfuse Array, or have __dlpack__ or __cuda_array_interface__")


_EXPORTS = "an array that its library exports; drvfuse.view takes any device memory by its address"
_DLPACK_DEVICE = "an object whose __dlpack_device__ returns the type and the number of its device"


def refuse_host(obj: Any, argument: str) -> None:
    """Raise ArgumentError for an array in host memory, which no driver accepts. This check makes no driver call."""
    host = hasattr(obj, "__array_interface__") or isinstance(obj, (list, tuple))
    if host or (hasattr(obj, "__dlpack_device__") and _device_of(argument, obj)[0] == dlpack.CPU):
        raise ArgumentError(argument, f"host memory ({type(obj).__name__})", "device memory; copy with device.array")


def _device_of(argument: str, obj: Any) -> tuple[int, int]:
    """The type and the number of the device of an object with `__dlpack_device__`."""

    def told() -> tuple[int, int]:
        kind, index = _asked(argument, obj.__dlpack_device__)
        return int(kind), int(index)

    return foreign(argument, _DLPACK_DEVICE, told)


def _asked(argument: str, export: Callable[..., Any], **options: Any) -> Any:
    """The return value of a method of another library. An exception of the method becomes an ArgumentError: it may
    refuse tensors that need gradients, arrays that are sharded over devices, or dtypes that its DLPack does not
    name. A TypeError passes: an older library does not know all `options`."""
    try:
        return export(**options)
    except (DrvfuseError, TypeError):
        raise
    except Exception as error:
        raise ArgumentError(argument, f"refused by its library ({error})", _EXPORTS) from error


def _from_dlpack(obj: Any, driver: Driver, argument: str) -> _Described:
    kind, index = _device_of(argument, obj)
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED) and not (kind == dlpack.EXTENSION and driver.name == "emu"):
        what = "host memory" if kind in (dlpack.CPU, dlpack.CUDA_HOST) else "memory"
        shown = f"{what} on DLPack device type {kind}"
        raise ArgumentError(argument, shown, f"memory of the {driver.name} driver; copy host data with device.array")
    where = _device(driver, index, argument)
    handle = dlpack.current_stream(obj, kind, index)
    producer = where.stream if handle is None else Stream.wrap(where, handle, f"stream of {argument}")
    if handle is None and producer.capture_id() is not None:
        raise CaptureError(
            f"the library of {argument} names no stream, so {producer!r} would have to wait for {argument}, and that "
            "stream is being captured. Prepare the call before the capture, and launch it inside the capture"
        )
    order = -1 if handle is not None else producer.handle  # -1: no synchronisation
    with dlpack.on_device(obj, where, ordered=handle is None):
        try:
            capsule = _asked(argument, obj.__dlpack__, stream=order, max_version=dlpack.VERSION)
        except TypeError:  # a producer that is older than DLPack 1.0
            capsule = foreign(argument, _EXPORTS, lambda: _asked(argument, obj.__dlpack__, stream=order))
    description = dlpack.read(capsule, argument)
    if dlpack.library_of(obj) in _IMMUTABLE:
        description = replace(description, read_only=True)
    return description, where, producer, (obj, capsule)


def _from_interface(obj: Any, interface: dict[str, Any], driver: Driver, argument: str) -> _Described:
    said = f"{argument}.__cuda_array_interface__"
    for key in ("shape", "typestr", "data", "version"):
        if key not in interface:
            raise ArgumentError(said, f"without {key!r}", "a dict with shape, typestr, data and version")
    if not isinstance(interface["version"], int) or not 0 <= interface["version"] <= _INTERFACE_VERSION:
        raise ArgumentError(f"{said}['version']", shown(interface["version"]), f"{_INTERFACE_VERSION} or older")
    if interface.get("mask") is not None:
        raise ArgumentError(argument, "a masked array", "an array without mask")
    dtype = _interface_dtype(obj, interface["typestr"], argument)
    shape = _integers(f"{said}['shape']", interface["shape"], least=0)
    strides = None
    if interface.get("strides") is not None:
        strides = _integers(f"{said}['strides']", interface["strides"])
        if len(strides) != len(shape):
            raise ArgumentError(
                f"{said}['strides']", shown(strides), f"{counted(len(shape), 'number')}, one for each dimension"
            )
        if any(step % dtype.itemsize for step in strides):
            raise ArgumentError(argument, f"an array of byte strides {strides}", "C-contiguous")
        strides = tuple(step // dtype.itemsize for step in strides)
    try:
        ptr, read_only = interface["data"]
        ptr = operator.index(ptr or 0)
    except (TypeError, ValueError):
        raise ArgumentError(f"{said}['data']", shown(interface["data"]), "a tuple (address, is_read_only)") from None
    index = 0
    if ptr and 0 not in shape:
        index = owner_index(driver, ptr, argument)
    where = _device(driver, index, argument)
    description = Description(ptr, shape, strides, dtype, dlpack.CUDA, index, bool(read_only))
    handle = interface.get("stream")
    if handle is not None and not isinstance(handle, int) or handle == 0:
        expected = "None, 1, 2 or a stream handle: the interface leaves 0 out as ambiguous"
        raise ArgumentError(f"{said}['stream']", shown(handle), expected)
    # Before version 3 the interface has no stream. In version 3, None means that no wait is needed.
    if handle is None and interface["version"] < 3:
        handle = dlpack.current_stream(obj, dlpack.CUDA, index)
    producer = None if handle is None else Stream.wrap(where, handle, f"stream of {argument}")
    return description, where, producer, obj


def _interface_dtype(obj: Any, typestr: str, argument: str) -> dtypes.DType:
    """The dtype of an object with an array interface. The interface has no codes for bfloat16 and FP8: there they
    appear as bytes, unsigned integers or "<f1", and the object's own attribute `dtype` names the type."""
    own = dtypes.name_of(getattr(obj, "dtype", ""))
    if own in dtypes.NAMES:
        named = dtypes.get(own)
        codes = {f"V{named.itemsize}"}
        if own in dtypes.WITHOUT_TYPESTR:
            codes |= {f"u{named.itemsize}", named.numpy.str[1:]}
        if str(typestr)[1:] in codes and str(typestr)[0] in "<|":
            return named
    try:
        element = np.dtype(str(typestr))
    except TypeError:
        raise ArgumentError(f"{argument}.dtype", shown(typestr), "a type string such as '<f4'") from None
    if not element.isnative:
        raise ArgumentError(f"{argument}.dtype", f"{typestr!r}, big-endian", "little-endian, as the device is")
    if element.kind != "V":
        return dtypes.get(element, f"{argument}.dtype")
    expected = "clear: for bfloat16 and FP8 use DLPack, drvfuse.view or an object whose dtype names them"
    raise ArgumentError(f"{argument}.dtype", typestr, expected)


def _integers(argument: str, values: Iterable[SupportsIndex], least: int | None = None) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(value) for value in values)
    except TypeError:
        raise ArgumentError(argument, shown(values), "a tuple of ints") from None
    if least is not None and any(value < least for value in found):
        raise ArgumentError(argument, shown(values), f"a tuple of ints of at least {least}")
    return found


def _device(driver: Driver, index: int, argument: str) -> Device:
    count = driver.cuDeviceGetCount()
    if not 0 <= index < count:
        raise ArgumentError(argument, f"memory on device {index}", f"on a device of the {driver.name} driver")
    return device(index, driver=driver)


def _checked(
    found: Description, where: Device, producer: Stream | None, owner: object, argument: str, writable: bool
) -> Array:
    if not found.contiguous:
        shown = f"an array of shape {found.shape} with strides {found.strides}"
        raise ArgumentError(argument, shown, "C-contiguous")
    if writable and found.read_only:
        raise ArgumentError(argument, "read-only", "writable, as it is an output")
    if 0 not in found.shape:
        if not found.ptr:
            raise ArgumentError(argument, f"of shape {found.shape} at address 0", "in device memory")
        index = owner_index(where.driver, found.ptr, argument)
        if index != where.index:
            raise ArgumentError(argument, f"memory of device {index}", f"on device {where.index}, as the array states")
        if found.ptr % found.dtype.itemsize:
            raise ArgumentError(argument, f"at {found.ptr:#x}", f"aligned to {found.dtype.itemsize} bytes")
        _check_range(found, where, argument)
    # Another library may show memory of a symmetric buffer. The buffer then owns the array, so its close() is seen.
    buffer = buffer_at(where.driver, found.ptr)
    return view(found.ptr, found.shape, found.dtype, where, stream=producer, owner=owner if buffer is None else buffer)


def _check_range(found: Description, where: Device, argument: str) -> None:
    """Raise ArgumentError if the array extends beyond the end of the allocation in which it begins."""
    with where.use():
        code, *values = where.driver.result("cuMemGetAddressRange", found.ptr)
    base, nbytes = (int(value) for value in values) if not code else (0, 0)
    end = found.ptr + math.prod(found.shape) * found.dtype.itemsize
    # In virtual memory `nbytes` is the size of one mapping. An array may extend into the next, so it is not refused.
    if nbytes and end > base + nbytes and not is_virtual(where.driver, found.ptr):
        shown = f"{end - found.ptr} bytes at {found.ptr:#x}"
        expected = f"inside its allocation, which ends {end - base - nbytes} bytes before the end of the array"
        raise ArgumentError(argument, shown, expected)
