# SPDX-License-Identifier: Apache-2.0
"""The parameter block of a kernel launch, made from each form in which cuda.bindings accept parameters."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..space import mapped
from .arguments import Invalid, buffer_address, whole

_EXTRA_END, _EXTRA_BUFFER, _EXTRA_SIZE = 0, 1, 2
_SLOT = 8
_INT, _BYTE, _LONG = ctypes.c_int, ctypes.c_byte, ctypes.c_longlong
_KINDS = (
    *(ctypes.c_bool, ctypes.c_char, ctypes.c_wchar, ctypes.c_byte, ctypes.c_ubyte, ctypes.c_short, ctypes.c_ushort),
    *(ctypes.c_int, ctypes.c_uint, ctypes.c_long, ctypes.c_ulong, ctypes.c_longlong, ctypes.c_ulonglong),
    *(ctypes.c_size_t, ctypes.c_float, ctypes.c_double),
)
_WHOLE = {
    _INT: (-(1 << 31), (1 << 31) - 1, "int"),
    _BYTE: (-(1 << 7), (1 << 7) - 1, "int8_t"),
    _LONG: (-(1 << 63), (1 << 63) - 1, "long"),
}
"""Types for which the bindings check the range of an int. For other types, ctypes truncates it."""


class Layout(NamedTuple):
    """The size of a kernel's parameter block, and (offset, size) of each parameter in it."""

    nbytes: int
    parameters: tuple[tuple[int, int], ...]


class KernelParameters(NamedTuple):
    """The parameters of a launch, given as values and types. `addresses` are the addresses of their values."""

    addresses: list[int]
    keep: list[Any]

    @classmethod
    def read(cls, value: Any) -> KernelParameters | int:
        """Read the argument `kernelParams`: the address of an array of pointers, or the values. Raises what the
        bindings raise.
        """
        if value is None:
            return 0
        if isinstance(value, int):
            return whole(value, 0, (1 << 64) - 1, "unsigned PY_LONG_LONG")
        if not isinstance(value, tuple):
            try:
                return buffer_address(value)
            except TypeError:
                pass
        elif len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], tuple):
            if len(value[0]) != len(value[1]):
                raise TypeError("Argument 'kernelParams' has tuples with different length")
            slots = [_slot(item, kind) for item, kind in zip(*value, strict=True)]
            return cls([address for address, _ in slots], [keep for _, keep in slots]) if slots else 0
        raise TypeError(
            "Argument 'kernelParams' is not a valid type: tuple[tuple[Any, ...], tuple[Any, ...]] or PyObject "
            "implimenting Buffer Protocol or Int"
        )


def pack(layout: Layout, kernelParams: KernelParameters | int, extra: int) -> bytes | None:
    """A copy of the parameter block of a launch. `kernelParams` is a result of `KernelParameters.read`; if it is 0, the
    parameters are in `extra`. Returns None if parameters are missing or cannot be read; the call then returns
    CUDA_ERROR_INVALID_VALUE.
    """
    wanted = layout.parameters
    if not wanted:
        return bytes(layout.nbytes)
    if isinstance(kernelParams, KernelParameters):
        if len(kernelParams.addresses) < len(wanted):
            return None
        block = bytearray(layout.nbytes)
        for (offset, size), address in zip(wanted, kernelParams.addresses, strict=False):
            # like the driver, read as many bytes as the parameter has, even if the value is smaller
            value = ctypes.string_at(address, size) if size <= _SLOT else mapped.copied(address, size)
            if value is None:
                return None
            block[offset : offset + size] = value
        return bytes(block)
    if kernelParams == 0:
        return _from_extra(layout, extra)
    pointers = mapped.copied(kernelParams, 8 * len(wanted))
    if pointers is None:
        return None
    addresses = struct.unpack(f"{len(wanted)}Q", pointers)
    content = mapped.gathered([(address, size) for (_, size), address in zip(wanted, addresses, strict=True)])
    return None if content is None else _spread(layout, content)


