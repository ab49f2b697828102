# SPDX-License-Identifier: Apache-2.0
"""Values of the options for loading and linking code: numbers, enums, and buffers to which the driver writes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .arguments import Address, bytes_address, integer, real, text
from .scalars import Scalar

_UNSIGNED = {
    *("MAX_REGISTERS", "THREADS_PER_BLOCK", "INFO_LOG_BUFFER_SIZE_BYTES", "ERROR_LOG_BUFFER_SIZE_BYTES"),
    *("OPTIMIZATION_LEVEL", "GLOBAL_SYMBOL_COUNT", "TARGET_FROM_CUCONTEXT", "REFERENCED_KERNEL_COUNT"),
    *("REFERENCED_VARIABLE_COUNT", "MIN_CTA_PER_SM", "CU_LIBRARY_BINARY_IS_PRESERVED"),
}
_SIGNED = {
    *("GENERATE_DEBUG_INFO", "LOG_VERBOSE", "GENERATE_LINE_INFO", "LTO", "FTZ", "PREC_DIV", "PREC_SQRT", "FMA"),
    *("OPTIMIZE_UNUSED_DEVICE_VARIABLES", "POSITION_INDEPENDENT_CODE", "MAX_THREADS_PER_BLOCK"),
    "OVERRIDE_DIRECTIVE_VALUES",
}
_BUFFERS = {"INFO_LOG_BUFFER", "ERROR_LOG_BUFFER"}
_ENUMS = {"TARGET", "FALLBACK_STRATEGY", "CACHE_MODE"}
_NAMES = {"GLOBAL_SYMBOL_NAMES", "REFERENCED_KERNEL_NAMES", "REFERENCED_VARIABLE_NAMES"}


def read(option: Any, value: Any) -> Any:
    """The value of an option: a number, a list, or the address of a log buffer (an `Address`, which keeps the buffer
    alive). Raises TypeError, OverflowError or AttributeError as the bindings do.
    """
    name = option.name.removeprefix("CU_JIT_")
    if name in _UNSIGNED:
        return Scalar("unsigned int").read(value)
    if name in _SIGNED:
        return Scalar("int").read(value)
    if name in _BUFFERS:
        return bytes_address(value)
    if name in _ENUMS:
        return integer(value.value)
    if name in _NAMES:
        return [text(item) for item in value]
    if name == "WALL_TIME":
        return real(value)
    if name == "GLOBAL_SYMBOL_ADDRESSES":
        return [Scalar("void*").read(item) for item in value]
    if name == "CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE":
        return int(value.getPtr())
    raise TypeError(f"Unsupported attribute: {option.name}")


def is_buffer(option: Any) -> bool:
    """True for an option whose value is memory to which the driver writes."""
    return option.name.removeprefix("CU_JIT_") in _BUFFERS


class ErrorLog:
    """The error buffer of a call's options. Its memory stays alive as long as this object."""

    def __init__(self, buffer: Address, nbytes: int) -> None:
        self._buffer, self._nbytes = buffer, nbytes

    @classmethod
    def of(cls, options: Sequence[Any], values: Sequence[Any]) -> ErrorLog | None:
        """The error buffer of a call. None if its options name no buffer, or no size of the buffer."""
        given = {option.name: value for option, value in zip(options, values, strict=False)}
        buffer = given.get("CU_JIT_ERROR_LOG_BUFFER")
        nbytes = given.get("CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES", 0)
        # Either the options name no buffer, or the buffer is in a client, whose process writes the error to it.
        if not isinstance(buffer, Address):
            return None
        nbytes = min(int(nbytes), memoryview(buffer.keep).nbytes)
        return cls(buffer, nbytes) if nbytes else None

    def write(self, message: str) -> None:
        """Write a message to the buffer as a C string, shortened to the size of the buffer."""
        content = f"error: {message}".encode()[: self._nbytes - 1] + b"\0"
        ctypes.memmove(int(self._buffer), content, len(content))
