# SPDX-License-Identifier: Apache-2.0
"""Settings. Each is declared once in `SETTINGS`; it is read from `DRVFUSE_<NAME>` unless overridden in a scope.

config.get("spin_timeout")
with config.override(driver="emu", spin_timeout=0.5): ...
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import ArgumentError, require_text, shown


def _boolean(value: Any) -> bool:
    lowered = str(value).strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(value)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if isinstance(value, bool) or not 0 < seconds < 1e9:  # the kernels count nanoseconds in 64 bits
        raise ValueError(value)
    return seconds


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) else operator.index(value)
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError(value)
        return number

    return parse


def _bytes(value: Any) -> int:
    text = value if isinstance(value, str) else str(operator.index(value))
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB)?", text.strip())
    number = int(float(match[1]) * 1024 ** ("KMGT".index(match[2][0]) + 1 if match[2] else 0)) if match else 0
    if isinstance(value, bool) or number <= 0:
        raise ValueError(value)
    return number


def _text(value: Any) -> str:
    return require_text("value", os.fspath(value), "text")


def _race(value: Any) -> Any:
    """Return `value` as False or as the name of a profile of the emulated driver's race detector. True selects the
    profile "hardware"."""
    if isinstance(value, str) and value.strip().lower() in ("hardware", "strict"):
        return value.strip().lower()
    return "hardware" if _boolean(value) else False


def _driver(value: Any) -> Any:
    """Return `value` if it is the name of a driver, or an object that `runtime.driver.get_driver` accepts: an emulated
    machine or an open Driver. Raises ValueError for anything else."""
    machine = hasattr(value, "driver") and hasattr(value, "reports")
    if value in ("cuda", "emu") or machine or (hasattr(value, "machine") and hasattr(value, "types")):
        return value
    raise ValueError(value)


def _default_cache_dir() -> str:
    """The folder `drvfuse` in `XDG_CACHE_HOME`, by default in `~/.cache`."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drvfuse")


@dataclass(frozen=True)
class Setting:
    """One setting. `parse` checks and converts a text or value that the setting is given, `expected` names the allowed
    values in messages, and `doc` describes the setting.
    """

    parse: Callable[[Any], Any]
    default: Any
    expected: str
    doc: str


