# SPDX-License-Identifier: Apache-2.0
"""The record of driver calls: a ring buffer of the last calls, and writers to standard error or a JSON-lines file.

An entry is (function, arguments, result). The entry of a launch has a `LaunchNote` in place of its arguments, since the
next launch may overwrite them. Entries are formatted only when they are read. Successful queries, which are frequent
and change nothing, have a ring of their own, so that they do not replace other calls.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError, require_integer

if TYPE_CHECKING:
    from ..ptx.facts import Param

_LENGTH = 256
_QUERY_LENGTH = 32
_QUERY = re.compile(r"cu(?!Module|Library)\w*?(Get[A-Z]|IsCapturing|Query|CanAccess|Occupancy)")
_FLOATS = {4: struct.Struct("<f"), 8: struct.Struct("<d")}

kernel_names: dict[int, str] = {}  # handle of a loaded kernel -> its name
Entry = tuple[str, tuple[Any, ...], Any]
ring: deque[Entry] = deque(maxlen=_LENGTH)
queries: deque[Entry] = deque(maxlen=_QUERY_LENGTH)
Sink = Callable[[str, Callable[..., Any], tuple[Any, ...], tuple[Any, ...]], Any]


@functools.cache
def ring_of(name: str) -> deque[Entry]:
    """The ring buffer that records successful calls of a function: `queries` for functions that only read a state, else
    `ring`.
    """
    return queries if _QUERY.match(name) else ring


class LaunchFacts(NamedTuple):
    """The facts that all launches of a prepared launch share. `structures` has the type of each argument that was given
    as a struct, under the argument's index.
    """

    kernel: str
    device: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem: int
    attributes: tuple[str, ...]
    params: tuple[Param, ...]
    structures: dict[int, type[ctypes.Structure]]


LaunchNote = tuple[LaunchFacts, int, bytes]  # the facts, the handle of the stream, and the packed arguments


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
    if isinstance(value, ctypes.Structure):
        fields = ", ".join(f"{field[0]}={format_value(getattr(value, field[0]))}" for field in value._fields_)
        return f"{type(value).__name__}({fields})"
    if isinstance(value, (list, tuple, ctypes.Array)):
        shown = ", ".join(format_value(item) for item in value[:4])
        return f"[{shown}{', ...' if len(value) > 4 else ''}]"
    kind = type(value).__name__
    if kind == "CUlaunchConfig":  # without the stream, which the config's owner may have changed after the call
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


def _texts(args: tuple[Any, ...]) -> list[str]:
    if args and isinstance(args[0], LaunchFacts):
        return _launch_texts(*args)
    return [format_value(arg) for arg in args]


def _launch_texts(facts: LaunchFacts, stream: int, packed: bytes) -> list[str]:
    grid, block = ("x".join(map(str, size)) for size in (facts.grid, facts.block))
    values = [
        _parameter_text(param, packed[param.offset : param.offset + param.size], facts.structures.get(index))
        for index, param in enumerate(facts.params)
    ]
    found = [
        f"<grid {grid} block {block} smem {facts.smem}>",
        facts.kernel,
        f"stream {stream:#x} of device {facts.device}",
    ]
    attributes = [f"attributes [{', '.join(facts.attributes)}]"] if facts.attributes else []
    return [*found, *attributes, f"arguments ({', '.join(values)})"]


def _parameter_text(param: Param, packed: bytes, structure: type[ctypes.Structure] | None) -> str:
    if param.kind == "float":
        return f"{_FLOATS[param.size].unpack(packed)[0]:.7g}"
    if param.kind == "int":
        return format_value(int.from_bytes(packed, "little"))
    return format_value(packed if structure is None else structure.from_buffer_copy(packed))


def format_args(args: tuple[Any, ...]) -> str:
    """The arguments of a recorded call as text. `args` are the arguments of the call; for a launch, a `LaunchNote`."""
    return ", ".join(_texts(args))


def format_entry(entry: tuple[str, tuple[Any, ...], Any]) -> str:
    name, args, code = entry
    return f"{name}({format_args(args)}) -> {code_name(code)}"


def last_calls(count: int = 20) -> list[str]:
    """The last driver calls of this process, oldest first, as `name(arguments) -> result`; at most 256 are kept.

    Successful queries (of attributes, of captures, of the state of streams and events) are left out, and so are the
    calls that make a context current and restore it.
    """
    if require_integer("count", count, "a number of calls") <= 0:
        return []
    return [format_entry(entry) for entry in list(ring)[-count:]]


def sink(mode: str) -> Sink | None:
    """A function that makes a call and writes it out, for the `trace_driver` setting; None for "off" and "ring"."""
    if mode in ("", "off", "ring"):
        return None
    if mode == "stderr":
        return _stderr
    return _JsonLines(mode)


def _stderr(name: str, function: Callable[..., Any], args: tuple[Any, ...], shown: tuple[Any, ...]) -> Any:
    start = time.perf_counter_ns()
    result = function(*args)
    spent = (time.perf_counter_ns() - start) / 1000
    values = "".join(f" {format_value(value)}" for value in result[1:])
    sys.stderr.write(f"drvfuse: {name}({format_args(shown)}) -> {code_name(result[0])}{values} [{spent:.1f} us]\n")
    return result


class _JsonLines:
    """Appends one JSON object per call: time (s), thread, call, args, result, values, us."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            expected = '"off", "ring", "stderr" or the path of a file that can be written'
            raise ArgumentError("setting trace_driver", f"{path!r} ({error.strerror})", expected) from None

    def __call__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], shown: tuple[Any, ...]) -> Any:
        start = time.perf_counter_ns()
        result = function(*args)
        line = {
            "time": time.time(),
            "thread": threading.get_ident(),
            "call": name,
            "args": _texts(shown),
            "result": code_name(result[0]),
            "values": [format_value(value) for value in result[1:]],
            "us": (time.perf_counter_ns() - start) / 1000,
        }
        # one write per line, so that lines of several threads do not mix
        os.write(self._file, (json.dumps(line) + "\n").encode())
        return result
