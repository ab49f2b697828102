# SPDX-License-Identifier: Apache-2.0
"""Copies into an array: from host memory, and from arrays on any device of the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, foreign
from . import dlpack, interop
from .array import Array, mark_used

if TYPE_CHECKING:
    from ..dtypes import DType
    from .interop import ArrayLike

_CPU = 1  # DLPack's device type for ordinary host memory


def copy(target: Array, values: npt.ArrayLike | ArrayLike) -> None:
    """Copy `values` into `target`, as `Array.copy_from` describes."""
    if _on_device(values):
        _from_device(target, values)
    else:
        _from_host(target, np.asarray(values))


def _on_device(values: Any) -> TypeGuard[ArrayLike]:
    return isinstance(values, Array) or foreign("values", "host data or a device array", lambda: _told(values))


def _told(values: Any) -> bool:
    """Whether an object of another library says that it is in device memory. May raise any exception of that object."""
    if hasattr(values, "__cuda_array_interface__"):
        return True
    if not hasattr(values, "__dlpack_device__"):
        return False
    return int(values.__dlpack_device__()[0]) not in (_CPU, dlpack.CUDA_HOST)


def _check(target: Array, shape: tuple[int, ...], dtype: DType | np.dtype[Any]) -> None:
    if shape != target.shape:
        raise ArgumentError("values", f"of shape {shape}", f"of shape {target.shape}")
    if target.dtype != dtype:
        raise ArgumentError("values", f"of dtype {dtype}", f"of dtype {target.dtype}")


def _from_host(target: Array, values: np.ndarray[Any, Any]) -> None:
    _check(target, values.shape, target.dtype if values.dtype == target.dtype.numpy else values.dtype)
    if target.size:
        target.order(target.stream, "copied from the host")
        values = np.ascontiguousarray(values)
        with target.device.use():
            target.device.driver.cuMemcpyHtoDAsync(target.ptr, values.ctypes.data, target.nbytes, target.stream.handle)
        target.stream.synchronize()


def _from_device(target: Array, values: ArrayLike) -> None:
    driver, stream, device = target.device.driver, target.stream, target.device
    source, producer = interop.as_array(values, driver=driver, argument="values")
    _check(target, source.shape, source.dtype)
    if not target.size:
        return
    if source.ptr < target.ptr + target.nbytes and target.ptr < source.ptr + source.nbytes:
        expected = "memory that does not overlap the array"
        raise ArgumentError("values", f"{source!r}, which overlaps {target!r}", expected)
    target.order(stream, "copied to")
    source.order(stream, "copied")
    with device.use():
        if source.device is device:
            driver.cuMemcpyDtoDAsync(target.ptr, source.ptr, target.nbytes, stream.handle)
        else:
            contexts = device.context, source.device.context
            driver.cuMemcpyPeerAsync(target.ptr, contexts[0], source.ptr, contexts[1], target.nbytes, stream.handle)
    mark_used((target, source), stream, stream.mark() if stream.foreign else None)
    if not isinstance(values, Array) and (producer is None or not producer.foreign):
        stream.synchronize()  # since the library of `values` names no stream that could wait for the copy
    elif producer is not None and not producer.closed:
        producer.follow(stream)