SETTINGS: Mapping[str, Setting] = {
    "driver": Setting(
        _driver, "cuda", '"cuda" or "emu" (in code also a drvfuse.emu.Machine)', "The driver used where none is given."
    ),
    "spin_timeout": Setting(
        _seconds, 10.0, "seconds, above 0 and below 1e9", "How long a kernel waits for a peer before it gives up."
    ),
    "check_calls": Setting(
        _boolean,
        False,
        "0 or 1",
        "1: a kernel before each collective compares the calls of all ranks. Read when a group is made.",
    ),
    "multicast": Setting(
        _boolean, True, "0 or 1", "0 forbids multicast objects on the CUDA driver; no code can lift it then."
    ),
    "store_port": Setting(
        _whole(1, 65535), 29683, "a port, 1 to 65535", "Where rank 0 listens to the ranks on other hosts (TCP)."
    ),
    "tuning": Setting(
        _text, "", "the path of a file", 'The constants of `drvfuse tune`; by default "tuning.json" in `cache_dir`.'
    ),
    "cache_dir": Setting(_text, _default_cache_dir, "a directory", "Where compiled kernels are kept."),
    "cache": Setting(_boolean, True, "0 or 1", "0: compiled kernels are not kept on disk."),
    "cache_limit": Setting(
        _bytes,
        2 << 30,
        'a size such as "2 GiB", or a number of bytes, above 0',
        "Size of the compiled kernels on disk, above which those that were unused for the longest time are deleted.",
    ),
    "nvrtc": Setting(_text, "", "a path", "The NVRTC library to load instead of the one that matches the driver."),
    "trace_driver": Setting(
        _text,
        "ring",
        '"off", "ring", "stderr" or a file path',
        "The record of driver calls: none, the last ones in memory, every call on stderr, or JSON lines in a file.",
    ),
    "emu_machine": Setting(
        _text,
        "",
        'an address such as "unix:@NAME" or "unix:/PATH"',
        "The emulated machine of another process (`drvfuse emu serve`), which this process uses instead of its own.",
    ),
    "emu_devices": Setting(
        _whole(1, 8),
        8,
        "a whole number, 1 to 8",
        "Devices of the default emulated machine. This and the next four are read when that is made.",
    ),
    "emu_arch": Setting(_text, "sm_90a", 'an architecture such as "sm_90a"', "Architecture of these devices."),
    "emu_seed": Setting(
        _whole(0, (1 << 64) - 1),
        0,
        "a whole number of at least 0",
        "Decides the order in which the machine runs blocks, warps and queued work.",
    ),
    "emu_race": Setting(
        _race, False, '0, 1, "hardware" or "strict"', "Report data races; 1 is the profile `hardware`."
    ),
    "emu_delay_stores": Setting(
        _boolean, False, "0 or 1", "1: stores reach other blocks late where no release or fence orders them."
    ),
    "emu_window_gib": Setting(
        _whole(1, 1024),
        64,
        "a whole number of GiB, 1 to 1024",
        "Address space that the emulated driver reserves; only touched pages cost memory.",
    ),
    "emu_loop_limit": Setting(
        _whole(1, (1 << 60) - 1),
        100_000_000,
        "a whole number above 0",
        "Accesses, or rounds of loops without accesses, that an emulated thread may make between two places where it "
        "can wait; beyond that it is reported as `endless`. Read when a machine is made.",
    ),
    "emu_host_wait": Setting(
        _seconds,
        10.0,
        "seconds, above 0 and below 1e9",
        "How long an emulated kernel that polls host memory waits for another host thread to write it, before that "
        "counts as a deadlock. Read when a machine is made.",
    ),
}

_VARIABLES = {name: f"DRVFUSE_{name.upper()}" for name in SETTINGS}
_NONE: Mapping[str, Any] = MappingProxyType({})
_scoped: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("drvfuse_settings", default=_NONE)


def get(name: str) -> Any:
    """The current value of a setting: that of the innermost `override`, else of the environment, else the default.

    Raises ArgumentError for an unknown name, and if the environment variable cannot be read as the setting's type.
    """
    scoped = _scoped.get()
    return scoped[name] if scoped and name in scoped else environment(name)


def environment(name: str) -> Any:
    """The value of a setting without `override`: that of the environment, else the default."""
    setting = SETTINGS.get(name) if isinstance(name, str) else None
    if setting is None:
        raise _unknown(name)
    variable = _VARIABLES[name]
    text = os.environ.get(variable)
    if not text:
        return setting.default() if callable(setting.default) else setting.default
    return _parse(f"environment variable {variable}", setting, text)


def _unknown(name: object) -> ArgumentError:
    return ArgumentError("setting", shown(name), "one of " + ", ".join(SETTINGS))


def _parse(argument: str, setting: Setting, value: Any) -> Any:
    try:
        return setting.parse(value)
    except Exception as error:  # of a `__repr__` or `__index__` too
        usual = isinstance(error, (ValueError, TypeError, OverflowError))
        raise ArgumentError(argument, shown(value), setting.expected) from (None if usual else error)


@contextlib.contextmanager
def override(**values: object) -> Iterator[None]:
    """Set settings for the duration of a `with` block, in this thread or task.

    A value is the text of the environment variable, or a value of the setting's type. Raises ArgumentError, and sets
    nothing, for an unknown name or a value that the setting cannot have.
    """
    checked = {}
    for name, value in values.items():
        if name not in SETTINGS:
            raise _unknown(name)
        checked[name] = _parse(f"setting {name}", SETTINGS[name], value)
    token = _scoped.set({**_scoped.get(), **checked})
    try:
        yield
    finally:
        _scoped.reset(token)
