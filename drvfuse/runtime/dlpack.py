# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules: making them from arrays and reading those of others, with ctypes.

The structures are those of dlpack.h 1.x. A capsule of another library that drvfuse reads is kept alive and not renamed
to "used_...", so the capsule's own destructor still calls the deleter of its tensor. If a capsule of drvfuse is dropped
and nobody has consumed it, its memory is freed at the next allocation or synchronisation. Memory of the emulated driver
has the device type "extension": it is not CUDA memory, and a framework that used it as CUDA memory would crash.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..dtypes import DType
from ..errors import ArgumentError, shown
from .array import Array
from .device import Device
from .driver import Driver
from .lifetime import retire
from .stream import LEGACY, Stream, StreamLike

CPU, CUDA, CUDA_HOST, CUDA_MANAGED, EXTENSION = 1, 2, 3, 13, 12
VERSION = (1, 1)
_READ_ONLY = 1
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Element(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Element),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_api = ctypes.pythonapi
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_exported: dict[int, Any] = {}  # address of the managed tensor -> the objects to keep until its deleter is called


_capsules: dict[int, list[Any]] = {}  # address of the managed tensor -> [its capsule], until it is consumed or dropped


# `exported` is a default argument, so that the dictionary outlives the module's globals, which are cleared at
# interpreter exit.
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int, exported: dict[int, Any] = _exported) -> None:
    exported.pop(address, None)


def _references(holder: list[Any]) -> int:
    return sys.getrefcount(holder[0])


_ALONE = _references([object()])


def _reclaim(driver: Driver, address: int) -> None:
    """Free the tensor of a capsule if only this module still references the capsule; else check again at the next
    flush.

    The capsule has no destructor: a destructor written in Python would lose the exception of a consumer that drops the
    capsule while it raises, as numpy does for device memory. So this module keeps a reference to every capsule.
    """
    holder = _capsules.get(address)
    if holder is None:
        return
    alone = _references(holder) == _ALONE
    if not any(_is_valid(holder[0], name) for name in _NAMES.values()):
        del _capsules[address]  # the capsule was consumed, and its consumer calls the deleter
    elif alone:
        del _capsules[address]
        _exported.pop(address, None)
    else:
        retire(driver, _reclaim, address)


def device_of(array: Array) -> tuple[int, int]:
    """(DLPack device type, index) of an array's memory."""
    return (CUDA if array.device.driver.name == "cuda" else EXTENSION, array.device.index)


def export(
    array: Array,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> Any:
    """`Array.__dlpack__`: a capsule whose memory is ready for work queued on the consumer's `stream`.

    `stream` is a handle; 1 and None mean the legacy default stream, 2 the per-thread default stream, and -1 no
    ordering. The consumer must make the array's stream wait for the consumer's work on the memory before it drops its
    tensor. The memory is freed on the array's stream, and this free does not wait for the consumer's stream, which may
    be destroyed by then.
    """
    array.require_open()
    if dl_device is not None and tuple(dl_device) != device_of(array):
        raise BufferError(f"{array!r} is not on DLPack device {dl_device}")
    if copy:
        raise BufferError("drvfuse does not export copies")
    if stream is None and array.device.driver.name == "emu":
        # Refuse here, since torch 2.13 would raise a SystemError in place of its own error for an unknown device.
        why = "copy it to the host with .numpy(); a library that can use it must pass stream="
        raise BufferError(f"{array!r} is in the memory of an emulated device, which most libraries cannot use: {why}")
    if stream == 0:
        raise ArgumentError("stream", 0, "-1, None, 1, 2 or a stream handle (0 is ambiguous)")
    if stream != -1 and array.size:
        # The stream is not checked, since the consumer may pass a stream of another device, which can wait as well.
        Stream.unchecked(array.device, LEGACY if stream is None else stream).follow(array.stream)
    versioned = max_version is not None and max_version[0] >= 1
    managed: Any = (_ManagedVersioned if versioned else _Managed)()
    if versioned:
        managed.major, managed.minor = VERSION
    shape = (ctypes.c_int64 * max(len(array.shape), 1))(*array.shape)
    strides = (ctypes.c_int64 * max(len(array.shape), 1))(*_contiguous_strides(array.shape))
    tensor = managed.tensor
    tensor.data, tensor.ndim = array.ptr or None, len(array.shape)
    tensor.device.type, tensor.device.index = device_of(array)
    tensor.dtype.code, tensor.dtype.bits = array.dtype.dlpack
    tensor.dtype.lanes = array.dtype.lanes
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p).value
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, array)
    capsule = _capsule_new(address, _NAMES[versioned], None)
    _capsules[address] = [capsule]
    retire(array.device.driver, _reclaim, address)
    return capsule


