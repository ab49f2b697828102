# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests.

The driver under test is the emulated one unless DRVFUSE_TEST_DRIVER=cuda; the same tests then run on real GPUs.
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

from drvfuse.errors import ArgumentError

DRIVER = os.environ.get("DRVFUSE_TEST_DRIVER", "emu")

# Hypothesis draws the same examples in every run, and no test fails because the machine is slow.
hypothesis.settings.register_profile("drvfuse", deadline=None, derandomize=True)
hypothesis.settings.load_profile("drvfuse")


def pytest_configure() -> None:
    """Make garbage collections rare. Refuse multicast objects on the CUDA driver unless DRVFUSE_TEST_MULTICAST is "1".

    Nothing sets that variable by default, CI included: see CONTRIBUTING.md.
    """
    gc.set_threshold(50_000)
    if os.environ.get("DRVFUSE_TEST_MULTICAST") != "1":
        import multicast_refusal

        multicast_refusal.forbid()
    if DRIVER == "cuda" and "DRVFUSE_TEST_DIVIDE_GPU" in os.environ:
        import divided_gpu

        divided_gpu.divide(os.environ["DRVFUSE_TEST_DIVIDE_GPU"])


def device_count() -> int:
    if DRIVER == "emu":
        return 8
    from drvfuse.runtime.driver import get_driver

    return int(get_driver("cuda").cuDeviceGetCount())


@pytest.fixture(scope="session")
def driver() -> str:
    """Name of the driver under test: "emu" or "cuda"."""
    return DRIVER


@pytest.fixture(autouse=True)
def own_kernels_compile_without_warnings() -> Iterator[None]:
    """Fail the test that first compiles a kernel of drvfuse with a warning, which users would see on their
    terminals."""
    logger, warned = logging.getLogger("drvfuse.compile"), []

    class Warned(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.match(r"\w+_kernel\.cu: .*\bwarning\b", record.getMessage(), re.DOTALL):
                warned.append(record.getMessage())

    handler = Warned(logging.WARNING)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not warned, warned[0]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name alone."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def refused() -> Callable[..., None]:
    """`refused(call, argument, text)`: check that `call` raises an ArgumentError for `argument`, whose message contains
    `text`."""

    def check(call: Callable[[], object], argument: str, text: str = "") -> None:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
        assert text in str(caught.value)

    return check


@pytest.fixture(autouse=True, scope="module")
def collections_of_garbage_are_quick() -> None:
    """Freeze all objects that exist when a module begins, mostly test items and compiled kernels, so that later garbage
    collections skip them."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = None
    for item in items:
        if item.get_closest_marker("multicast") and os.environ.get("DRVFUSE_TEST_MULTICAST") != "1":
            item.add_marker(pytest.mark.skip(reason="multicast objects are created only with DRVFUSE_TEST_MULTICAST=1"))
        if item.get_closest_marker("gpu") and DRIVER != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a real GPU (DRVFUSE_TEST_DRIVER=cuda)"))
        needed = item.get_closest_marker("gpus")
        if needed is not None:
            devices = device_count() if devices is None else devices
            if needed.args[0] > devices:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} devices, {devices} present"))


@pytest.fixture
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`counted_calls(driver, call)`: names of all driver functions that `call()` calls, unrecorded ones included."""

    def count(driver: Any, call: Callable[[], object]) -> list[str]:
        made: list[str] = []

        def spied(name: str, function: Callable[..., Any], *args: Any) -> Any:
            made.append(name)
            return function(*args[0])

        def known() -> list[str]:
            """The names of the driver functions that the Driver object has cached. A cached function keeps the sink,
            the recorder of calls, that was set when it was made."""
            return [name for name in vars(driver) if name.startswith("cu") or name in ("capture_status", "launch")]

        with monkeypatch.context() as patch:
            for name in known():
                patch.delitem(vars(driver), name)
            patch.setattr(driver, "_sink", spied)
            for device in driver.devices.values():
                patch.setattr(device, "_use", type(device._use)(driver, device.context))
            call()
            for name in known():
                del vars(driver)[name]
        return made

    return count


@pytest.fixture(scope="session")
def _pool() -> Iterator[Any]:
    from process_pool import ProcessPool

    made = ProcessPool()
    yield made
    made.close()


@pytest.fixture
def pool(_pool: Any) -> Iterator[Any]:
    """Processes that run functions of a test module as ranks (`process_pool.ProcessPool`)."""
    yield _pool
    _pool.close_machine()
