# SPDX-License-Identifier: Apache-2.0
"""Device arrays: a pointer, a shape and a dtype. They are C-contiguous. A pool or another object owns their memory."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, SupportsInt

from .. import dtypes
from ..dtypes import DType, DTypeLike
from ..errors import ArgumentError, CaptureError, counted, foreign, kind_of, require_integer, require_kind, shown
from .device import Device
from .lifetime import Dependent, Owned
from .pool import Block
from .stream import Event, Stream, StreamLike

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .interop import ArrayLike

ShapeLike = SupportsIndex | Iterable[SupportsIndex]
"""A shape: the number of elements, or the length of each dimension."""

_INVALID_VALUE = 1
_MOST_ELEMENTS = 1 << 63
_ADDRESS = "an address as an int or a CUdeviceptr"


class Array:
    """A C-contiguous array in device memory. Make it with `device.empty`, `zeros` or `array`, with those of a rank, or
    with `view`.

    `shape` has the lengths of the dimensions, `dtype` is a DType, `ptr` the address as an int, `size` the number of
    elements, `nbytes` their bytes, and `device` the Device. An array may have no elements; `ptr` is 0 then.

    `array[2:5]` and `array[i]` are views of a part of the first dimension, which keep the memory alive. The array is
    allocated in the order of `stream`, and `numpy` and `copy_from` work on that stream. When the array is dropped, it
    is freed on that stream, after the work of every stream that was passed to `used_on`. Other libraries take the array
    by DLPack or `__cuda_array_interface__`.

    >>> x = df.device(0, driver="emu").array(np.arange(6, dtype=np.float32)).reshape((2, 3))
    >>> x[1].numpy()
    array([3., 4., 5.], dtype=float32)
    """

    __slots__ = (
        *("__weakref__", "_block", "_layout", "_owner"),
        *("device", "dtype", "nbytes", "ptr", "shape", "size", "stream"),
    )

    def __init__(
        self, ptr: int, shape: tuple[int, ...], dtype: DType, device: Device, stream: Stream, owner: object = None
    ) -> None:
        self.ptr, self.shape, self.dtype, self.device, self.stream = ptr, shape, dtype, device, stream
        self.size = element_count(shape)
        self.nbytes = self.size * dtype.itemsize
        self._block: Block | None = None
        self._layout: tuple[Device, str, tuple[int, ...], int] | None = None
        self._owner: object = owner
        if isinstance(owner, Array):
            self._block = owner._block
            self._owner = owner if owner._owner is None else owner._owner

    def __repr__(self) -> str:
        return f"<Array {self.dtype}{list(self.shape)} at {self.ptr:#x} on device {self.device.index}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-dimensional array has no length")
        return self.shape[0]

    def __getitem__(self, index: SupportsIndex | slice) -> Array:
        """A view of the elements at one index of the first dimension, or at a slice of it with step 1. For one index
        the view lacks the first dimension.

        Raises IndexError for an int outside the first dimension, and ArgumentError for any other index.
        """
        length = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(length)
            shape = (max(stop - start, 0), *self.shape[1:])
        else:
            expected = "an int or a slice, of the first dimension only"
            start, step, shape = require_integer("index", index, expected), 1, self.shape[1:]
            if not -length <= start < length:
                raise IndexError(f"index {start} is outside the first dimension of {self!r}")
            start %= length
        if step != 1:
            raise ArgumentError("index", shown(index), "a slice of step 1, as an array is contiguous")
        return self._view(start * element_count(self.shape[1:]), shape)

    def _view(self, start: int, shape: tuple[int, ...]) -> Array:
        """A view of another shape from element `start` on, which keeps the owner of the memory alive."""
        ptr = self.ptr + start * self.dtype.itemsize if element_count(shape) else 0
        return Array(ptr, shape, self.dtype, self.device, self.stream, self)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def layout(self) -> tuple[Device, str, tuple[int, ...], int]:
        """Device, dtype, shape, and the address modulo 16 bytes: what a repeated call of an op compares in place of the
        array itself.
        """
        found = self._layout
        if found is None:
            found = self._layout = self.device, self.dtype.name, self.shape, self.ptr % 16
        return found

    @property
    def pooled(self) -> bool:
        """True if the memory comes from its device's own pool, to which `Device.allow_peers` gives other devices
        access.
        """
        return self._block is not None

    def used_on(self, stream: Stream) -> None:
        """Tell the array that work on `stream` reads or writes it: its memory is reused only after that work. Ops and
        kernels of drvfuse call this method themselves.
        """
        require_kind("stream", stream, Stream, "a drvfuse.Stream")
        if self._block is not None:
            self._block.used_on(stream)

    def used_before(self, event: Event) -> None:
        """Tell the array that work on a foreign stream reads or writes it. `Stream.mark` has recorded `event` after
        that work, and the memory is reused only after `event`.
        """
        require_kind("event", event, Event, "a drvfuse.Event")
        if self._block is not None:
            self._block.used_before(event)

    def reshape(self, shape: ShapeLike) -> Array:
        """The same memory with another shape of the same number of elements. The result keeps the memory alive.

        One length may be -1: it follows from the others.
        """
        lengths = _integers(shape)
        if -1 in lengths:
            rest = element_count(tuple(n for n in lengths if n != -1))
            if lengths.count(-1) > 1 or not rest or self.size % rest:
                raise ArgumentError(
                    "shape", lengths, f"a shape of {counted(self.size, 'element')}, with at most one -1"
                )
            lengths = tuple(self.size // rest if n == -1 else n for n in lengths)
        new = check_shape(lengths)
        if element_count(new) != self.size:
            raise ArgumentError("shape", new, f"a shape of {counted(self.size, 'element')}, as {self.shape} has")
        return self._view(0, new)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory, of the numpy type `dtype.numpy` (of ml_dtypes for bfloat16 and FP8, uint8 for FP4).

        The copy is made on the array's stream after all work that uses the array, and the stream is synchronised. The
        method does not report kernels that gave up waiting: `Group.check` does. Raises CaptureError while a stream that
        uses the array is being captured.
        """
        import numpy as np

        host = np.empty(self.shape, self.dtype.numpy)
        if self.size:
            self.order(self.stream, "copied to the host")
            with self.device.use():
                self.device.driver.cuMemcpyDtoHAsync(host.ctypes.data, self.ptr, self.nbytes, self.stream.handle)
        self.stream.synchronize()
        return host

    def copy_from(self, values: npt.ArrayLike | ArrayLike) -> None:
        """Overwrite the array with a numpy array or a device array of the same shape and dtype.

        The copy is ordered on the array's stream, after the work of every other stream that uses the array. Raises
        CaptureError while the array's stream is being captured.

        If `values` is a numpy array, the method synchronises the stream, and `values` may be changed when it returns.

        If `values` is a device array of drvfuse or of another library, on any device of the same driver, the copy is
        ordered after the work that writes `values`, and later work on the stream of `values` is ordered after the copy.
        The method does not block, unless the library of `values` does not tell the stream of `values`: then it waits
        for the copy. `values` must not overlap the array.
        """
        from . import copies

        copies.copy(self, values)

    def order(self, stream: Stream, what: str) -> None:
        """Order later work on `stream` after all earlier uses of this memory.

        Raises CaptureError while a capture uses the array. `what` ends the message's "cannot be ...", for example
        "copied to the host".
        """
        self.require_open()
        stream._check_open()
        if not self.stream.closed and self.stream.capture_id() is not None:
            raise CaptureError(f"{self!r} cannot be {what} while its stream is captured")
        if self._block is not None:
            self._block.order(stream)
        stream.follow(self.stream)

    @property
    def closable(self) -> bool:
        """Whether the memory belongs to a buffer, whose `close()` frees it."""
        return isinstance(self._owner, Owned)

    def require_open(self) -> None:
        """Raise ClosedError if the memory belongs to a buffer that was closed."""
        if isinstance(self._owner, Owned):
            self._owner._check_open()

    def __array__(self, *args: object, **more: object) -> NoReturn:
        raise TypeError(f"{self!r} is in device memory: copy it to the host with .numpy()")

    def __dlpack_device__(self) -> tuple[int, int]:
        from . import dlpack

        return dlpack.device_of(self)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule of this memory, safe to use on the consumer's `stream` (see the array API standard)."""
        from . import dlpack

        return dlpack.export(self, stream, max_version, dl_device, copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.require_open()
        named = self.dtype.name in dtypes.WITHOUT_TYPESTR
        return {
            "shape": self.shape,
            "typestr": f"<V{self.dtype.itemsize}" if named else self.dtype.numpy.str,
            "data": (self.ptr, False),
            "version": 3,
            "strides": None,
            "stream": self.stream.handle,
        }


def depend_on(arrays: Iterable[Array], dependent: Dependent) -> None:
    """Let `dependent` know when the memory of one of `arrays` is freed by the `close()` of its owner."""
    for array in arrays:
        if isinstance(array._owner, Owned):
            array._owner.tell(dependent)


def mark_used(arrays: Iterable[Array], stream: Stream, event: Event | None) -> None:
    """Call `used_on(stream)` of all `arrays` or, if `stream` is foreign, `used_before(event)`. While a foreign stream
    is being captured, `event` is None, and neither method is called.
    """
    for array in arrays:
        if array._block is not None and array._block.home is stream:
            continue
        if event is not None:
            array.used_before(event)
        elif not stream.foreign:
            array.used_on(stream)


def element_count(shape: tuple[int, ...]) -> int:
    """Product of the lengths; 1 for a scalar."""
    count = 1
    for length in shape:
        count *= length
    return count


def check_shape(shape: ShapeLike) -> tuple[int, ...]:
    """A shape as a tuple of ints, from an int or a sequence; ArgumentError otherwise."""
    found = _integers(shape)
    if any(n < 0 for n in found):
        raise ArgumentError("shape", found, "a shape without negative lengths")
    return found


def _integers(shape: ShapeLike) -> tuple[int, ...]:
    expected = "an int or a sequence of ints, of fewer than 2^63 elements in all"
    several = foreign("shape", expected, lambda: tuple(shape) if isinstance(shape, Iterable) else (shape,))
    lengths = tuple(n if type(n) is int else require_integer("shape", n, expected) for n in several)
    if math.prod(lengths) >= _MOST_ELEMENTS:
        raise ArgumentError("shape", shown(lengths), expected)
    return lengths


def allocate(device: Device, shape: ShapeLike, dtype: DTypeLike, stream: StreamLike | None = None) -> Array:
    """Allocate an array, as `Device.empty` describes."""
    dimensions, element = check_shape(shape), dtypes.get(dtype)
    home = device.stream if stream is None else Stream.wrap(device, stream)
    nbytes = element_count(dimensions) * element.itemsize
    if not nbytes:
        return Array(0, dimensions, element, device, home)
    pool = device.pool
    block = pool.allocate(nbytes, home)
    array = Array(block.ptr, dimensions, element, device, home)
    array._block = block
    pool.free_with(array, block)
    return array


def from_numpy(device: Device, values: npt.ArrayLike, stream: StreamLike | None = None) -> Array:
    """Copy host data to a new array, as `Device.array` describes."""
    import numpy as np

    if isinstance(values, Array):
        raise ArgumentError("values", shown(values), "host data; copy a device array with empty(...).copy_from(...)")
    values = np.asarray(values)
    array = allocate(device, values.shape, dtypes.get(values.dtype, "values.dtype"), stream)
    array.copy_from(values)
    return array


def address_of(ptr: SupportsIndex | SupportsInt) -> int:
    """The address in an int or in a pointer object of the bindings (CUdeviceptr), which has no `__index__`.

    Raises TypeError for all other objects, also for floats, strings and arrays that `int` would convert.
    """
    if isinstance(ptr, numbers.Number) or hasattr(ptr, "dtype") or not hasattr(ptr, "__int__"):
        return operator.index(ptr)  # type: ignore[arg-type]
    return int(ptr)


def view(
    ptr: SupportsIndex | SupportsInt,
    shape: ShapeLike,
    dtype: DTypeLike,
    device: Device,
    *,
    stream: StreamLike | None = None,
    owner: object = None,
) -> Array:
    """An array over memory at `ptr` on `device` that drvfuse does not own and does not free.

    `ptr` is an address, as an int or a CUdeviceptr, and a multiple of the element's size. The memory must hold
    an array of `shape` and `dtype` for as long as the view is used; the view keeps `owner` alive. The contents are read
    and written in the order of `stream`, by default the device's own. Nothing is copied, and no work is queued.

    Raises ArgumentError for a wrong address, and for memory that the driver does not know, such as that of the host.
    """
    require_kind("device", device, Device, "a drvfuse.Device")
    dimensions, element = check_shape(shape), dtypes.get(dtype)
    home = device.stream if stream is None else Stream.wrap(device, stream)
    try:
        address = address_of(ptr)
    except Exception as error:
        raise ArgumentError("ptr", kind_of(ptr), _ADDRESS) from (None if type(error) is TypeError else error)
    if not 0 <= address < 1 << 64:
        raise ArgumentError("ptr", hex(address), _ADDRESS)
    if address % element.itemsize:
        raise ArgumentError("ptr", hex(address), f"a multiple of {element.itemsize}, the size of {element}")
    if not address and element_count(dimensions):
        raise ArgumentError("ptr", 0, "the address of device memory")
    if element_count(dimensions):
        _check_known(device, address)
    return Array(address, dimensions, element, device, home, owner)


def _check_known(device: Device, address: int) -> None:
    """Refuse memory that the driver does not know, unless the device can read any memory of the process."""
    types = device.driver.types
    code, *_ = device.driver.result(
        "cuPointerGetAttribute", types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address
    )
    if int(code) == _INVALID_VALUE and not device.attribute("PAGEABLE_MEMORY_ACCESS"):
        raise ArgumentError("ptr", hex(address), f"memory of the {device.driver.name} driver, not of the host")
