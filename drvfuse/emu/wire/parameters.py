# SPDX-License-Identifier: Apache-2.0
"""The parameter block of a kernel launch, out of the forms in which cuda.bindings take it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from .arguments import host_address, pointers

_EXTRA_END, _EXTRA_BUFFER, _EXTRA_SIZE = 0, 1, 2


class Layout(NamedTuple):
    """Size of a kernel's parameter block, and (offset, size) of each parameter in it."""

    nbytes: int
    parameters: tuple[tuple[int, int], ...]


def pack(layout: Layout, kernelParams: Any, extra: Any) -> bytes | None:
    """The parameter block of a launch, copied out of whichever form it was given in. None where parameters are missing,
    which the driver calls CUDA_ERROR_INVALID_VALUE. Raises TypeError or OverflowError as the bindings do.
    """
    block = bytearray(layout.nbytes)
    if not layout.parameters:
        return bytes(block)
    if kernelParams is None or (isinstance(kernelParams, int) and kernelParams == 0):
        return _from_extra(layout, extra)
    keep: Any
    if isinstance(kernelParams, tuple):
        if len(kernelParams) != 2 or len(kernelParams[0]) != len(kernelParams[1]):
            raise TypeError("Argument 'kernelParams' has tuples with different length")
        slots = [_slot(value, kind) for value, kind in zip(*kernelParams, strict=True)]
        if len(slots) < len(layout.parameters):
            return None
        addresses, keep = [address for address, _ in slots], slots
    else:
        address, keep = host_address(kernelParams)
        addresses = pointers(address, len(layout.parameters))
    for (offset, size), address in zip(layout.parameters, addresses, strict=False):
        if not address:
            return None
        block[offset : offset + size] = ctypes.string_at(address, size)
    del keep
    return bytes(block)


def _slot(value: Any, kind: Any) -> tuple[int, Any]:
    """(address of the value, what keeps it alive) of one entry of cuda.bindings' tuple form."""
    pointer = getattr(value, "getPtr", None)
    if kind is None:
        if callable(pointer):
            return pointer(), value
        if isinstance(value, ctypes.Structure):
            return ctypes.addressof(value), value
        if isinstance(value, int):  # an enum
            enum = ctypes.c_int64(value)
            return ctypes.addressof(enum), enum
        raise TypeError(
            f"Provided argument is of type {type(value)} but expected a structure or an object with getPtr()"
        )
    if kind is ctypes.c_void_p:
        if callable(pointer):
            value = pointer()
        raw = value.value or 0 if isinstance(value, ctypes.c_void_p) else int(value)
    else:
        if kind is ctypes.c_int and isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise OverflowError("value too large to convert to int")
        item = value if isinstance(value, kind) else kind(getattr(value, "value", value))
        padded = ctypes.create_string_buffer(bytes(item), 8)
        return ctypes.addressof(padded), padded
    whole = ctypes.c_uint64(raw)
    return ctypes.addressof(whole), whole


def _from_extra(layout: Layout, extra: Any) -> bytes | None:
    address = host_address(extra)[0]
    buffer = size = 0
    while address:
        key, value = struct.unpack("QQ", ctypes.string_at(address, 16))
        if key == _EXTRA_END:
            break
        if key not in (_EXTRA_BUFFER, _EXTRA_SIZE):
            return None
        if key == _EXTRA_BUFFER:
            buffer = value
        else:
            size = ctypes.c_size_t.from_address(value).value
        address += 16
    return ctypes.string_at(buffer, layout.nbytes) if buffer and size >= layout.nbytes else None


def lay_out(block: bytes, addresses: Sequence[int]) -> tuple[int, Any]:
    """(address of an array of pointers to the parameters of a block, what keeps it alive): a `kernelParams`.

    `addresses` are the parameters' offsets in the block.
    """
    memory = ctypes.create_string_buffer(block, len(block) + 1)
    start = ctypes.addressof(memory)
    array = (ctypes.c_void_p * (len(addresses) + 1))(*(start + offset for offset in addresses))
    return ctypes.addressof(array), (memory, array)
