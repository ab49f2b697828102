# SPDX-License-Identifier: Apache-2.0
"""Settings. Each is declared once in `SETTINGS`; it is read from `DRVFUSE_<NAME>` unless overridden in a scope.

config.get("spin_timeout")
with config.override(driver="emu", spin_timeout=0.5): ...
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import ArgumentError


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 < value < 1 << 60:
        raise ValueError(text)
    return value


def _default_cache_dir() -> str:
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drvfuse")


@dataclass(frozen=True)
class Setting:
    """One setting: how its text is read, its default, and what it means."""

    parse: Callable[[str], Any]
    default: Any
    expected: str
    doc: str


SETTINGS: Mapping[str, Setting] = {
    "driver": Setting(str, "cuda", '"cuda" or "emu"', "driver used where none is given"),
    "cache_dir": Setting(str, _default_cache_dir, "a directory", "where compiled kernels are kept"),
    "cache": Setting(_boolean, True, "0 or 1", "keep compiled kernels on disk"),
    "trace_driver": Setting(
        str, "ring", '"off", "ring", "stderr" or a file path', "driver call record; a path gets JSON lines"
    ),
    "spin_timeout": Setting(_positive, 10.0, "seconds, above 0", "bound of every device-side wait for a peer"),
    "nvrtc": Setting(str, "", "a path", "the NVRTC library to load instead of the one that matches the driver"),
    "emu_window_gib": Setting(int, 64, "a whole number of GiB", "address space reserved by the emulated driver"),
    "emu_loop_limit": Setting(
        _count, 100_000_000, "a whole number above 0", "rounds after which an emulated loop counts as endless"
    ),
}

_NONE: Mapping[str, Any] = MappingProxyType({})
_scoped: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("drvfuse_settings", default=_NONE)


def get(name: str) -> Any:
    """Value of a setting now: the innermost `override`, else the environment, else the default.

    Raises ArgumentError if the environment variable cannot be read as the setting's type.
    """
    setting = SETTINGS[name]
    scoped = _scoped.get()
    if name in scoped:
        return scoped[name]
    variable = f"DRVFUSE_{name.upper()}"
    text = os.environ.get(variable)
    if text is None or text == "":
        return setting.default() if callable(setting.default) else setting.default
    try:
        return setting.parse(text)
    except ValueError:
        raise ArgumentError(f"environment variable {variable}", repr(text), setting.expected) from None


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set settings for the duration of a `with` block, in this thread or task."""
    for name in values:
        if name not in SETTINGS:
            raise ArgumentError("setting", repr(name), "one of " + ", ".join(SETTINGS))
    token = _scoped.set({**_scoped.get(), **values})
    try:
        yield
    finally:
        _scoped.reset(token)
