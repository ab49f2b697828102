# SPDX-License-Identifier: Apache-2.0
"""Formats the output of a kernel's printf as C's printf does."""

from __future__ import annotations

import ctypes
import re
import sys

from ..abi import structs
from ..space.window import Window

_DIRECTIVE = re.compile(rb"%(?:(%)|[-+ #0]*(\*|\d+)?(?:\.(\*|\d*))?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp]))")
_TEXT_BYTES = 4096  # the maximum size of a format or a string
_PIECE_BYTES = 1 << 16  # the maximum size of one formatted argument
_C = ctypes.CDLL(None)


def text_at(window: Window, address: int, limit: int = _TEXT_BYTES) -> bytes:
    """The string at an address, up to its NUL, the end of the window or `limit` bytes."""
    if not window.contains(address, 1):
        return b"?"
    return bytes(window.view(address, min(limit, window.end - address))).split(b"\0", 1)[0]


def printed(window: Window, call: structs.Print) -> tuple[str, int]:
    """(text, result) of a call of printf. The result is the number of arguments that the format uses, or -1 if the
    machine has no memory at the address of the format.

    The arguments are in the thread's local memory. A directive whose arguments lie outside of it is printed unchanged.
    """
    if not window.contains(call.format, 1):
        return "", -1
    t = structs.Thread.from_address(call.thread)
    end = t.local_base + structs.Launch.from_address(t.launch).local_bytes
    arguments = bytes(window.view(call.args, end - call.args)) if t.local_base <= call.args < end else b""
    offset = taken = 0

    def take(kind: type[ctypes._SimpleCData]) -> ctypes._SimpleCData:
        """The next argument of the call, as the C type `kind`."""
        nonlocal offset, taken
        offset = -(-offset // ctypes.sizeof(kind)) * ctypes.sizeof(kind)
        value = kind.from_buffer_copy(arguments, offset)
        offset += ctypes.sizeof(kind)
        taken += 1
        return value

    def formatted(match: re.Match[bytes]) -> bytes:
        """The text of one directive."""
        nonlocal offset, taken
        percent, width, precision, length, kind = match.groups()
        if percent:
            return b"%"
        before = offset, taken
        try:
            values = [take(ctypes.c_int) for star in (width, precision) if star == b"*"]
            if kind in b"eEfFgGaA":
                values.append(take(ctypes.c_double))
            elif kind == b"s":
                values.append(ctypes.c_char_p(text_at(window, take(ctypes.c_uint64).value)))
            elif kind == b"p":
                values.append(ctypes.c_void_p(take(ctypes.c_uint64).value))
            else:
                wide = length in (b"l", b"ll", b"z", b"j", b"t") and kind != b"c"
                values.append(take(ctypes.c_int64 if wide else ctypes.c_int))
        except ValueError:  # an argument lies beyond the end of the thread's local memory
            offset, taken = before
            return match[0]
        directive = match[0] if kind in b"diouxX" else match[0][: -len((length or b"") + kind)] + kind
        piece = ctypes.create_string_buffer(_PIECE_BYTES)
        size = _C.snprintf(piece, ctypes.c_size_t(_PIECE_BYTES), directive, *values)
        return piece.raw[: max(0, min(size, _PIECE_BYTES - 1))]

    return _DIRECTIVE.sub(formatted, text_at(window, call.format)).decode(errors="replace"), taken


class Printer:
    """The text that kernels have printed and that was not written to standard output yet."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._texts: list[str] = []
        self._raised: BaseException | None = None

    def add(self, call: int) -> int:
        """Keep the text of a kernel's printf, and return its result. `call` is the address of an `abi.structs.Print`.

        Native code calls this function, so it must not raise. `flush` raises an exception that has occurred here.
        """
        try:
            text, count = printed(self._window, structs.Print.from_address(call))
            self._texts.append(text)
            return count & 0xFFFFFFFF
        except BaseException as e:
            self._raised = e
            return 0xFFFFFFFF

    def flush(self) -> None:
        """Write the text to standard output."""
        if self._texts:
            text = "".join(self._texts)
            self._texts.clear()
            sys.stdout.write(text)
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