def _contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return strides[::-1]


@dataclass(frozen=True)
class Description:
    """An array as a capsule or array interface describes it. `strides` count elements; None means C-contiguous."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    device_type: int
    device_index: int
    read_only: bool

    @property
    def contiguous(self) -> bool:
        if self.strides is None or 0 in self.shape:
            return True
        expected = _contiguous_strides(self.shape)
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.strides, expected, strict=True))


def read(capsule: Any, argument: str = "DLPack capsule") -> Description:
    """The description of a capsule that has not been consumed. Errors name the capsule `argument`.

    The memory lives as long as the capsule object does.
    """
    for versioned, name in _NAMES.items():
        if _is_valid(capsule, name):
            kind: Any = _ManagedVersioned if versioned else _Managed
            managed = kind.from_address(_get_pointer(capsule, name))
            break
    else:
        raise ArgumentError(argument, shown(capsule), "an unconsumed dltensor or dltensor_versioned")
    if versioned and managed.major != VERSION[0]:
        raise ArgumentError(argument, f"of DLPack version {managed.major}.{managed.minor}", "of version 1")
    tensor = managed.tensor
    count = tensor.ndim
    return Description(
        ptr=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[:count]),
        strides=tuple(tensor.strides[:count]) if tensor.strides else None,
        dtype=dtypes.from_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes, f"{argument}.dtype"),
        device_type=tensor.device.type,
        device_index=tensor.device.index,
        read_only=bool(versioned and managed.flags & _READ_ONLY),
    )


class _ExchangeApi(ctypes.Structure):
    """DLPack's structure DLPackExchangeAPI: a version, the address of the structure of an older version, and five
    functions. drvfuse calls only the last one, which tells the current stream of a device.
    """

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 4),
        ("current_work_stream", ctypes.c_void_p),
    ]


_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


def library_of(obj: Any) -> str:
    """The package that defines the type of an array, such as "torch"."""
    return type(obj).__module__.partition(".")[0]


def current_stream(obj: Any, device_type: int, device_index: int) -> StreamLike | None:
    """The current stream of the framework of `obj`: a handle, or an object that keeps the stream alive if the framework
    destroys streams. None if the framework gives no access to the stream."""
    library = library_of(obj)
    if library == "cupy":
        stream: StreamLike = sys.modules["cupy"].cuda.get_current_stream(device_index)
        return stream
    capsule = getattr(type(obj), "__dlpack_c_exchange_api__", None)
    if capsule is not None and _is_valid(capsule, b"dlpack_exchange_api"):
        table = _ExchangeApi.from_address(_get_pointer(capsule, b"dlpack_exchange_api"))
        if table.major == VERSION[0] and table.current_work_stream:
            handle = ctypes.c_void_p()
            if _CurrentStream(table.current_work_stream)(device_type, device_index, ctypes.byref(handle)) == 0:
                return handle.value or 0
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device_index).cuda_stream)
    return None


def on_device(obj: Any, where: Device, ordered: bool) -> AbstractContextManager[object]:
    """A context manager inside which the library of `obj` can export `obj`, which is on the device `where`. `ordered`
    says whether the export makes a stream of `where` wait for the work that writes `obj`.

    torch exports tensors of its current device only, so for torch this makes `where` torch's current device. It is not
    enough to change the driver's current context, since torch restores its device lazily.
    """
    if library_of(obj) == "torch":
        current: AbstractContextManager[object] = sys.modules["torch"].cuda.device(where.index)
        return current
    return where.use() if ordered else nullcontext()
