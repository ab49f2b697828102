# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest inside a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config
from drvfuse.emu import Machine
from drvfuse.emu.program import switched
from drvfuse.testing import plugin, run

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
CACHE = config.get("cache_dir")  # the default directory is below the home directory, which pytester replaces
OPTIONS = ("-p", plugin.__name__, "-p", "no:cacheprovider", "--strict-markers")


@pytest.fixture(scope="session")
def _loaded() -> None:
    """Import modules once for all inner runs, each of which would otherwise import them and drop them at its end."""
    with Machine(devices=1) as machine, switched(machine):
        device = df.device(0, driver=machine)
        x = device.zeros(1, "int32")
        source = 'extern "C" __global__ void k(int* x) { *x = 1; }'
        df.compile(source, driver=machine)["k"].prepare(1, 1, x)(device.stream)
        assert x.numpy() == np.ones(1, np.int32) and run.SHOWN


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _loaded: None) -> Callable[..., pytest.RunResult]:
    """`inner(source, *options)`: run pytest on a test module, with the plugin alone, in this process.

    With `apart=True` pytest runs in a process of its own, which may start worker processes.
    """
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "DRVFUSE_CACHE_DIR": CACHE, "PYTHONPATH": PATH}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def go(source: str, *options: str, apart: bool = False) -> pytest.RunResult:
        pytester.makepyfile(source)
        start = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return start(*OPTIONS, *options)

    return go
