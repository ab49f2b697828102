# SPDX-License-Identifier: Apache-2.0
"""Reading the arguments of driver calls as cuda.bindings do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_BINARY = (b"\x7fELF", b"\x50\xed\x55\xba", b"\xb1\x43\x62\x46")
_BINARY_HEADER = 64


def number(value: Any) -> int:
    """An int, or a cuda.bindings handle or pointer; None is 0. Raises TypeError as the bindings do."""
    return 0 if value is None else int(value)


def whole(value: Any, least: int, most: int, kind: str) -> int:
    """A C integer of a range: what has `__index__` or `__int__`. Raises TypeError or OverflowError."""
    if type(value) is not int:
        if isinstance(value, str | bytes | bytearray) or not (hasattr(value, "__index__") or hasattr(value, "__int__")):
            raise TypeError(f"an integer is required ({kind}), got {type(value).__name__}")
        value = int(value)
    if not least <= value <= most:
        raise OverflowError(f"{value} does not fit into {kind}")
    return int(value)


def is_enum(value: Any, kind: Any, argument: str) -> None:
    """Raise TypeError, as the bindings do, for anything but a member of the enum."""
    if not isinstance(value, kind):
        raise TypeError(
            f"Argument {argument!r} has incorrect type (expected {kind.__name__}, got {type(value).__name__})"
        )


def text(value: Any) -> str:
    """A C string argument, which the bindings take as bytes."""
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes, {type(value).__name__} found")
    return bytes(value).decode()


def host_address(value: Any) -> tuple[int, Any]:
    """(address, what keeps it alive) of a host pointer argument: an int, None, or any contiguous buffer."""
    if value is None:
        return 0, None
    if isinstance(value, int):
        return value, None
    if isinstance(value, np.ndarray):
        if not (value.flags.c_contiguous or value.flags.f_contiguous):
            raise RuntimeError("Failed to retrieve buffer through Buffer Protocol")
        return int(value.ctypes.data), value
    try:
        view = memoryview(value)
    except TypeError:
        try:
            return int(value), None
        except TypeError:
            raise TypeError(
                f"Provided argument is of type {type(value)} but expected Type None, int or object with Buffer Protocol"
            ) from None
    array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return int(array.ctypes.data), array


def pointers(address: int, count: int) -> list[int]:
    """`count` pointers of a C array at `address`."""
    return [int(p or 0) for p in (ctypes.c_void_p * count).from_address(address)] if count else []


def image_bytes(image: Any) -> bytes | None:
    """An image to load (bytes, a buffer, or the address of a C string); None for none. Of machine code at an address,
    whose size only itself knows, the header.
    """
    if image is None:
        return None
    if isinstance(image, int):
        if image == 0:
            return None
        binary = ctypes.string_at(image, 4) in _BINARY
        return ctypes.string_at(image, _BINARY_HEADER) if binary else ctypes.string_at(image)
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    return bytes(np.asarray(memoryview(image)).view(np.uint8))
