# SPDX-License-Identifier: Apache-2.0
"""Single arguments of driver calls, read as cuda.bindings read them: what they take, and what they raise.

The bindings are compiled, and their arguments become numbers of C by Cython's rules: an integer is whatever has
`__int__` (so 64.0 and a numpy scalar are, and "64" is not), a pointer to host memory is an integer, None or a
contiguous buffer. Everything here raises what they raise, with their words.
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
_WRAPPER = b"\xb1\x43\x62\x46"  # what nvcc puts around a fat binary


class Invalid(Exception):
    """An argument that the bindings take and the driver refuses, or would crash on: CUDA_ERROR_INVALID_VALUE. Its text,
    if there is one, says what the code alone does not.
    """


class Address(int):
    """An address, and what has to live as long as it is used. `origin` is the address at the caller's end of memory
    that has come along with a call.
    """

    keep: Any = None
    origin: int | None = None

    @classmethod
    def of(cls, address: int, keep: Any) -> Address:
        made = cls(address)
        made.keep = keep
        return made


def integer(value: Any) -> int:
    """A Python integer by the rule of Cython: whatever has `__int__`, and not what has `__index__` alone."""
    if not hasattr(type(value), "__int__"):
        raise TypeError("an integer is required")
    return int(value)


def whole(value: Any, least: int, most: int, kind: str) -> int:
    """A value as a C integer of a range. Raises TypeError, OverflowError or ValueError."""
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
    """The tp_name of a value's type: with its module, if it is written in C and not a builtin type."""
    kind = type(value)
    full = kind.__flags__ & _OF_C and kind.__module__ != "builtins"
    return f"{kind.__module__}.{kind.__name__}" if full else kind.__name__


def text(value: Any) -> bytes:
    """A C string, which ends at its first NUL."""
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes, {type_name(value)} found")
    return bytes(value).split(b"\0", 1)[0]


def bytes_address(value: Any) -> Address:
    """The address of the content of a bytes object, which the call writes. It keeps the object alive."""
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes, {type_name(value)} found")
    return buffer_address(value)


def host_address(value: Any) -> int:
    """The address of a host pointer: an integer, None, or any contiguous buffer, which it keeps then."""
    if type(value) is int and 0 <= value < _WORD or type(value) is Address:
        return value
    if value is None:
        return 0
    if not isinstance(value, np.ndarray) or not value.ndim:  # numpy converts an array with one element to a number, too
        try:
            return whole(value, 0, _WORD - 1, "unsigned PY_LONG_LONG")
        except Exception:  # of any kind: the bindings try the value as a buffer then
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
    """An image to load (bytes, a buffer, or an address); None for none.

    At an address there is PTX, which ends at its NUL, a fat binary, whose header has its size, or machine code, of
    which the header is enough. Raises Invalid where nothing can be read there.
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
    if nbytes >> 40:  # larger than any image
        raise Invalid
    return _found(mapped.copied(address, nbytes) if nbytes <= 1 << 16 or mapped.readable(address, nbytes) else None)


def _found(content: bytes | None) -> bytes:
    if content is None:
        raise Invalid
    return content


def items(value: Any, fits: Callable[[Any], bool], expected: str, argument: str) -> list[Any]:
    """The elements of a list, a tuple or anything like them."""
    if not all(fits(item) for item in value):
        raise TypeError(
            f"Argument {argument!r} is not instance of type (expected tuple[{expected}] or list[{expected}]"
        )
    return [value[i] for i in range(len(value))]
