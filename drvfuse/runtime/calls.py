# SPDX-License-Identifier: Apache-2.0
"""The record of driver calls: a ring that is always on, and writers to standard error or a JSON-lines file.

An entry is (function, arguments, result). Formatting happens only when somebody looks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError

_LENGTH = 256

kernel_names: dict[int, str] = {}  # handles of loaded kernels
ring: deque[tuple[str, tuple[Any, ...], Any]] = deque(maxlen=_LENGTH)
Sink = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


def code_name(code: Any) -> str:
    """CUresult's name, also for a plain number."""
    return str(getattr(code, "name", code))


def format_value(value: Any) -> str:
    """One short line for an argument or a result: addresses and handles in hex, names of enums, sizes of buffers."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        name = getattr(value, "name", None)
        return name if isinstance(name, str) else hex(value) if value > 0xFFFF else str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return repr(bytes(value).decode()) if _is_name(value) else f"<{len(value)} bytes>"
    if isinstance(value, (str, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        shown = ", ".join(format_value(item) for item in value[:4])
        return f"[{shown}{', ...' if len(value) > 4 else ''}]"
    kind = type(value).__name__
    if kind == "CUlaunchConfig":  # its stream is left out: a prepared launch changes it later
        grid = f"{value.gridDimX}x{value.gridDimY}x{value.gridDimZ}"
        block = f"{value.blockDimX}x{value.blockDimY}x{value.blockDimZ}"
        return f"<grid {grid} block {block} smem {value.sharedMemBytes}>"
    try:
        number = int(value)
    except (TypeError, ValueError):
        return kind
    if kind == "CUfunction" and number in kernel_names:
        return kernel_names[number]
    return f"{kind}:{number:#x}"


def _is_name(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) < 200 and value.isascii() and value.decode("ascii").isprintable()


def format_args(args: tuple[Any, ...]) -> str:
    return ", ".join(format_value(arg) for arg in args)


def format_entry(entry: tuple[str, tuple[Any, ...], Any]) -> str:
    name, args, code = entry
    return f"{name}({format_args(args)}) -> {code_name(code)}"


def last_calls(count: int = 20) -> list[str]:
    """The last driver calls of this process, oldest first, as `name(arguments) -> result`; at most 256 are kept.

    Making a context current and restoring it is left out.
    """
    if count <= 0:
        return []
    return [format_entry(entry) for entry in list(ring)[-count:]]


def sink(mode: str) -> Sink | None:
    """A function that makes a call and writes it out, for the `trace_driver` setting; None for "off" and "ring"."""
    if mode in ("", "off", "ring"):
        return None
    if mode == "stderr":
        return _stderr
    return _JsonLines(mode)


def _stderr(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    start = time.perf_counter_ns()
    result = function(*args)
    spent = (time.perf_counter_ns() - start) / 1000
    values = "".join(f" {format_value(value)}" for value in result[1:])
    sys.stderr.write(f"drvfuse: {name}({format_args(args)}) -> {code_name(result[0])}{values} [{spent:.1f} us]\n")
    return result


class _JsonLines:
    """Appends one JSON object a call: time (s), thread, call, args, result, values, us."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            expected = '"off", "ring", "stderr" or the path of a file that can be written'
            raise ArgumentError("setting trace_driver", f"{path!r} ({error.strerror})", expected) from None

    def __call__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        start = time.perf_counter_ns()
        result = function(*args)
        line = {
            "time": time.time(),
            "thread": threading.get_ident(),
            "call": name,
            "args": [format_value(arg) for arg in args],
            "result": code_name(result[0]),
            "values": [format_value(value) for value in result[1:]],
            "us": (time.perf_counter_ns() - start) / 1000,
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())  # one write a line: threads do not mix
        return result
