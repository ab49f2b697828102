# SPDX-License-Identifier: Apache-2.0
"""Settings: a value is checked in the same way from every source."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drvfuse import config
from drvfuse.errors import ArgumentError
from drvfuse.runtime.driver import get_driver

WRONG: list[tuple[str, Any]] = [
    ("spin_timeout", 0),
    ("spin_timeout", -1.0),
    ("spin_timeout", math.inf),
    ("spin_timeout", math.nan),
    ("spin_timeout", 1e10),
    ("spin_timeout", True),
    ("spin_timeout", "soon"),
    ("spin_timeout", None),
    ("spin_timeout", [1]),
    ("driver", "foo"),
    ("driver", None),
    ("driver", 3),
    ("driver", ("emu",)),
    ("cache", "maybe"),
    ("cache", 7),
    ("cache_dir", 5),
    ("cache_dir", None),
    ("cache_limit", 0),
    ("cache_limit", "0 GiB"),
    ("cache_limit", -5),
    ("cache_limit", "2 GB"),
    ("cache_limit", "much"),
    ("cache_limit", 2.5),
    ("cache_limit", True),
    ("cache_limit", None),
    ("trace_driver", 1),
    ("nvrtc", b"x"),
    ("emu_window_gib", 0),
    ("emu_window_gib", 1.5),
    ("emu_window_gib", True),
    ("emu_loop_limit", 0),
    ("emu_loop_limit", 2.5),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}"[:40] for name, value in WRONG])
def test_a_wrong_value_is_refused_where_it_is_set(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"setting {name} is .*; it must be"), config.override(**{name: value}):
        pass


def test_nothing_is_set_if_one_value_is_wrong() -> None:
    before = config.get("spin_timeout")
    with pytest.raises(ArgumentError), config.override(spin_timeout=1.0, cache="maybe"):
        pass
    assert config.get("spin_timeout") == before


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("spin_timeout", 2, 2.0),
        ("spin_timeout", "0.5", 0.5),
        ("cache", False, False),
        ("cache", "on", True),
        ("cache", 0, False),
        ("cache_dir", Path("/some/where"), "/some/where"),
        ("cache_limit", 4096, 4096),
        ("cache_limit", "4096", 4096),
        ("cache_limit", "1.5 KiB", 1536),
        ("cache_limit", "500MiB", 500 << 20),
        ("cache_limit", " 2 GiB ", 2 << 30),
        ("emu_window_gib", 2, 2),
        ("driver", "emu", "emu"),
    ],
)
def test_a_right_value_is_kept_in_the_type_of_the_setting(name: str, value: Any, kept: Any) -> None:
    with config.override(**{name: value}):
        found = config.get(name)
    assert found == kept and type(found) is type(kept)


def test_the_driver_setting_accepts_machines_and_drivers(driver: str) -> None:
    api = get_driver(driver)
    with config.override(driver=api):
        assert get_driver() is api
    machine = SimpleNamespace(driver=None, reports=[])
    with config.override(driver=machine):
        assert config.get("driver") is machine


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DRVFUSE_DRIVER", "foo"),
        ("DRVFUSE_SPIN_TIMEOUT", "nan"),
        ("DRVFUSE_SPIN_TIMEOUT", "inf"),
        ("DRVFUSE_EMU_WINDOW_GIB", "0"),
        ("DRVFUSE_EMU_WINDOW_GIB", "100000"),
        ("DRVFUSE_EMU_LOOP_LIMIT", "-1"),
        ("DRVFUSE_CACHE", "maybe"),
    ],
)
def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(variable, text)
    name = variable.removeprefix("DRVFUSE_").lower()
    with pytest.raises(ArgumentError, match=f"environment variable {variable} is '{text}'"):
        config.get(name)


def test_a_wrong_driver_variable_is_named_where_a_driver_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRVFUSE_DRIVER", "foo")
    with pytest.raises(ArgumentError, match="DRVFUSE_DRIVER"):
        get_driver()