def _spread(layout: Layout, content: bytes) -> bytes:
    """A parameter block from the bytes of its parameters, which follow one another without gaps."""
    block, at = bytearray(layout.nbytes), 0
    for offset, size in layout.parameters:
        block[offset : offset + size] = content[at : at + size]
        at += size
    return bytes(block)


def _slot(value: Any, kind: Any) -> tuple[int, Any]:
    """(address of the value, the object that keeps it alive) of one entry in the tuple form of cuda.bindings."""
    if kind is None:
        return _structure(value)
    if kind is ctypes.c_void_p:
        made = (ctypes.c_uint64 * 1)(_pointer(value))
        return ctypes.addressof(made), made
    if kind not in _KINDS:
        raise TypeError(f"Unsupported type: {kind!r}")
    if type(value) is int and kind in _WHOLE:
        value = whole(value, *_WHOLE[kind])
    elif kind is ctypes.c_double and isinstance(value, ctypes.c_float):
        value = value.value
    if not isinstance(value, kind):
        made = kind(value)  # has room for _SLOT bytes, as a new ctypes object has room for 16, whatever its type
        return ctypes.addressof(made), made
    return _padded(value)


def _padded(value: Any) -> tuple[int, Any]:
    """(address, object that keeps it alive) of a copy of a small value. The copy has _SLOT bytes, because `pack` may
    read up to _SLOT bytes, and a page may end after the bytes of the value itself.
    """
    padded = ctypes.create_string_buffer(bytes(value), _SLOT)
    return ctypes.addressof(padded), padded


def _structure(value: Any) -> tuple[int, Any]:
    pointer = getattr(value, "getPtr", None)
    if callable(pointer):
        address = int(pointer())
        if not mapped.readable(address, _SLOT):
            raise Invalid
        return address, value
    if isinstance(value, ctypes.Structure):
        if ctypes.sizeof(value) >= _SLOT:
            return ctypes.addressof(value), value
        return _padded(value)
    if isinstance(value, int) and hasattr(type(value), "__members__"):  # the type is an enum
        made = ctypes.c_int64(value)
        return ctypes.addressof(made), made
    raise TypeError(
        f"Provided argument is of type {type(value)} but expected Type {ctypes.Structure}, {ctypes.c_void_p} or CUDA "
        "Binding structure with getPtr() attribute"
    )


def _pointer(value: Any) -> int:
    if isinstance(value, int | ctypes.c_void_p):
        number = value.value if isinstance(value, ctypes.c_void_p) else value
        return whole(number, 0, (1 << 64) - 1, "unsigned PY_LONG_LONG")
    pointer = getattr(value, "getPtr", None)
    if not callable(pointer):
        raise TypeError(
            f"Provided argument is of type {type(value)} but expected Type {int}, {ctypes.c_void_p} or CUDA Binding "
            "structure with getPtr() attribute"
        )
    return int(pointer())


def _from_extra(layout: Layout, extra: int) -> bytes | None:
    buffer = size = 0
    while extra:
        pair = mapped.copied(extra, 16)
        if pair is None:
            return None
        key, value = struct.unpack("QQ", pair)
        if key == _EXTRA_END:
            break
        if key == _EXTRA_BUFFER:
            buffer = value
        elif key == _EXTRA_SIZE:
            size = int.from_bytes(mapped.copied(value, 8) or b"", "little")
        else:
            return None
        extra += 16
    return mapped.copied(buffer, layout.nbytes) if buffer and size >= layout.nbytes else None


def lay_out(block: bytes, offsets: Sequence[int]) -> tuple[int, Any]:
    """The `kernelParams` for a parameter block: (address of an array of pointers to the parameters, the object that
    keeps the array alive).

    `offsets` are the offsets of the parameters in the block.
    """
    memory = ctypes.create_string_buffer(block, len(block) + 1)
    start = ctypes.addressof(memory)
    array = (ctypes.c_void_p * (len(offsets) + 1))(*(start + offset for offset in offsets))
    return ctypes.addressof(array), (memory, array)
