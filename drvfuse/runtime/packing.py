# SPDX-License-Identifier: Apache-2.0
"""Kernel arguments: checked against the compiled kernel's parameters and packed once into one buffer."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, SupportsInt, TypeAlias, TypeVar

from ..errors import ArgumentError, counted, kind_of, require_integer, shown
from ..ptx.facts import KernelInfo, Param
from .array import Array, address_of
from .device import Device

Struct = TypeVar("Struct", bound=ctypes.Structure)
if TYPE_CHECKING:
    import numpy as np

Argument: TypeAlias = (
    "Array | SupportsIndex | SupportsInt | float | bytes | bytearray | memoryview | ctypes.Structure | np.generic"
)
"""The value of a kernel's parameter: an Array or an int for an integer or a pointer, a number for a floating-point
parameter, bytes or a ctypes.Structure of the exact size for a struct."""

_FLOATS = {4: struct.Struct("<f"), 8: struct.Struct("<d")}


class Arguments:
    """The packed arguments of one launch. `packed` has each argument at the offset of its parameter; `address` is the
    void** that cuLaunchKernelEx takes.

    An integer parameter takes an Array or an int, and a pointer, an integer of 8 bytes, also takes a CUdeviceptr. A
    float parameter takes a number. A struct takes any buffer of its exact size: bytes, a ctypes.Structure or a numpy
    scalar. An int must fit the parameter, signed or unsigned. Each launch copies `packed`, so the arguments may be
    changed right after a launch.
    """

    def __init__(self, info: KernelInfo, values: Sequence[Argument], device: Device) -> None:
        if len(values) != len(info.params):
            raise ArgumentError(
                f"arguments of {info.name}", counted(len(values), "value"), counted(len(info.params), "value")
            )
        self._info, self._device = info, device
        self.packed = bytearray(max(info.param_bytes, 1))
        self._exported = ctypes.c_ubyte.from_buffer(self.packed)  # while this object lives, `packed` cannot move
        base = ctypes.addressof(self._exported)
        self._pointers = (ctypes.c_void_p * max(len(values), 1))(*(base + param.offset for param in info.params))
        self.address = ctypes.addressof(self._pointers)
        self.arrays: dict[int, Array] = {}
        self.structures: dict[int, type[ctypes.Structure]] = {}
        for index, value in enumerate(values):
            self.set(index, value)

    def set(self, index: int, value: Argument) -> None:
        """Rewrite one argument in place, with the checks of the constructor."""
        params = self._info.params
        if type(index) is not int or not 0 <= index < len(params):
            expected = f"an argument of {self._info.name}, 0 to {len(params) - 1}"
            index = require_integer("index", index, expected, 0, len(params) - 1)
        param = params[index]
        packed = _PACK[param.kind](self, index, param, value)
        self.packed[param.offset : param.offset + param.size] = packed
        if isinstance(value, Array):
            self.arrays[index] = value
        else:
            self.arrays.pop(index, None)
            if isinstance(value, ctypes.Structure):
                self.structures[index] = type(value)

    def view(self, index: int, kind: type[Struct]) -> Struct:
        """One argument as a struct of class `kind` in place: writing to the struct changes the argument. Raises
        ArgumentError if the parameter has another size."""
        param = self._info.params[index]
        if param.size != ctypes.sizeof(kind):
            raise self._wrong(
                index,
                f"a {kind.__name__} of {counted(ctypes.sizeof(kind), 'byte')}",
                f"of {counted(param.size, 'byte')}",
            )
        return kind.from_buffer(self.packed, param.offset)

    def _wrong(self, index: int, value: object, expected: str) -> ArgumentError:
        return ArgumentError(f"argument {index} of {self._info.name} (counted from 0)", _shown(value), expected)

    def _integer(self, index: int, param: Param, value: Any) -> bytes:
        if isinstance(value, Array):
            value.require_open()
            if param.size != 8:
                raise self._wrong(index, value, f"an int of {8 * param.size} bits")
            if value.device is not self._device:
                why = "where the kernel runs, as device= or else its first array says"
                must = f"on device {self._device.index}, {why}; an array of a peer is passed as its .ptr"
                raise self._wrong(index, value, must)
            return value.ptr.to_bytes(8, "little")
        try:
            number = address_of(value) if param.size == 8 else operator.index(value)
        except Exception:
            expected = "an Array or an int" if param.size == 8 else f"an int of {8 * param.size} bits"
            raise self._wrong(index, value, expected) from None
        bits = 8 * param.size
        if not -(1 << (bits - 1)) <= number < 1 << bits:
            raise self._wrong(index, value, f"an int of {bits} bits")
        return (number & ((1 << bits) - 1)).to_bytes(param.size, "little")

    def _floating(self, index: int, param: Param, value: Any) -> bytes:
        if isinstance(value, (str, bytes, Array)):
            raise self._wrong(index, value, "a number")
        try:
            return _FLOATS[param.size].pack(value)
        except (struct.error, TypeError, ValueError, RuntimeError):
            raise self._wrong(index, value, "a number") from None
        except OverflowError:
            raise self._wrong(index, value, f"a number that fits a {8 * param.size}-bit float") from None

    def _bytes(self, index: int, param: Param, value: Any) -> bytes:
        try:
            packed = memoryview(value).tobytes()
        except (TypeError, ValueError):
            raise self._wrong(index, value, f"a buffer of {counted(param.size, 'byte')} (a struct by value)") from None
        if len(packed) != param.size:
            raise self._wrong(
                index, f"a buffer of {counted(len(packed), 'byte')}", f"a buffer of {counted(param.size, 'byte')}"
            )
        return packed


def _shown(value: object) -> str:
    if isinstance(value, (int, float, str, Array)):
        return shown(value)
    return kind_of(value)


_PACK = {"int": Arguments._integer, "float": Arguments._floating, "bytes": Arguments._bytes}
