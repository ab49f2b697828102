# SPDX-License-Identifier: Apache-2.0
"""Reads single arguments of driver calls as cuda.bindings do: this module accepts the same values, and raises the same
errors.

The bindings are compiled, and convert arguments to C numbers by the rules of Cython. Every value with `__int__` is an
integer (64.0 and a numpy scalar are, "64" is not). A pointer to host memory is an integer, None or a contiguous buffer.
The functions here raise the exceptions of the bindings, with the same messages.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..space import mapped

_OF_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_WORD = 1 << 64
_HEADER = 64
_ELF, _FAT = b"\x7fELF", b"\x50\xed\x55\xba"
_WRAPPER = b"\xb1\x43\x62\x46"  # the magic number of nvcc's wrapper around a fat binary


class Invalid(Exception):
    """An argument that the bindings accept and the driver refuses, or on which the driver would crash. The call returns
    CUDA_ERROR_INVALID_VALUE. The text, if there is one, gives the reason.
    """


class Address(int):
    """An address, with `keep`, the object that keeps the memory alive. If the contents of the memory came with the
    message of a call, `origin` is the address of the caller's own memory, in the caller's process.
    """

    keep: Any = None
    origin: int | None = None

    @classmethod
    def of(cls, address: int, keep: Any) -> Address:
        made = cls(address)
        made.keep = keep
        return made


def integer(value: Any) -> int:
    """A value as a Python integer, by the rule of Cython: the value must have `__int__`; `__index__` is not enough."""
    if not hasattr(type(value), "__int__"):
        raise TypeError("an integer is required")
    return int(value)


def whole(value: Any, least: int, most: int, kind: str) -> int:
    """A value as a C integer from `least` to `most`. Raises TypeError, OverflowError or ValueError."""
    number = value if type(value) is int else integer(value)
    if least <= number <= most:
        return number
    if least == 0 and number < 0:
        raise OverflowError(f"can't convert negative value to {kind}")
    words = "unsigned long" if least == 0 else "long"
    if number >= _WORD or (least < 0 and not -(_WORD >> 1) <= number < _WORD >> 1) or most == _WORD - 1:
        raise OverflowError(f"Python int too large to convert to C {words}")
    raise OverflowError(f"value too large to convert to {kind}")


def real(value: Any) -> float:
    """A value as a C float."""
    return ctypes.c_float(math.ldexp(value, 0)).value


def type_name(value: Any) -> str:
    """The tp_name of a value's type, which has the module's name if the type is written in C and not built in."""
    kind = type(value)
    full = kind.__flags__ & _OF_C and kind.__module__ != "builtins"
    return f"{kind.__module__}.{kind.__name__}" if full else kind.__name__


def text(value: Any) -> bytes:
    """The bytes of a C string argument, up to the first NUL."""
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes, {type_name(value)} found")
    return bytes(value).split(b"\0", 1)[0]


def bytes_address(value: Any) -> Address:
    """The address of the contents of a bytes object, to which the call writes. The result keeps the object alive."""
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes, {type_name(value)} found")
    return buffer_address(value)


def host_address(value: Any) -> int:
    """The address of a host pointer: an integer, None, or a contiguous buffer, which the result keeps alive."""
    if type(value) is int and 0 <= value < _WORD or type(value) is Address:
        return value
    if value is None:
        return 0
    # An array with dimensions is a buffer. It is not tried as a number: numpy would convert one with a single element.
    if not isinstance(value, np.ndarray) or not value.ndim:
        try:
            return whole(value, 0, _WORD - 1, "unsigned PY_LONG_LONG")
        except Exception:  # after any exception, the bindings try the value as a buffer
            pass
    return buffer_address(value)


def buffer_address(value: Any) -> Address:
    """The address of a contiguous buffer."""
    if isinstance(value, np.ndarray):
        if not (value.flags.c_contiguous or value.flags.f_contiguous):
            raise ValueError("ndarray is not contiguous")
        return Address.of(int(value.ctypes.data), value)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            f"Provided argument is of type {type(value)} but expected Type None, int or object with Buffer Protocol"
        ) from None
    if not view.contiguous:
        raise BufferError("memoryview: underlying buffer is not contiguous")
    array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return Address.of(int(array.ctypes.data), array)


def image_bytes(image: Any) -> bytes | None:
    """The bytes of an image to load, which is given as bytes, a buffer or an address. None for no image.

    PTX at an address ends at its NUL. A fat binary has its size in its header. Of machine code only the header is read.
    Raises Invalid if the memory cannot be read.
    """
    address = host_address(image)
    if isinstance(address, Address):
        content = ctypes.string_at(address, address.keep.nbytes)
        inner = int.from_bytes(content[8:16], "little")
        if content[:4] != _WRAPPER or mapped.copied(inner, 16) is None:
            return content
    if address == 0:
        return None
    kind = _read(address, 4)
    if kind == _WRAPPER:
        address = int.from_bytes(_read(address + 8, 8), "little")
        kind = _read(address, 4)
    if kind == _FAT:
        header = _read(address, 16)
        return _read(address, int.from_bytes(header[6:8], "little") + int.from_bytes(header[8:16], "little"))
    return _read(address, _HEADER) if kind == _ELF else _found(mapped.string(address))


def _read(address: int, nbytes: int) -> bytes:
    if nbytes >> 40:  # no image is so large: the header that gives this size is wrong
        raise Invalid
    return _found(mapped.copied(address, nbytes) if nbytes <= 1 << 16 or mapped.readable(address, nbytes) else None)


def _found(content: bytes | None) -> bytes:
    if content is None:
        raise Invalid
    return content


def items(value: Any, fits: Callable[[Any], bool], expected: str, argument: str) -> list[Any]:
    """The elements of a list, a tuple or a similar sequence. Each must satisfy `fits`."""
    if not all(fits(item) for item in value):
        raise TypeError(
            f"Argument {argument!r} is not instance of type (expected tuple[{expected}] or list[{expected}]"
        )
    return [value[i] for i in range(len(value))]
