# SPDX-License-Identifier: Apache-2.0
"""Device arrays: a pointer, a shape and a dtype, C-contiguous, owned by a pool or borrowed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import dtypes
from ..dtypes import DType
from ..errors import ArgumentError, CaptureError
from .device import Device
from .pool import Block
from .stream import Event, Stream

if TYPE_CHECKING:
    import numpy as np


_INVALID_VALUE = 1


class Array:
    """A C-contiguous array in device memory. Make it with `device.empty/zeros/array` or `view`.

    `stream` is its home: it was allocated in that stream's order, `numpy` and `copy_from` work there, and it is freed
    there once it is dropped, after the work of every stream named to `used_on`. Zero elements are legal; ptr is 0 then.
    """

    __slots__ = ("__weakref__", "_block", "_owner", "device", "dtype", "nbytes", "ptr", "shape", "size", "stream")

    def __init__(
        self, ptr: int, shape: tuple[int, ...], dtype: DType, device: Device, stream: Stream, owner: Any = None
    ) -> None:
        self.ptr, self.shape, self.dtype, self.device, self.stream = ptr, shape, dtype, device, stream
        self.size = element_count(shape)
        self.nbytes = self.size * dtype.itemsize
        self._owner = owner
        self._block: Block | None = None

    def __repr__(self) -> str:
        return f"<Array {self.dtype}{list(self.shape)} at {self.ptr:#x} on device {self.device.index}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-dimensional array has no length")
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def pooled(self) -> bool:
        """True if the memory is from its device's own pool: those named to `Device.allow_peers` can access it."""
        return self._block is not None or (isinstance(self._owner, Array) and self._owner.pooled)

    def used_on(self, stream: Stream) -> None:
        """Tell the array that work on `stream` reads or writes it: its memory is reused only after that work."""
        if self._block is not None:
            self._block.used_on(stream)
        elif isinstance(self._owner, Array):
            self._owner.used_on(stream)

    def used_before(self, event: Event) -> None:
        """Like `used_on` for a foreign stream, which `event` (of `Stream.mark`) stands for."""
        if self._block is not None:
            self._block.used_before(event)
        elif isinstance(self._owner, Array):
            self._owner.used_before(event)

    def reshape(self, shape: Any) -> Array:
        """The same memory with another shape of as many elements; the result keeps this array alive."""
        new = check_shape(shape)
        if element_count(new) != self.size:
            raise ArgumentError("shape", new, f"a shape of {self.size} elements, as {self.shape} has")
        return Array(self.ptr, new, self.dtype, self.device, self.stream, self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory, made on the array's stream, which is synchronised, after all work that uses it."""
        import numpy as np

        host = np.empty(self.shape, self.dtype.numpy)
        if self.size:
            self._order("copied to the host")
            with self.device.use():
                self.device.driver.cuMemcpyDtoHAsync(host.ctypes.data, self.ptr, self.nbytes, self.stream.handle)
        self.stream.synchronize()
        return host

    def copy_from(self, values: np.ndarray[Any, Any]) -> None:
        """Overwrite the array; shape and dtype must match. Returns when `values` may be reused.

        Ordered on the array's stream and after the work of every other stream that uses the array. The stream is
        synchronised: the driver may read page-locked memory long after the copy was queued.
        """
        import numpy as np

        values = np.asarray(values)
        if values.shape != self.shape:
            raise ArgumentError("values", f"of shape {values.shape}", f"of shape {self.shape}")
        if values.dtype != self.dtype.numpy:
            raise ArgumentError("values", f"of dtype {values.dtype}", f"of dtype {self.dtype}")
        if self.size:
            self._order("copied from the host")
            values = np.ascontiguousarray(values)
            with self.device.use():
                self.device.driver.cuMemcpyHtoDAsync(self.ptr, values.ctypes.data, self.nbytes, self.stream.handle)
            self.stream.synchronize()

    def _order(self, what: str) -> None:
        if self.stream.capture_id() is not None:
            raise CaptureError(f"{self!r} cannot be {what} while its stream is captured")
        owner: Any = self
        while isinstance(owner, Array) and owner._block is None:
            owner = owner._owner
        if isinstance(owner, Array) and owner._block is not None:
            owner._block.order(self.stream)

    def __array__(self, *args: Any, **more: Any) -> Any:
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
    ) -> Any:
        """A DLPack capsule of this memory, safe to use on the consumer's `stream` (see the array API standard)."""
        from . import dlpack

        return dlpack.export(self, stream, max_version, dl_device, copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        named = self.dtype.name in dtypes.WITHOUT_TYPESTR
        return {
            "shape": self.shape,
            "typestr": f"<V{self.dtype.itemsize}" if named else self.dtype.numpy.str,
            "data": (self.ptr, False),
            "version": 3,
            "strides": None,
            "stream": self.stream.handle,
        }


def mark_used(arrays: Iterable[Array], stream: Stream, event: Event | None) -> None:
    """`used_on(stream)` of all `arrays`; for a foreign stream `event` stands for it, and None there means captured."""
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


def check_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints, from an int or a sequence; ArgumentError otherwise."""
    try:
        found = tuple(operator.index(n) for n in shape) if hasattr(shape, "__iter__") else (operator.index(shape),)
    except TypeError:
        raise ArgumentError("shape", repr(shape), "an int or a sequence of ints") from None
    if any(n < 0 for n in found):
        raise ArgumentError("shape", found, "a shape without negative lengths")
    return found


def empty(device: Device, shape: Any, dtype: Any, stream: Stream | None = None) -> Array:
    """See `Device.empty`."""
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


def zeros(device: Device, shape: Any, dtype: Any, stream: Stream | None = None) -> Array:
    """See `Device.zeros`."""
    array = empty(device, shape, dtype, stream)
    if array.nbytes:
        with device.use():
            device.driver.cuMemsetD8Async(array.ptr, 0, array.nbytes, array.stream.handle)
    return array


def from_numpy(device: Device, values: np.ndarray[Any, Any], stream: Stream | None = None) -> Array:
    """See `Device.array`."""
    import numpy as np

    values = np.asarray(values)
    array = empty(device, values.shape, dtypes.get(values.dtype, "values.dtype"), stream)
    array.copy_from(values)
    return array


def view(ptr: int, shape: Any, dtype: Any, device: Device, *, stream: Stream | None = None, owner: Any = None) -> Array:
    """An array over memory that somebody else owns, at `ptr` on `device`; `owner` is kept alive with it.

    `stream` (default: the device's own) is the one whose order its contents follow.
    """
    dimensions, element = check_shape(shape), dtypes.get(dtype)
    home = device.stream if stream is None else Stream.wrap(device, stream)
    address = operator.index(ptr)
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
