# SPDX-License-Identifier: Apache-2.0
"""The error log, which has one line for each report of the machine."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ..bindings import R, T
from ..machine.objects import Listener
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..wire.arguments import Address
from .entry import check, encoded, entry, text

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)


def _lines(proc: Process, iterator: int) -> list[bytes]:
    """The lines from an iterator on. An iterator is the number of a line."""
    return [encoded(f"{report.brief()}\n") for report in proc.machine.reports[iterator:]]


def _advanced(proc: Process, iterator: int) -> Any:
    """Move an iterator past the last line. Returns the CUlogIterator, which is new if the caller passed a number."""
    end = len(proc.machine.reports)
    if type(iterator) is not Address:
        return T.CUlogIterator(end)
    ctypes.c_uint.from_address(int(iterator.keep.getPtr())).value = end
    return iterator.keep


@entry(1)
def cuLogsCurrent(proc: Process, flags: int) -> Any:
    check(flags == 0)
    return T.CUlogIterator(len(proc.machine.reports))


@entry(1)
def cuLogsDumpToFile(proc: Process, iterator: int, pathToFile: bytes, flags: int) -> Any:
    check(flags == 0)
    try:
        Path(text(pathToFile)).write_bytes(b"".join(_lines(proc, iterator)))
    except (OSError, ValueError):
        raise Failure(R.CUDA_ERROR_INVALID_VALUE) from None
    return _advanced(proc, iterator)


@entry(2)
def cuLogsDumpToMemory(proc: Process, iterator: int, buffer: Address, size: int, flags: int) -> tuple[Any, int]:
    """Writes the last lines of the log, as many as the buffer can hold, and a NUL. CUDA_ERROR_INVALID_VALUE if not even
    one line fits.
    """
    check(flags == 0)
    lines, room, kept = _lines(proc, iterator), min(size, buffer.keep.nbytes) - 1, b""
    for line in reversed(lines):
        if len(kept) + len(line) > room:
            break
        kept = line + kept
    check(kept or not lines)
    if room >= 0:
        ctypes.memmove(int(buffer), kept + b"\0", len(kept) + 1)
    return _advanced(proc, iterator), len(kept)


@entry(1)
def cuLogsRegisterCallback(proc: Process, callbackFunc: int, userData: int) -> Any:
    """Registers a function that is called with each report of a failed call, in the thread of the call. The function
    must be in this process; clients of a served machine get CUDA_ERROR_NOT_SUPPORTED.
    """
    check(callbackFunc)
    check(proc.foreign is None, R.CUDA_ERROR_NOT_SUPPORTED)
    function, data = _CALLBACK(callbackFunc), int(userData)
    level = int(T.CUlogLevel.CU_LOG_LEVEL_ERROR)

    def tell(line: bytes) -> None:
        function(data, level, line, len(line))

    return T.CUlogsCallbackHandle(proc.add(Listener(tell)).handle)


@entry()
def cuLogsUnregisterCallback(proc: Process, callback: int) -> None:
    proc.remove(proc.get(callback, Listener, R.CUDA_ERROR_INVALID_VALUE))
