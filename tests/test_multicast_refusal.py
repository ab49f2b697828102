# SPDX-License-Identifier: Apache-2.0
"""The suite creates no multicast object on the CUDA driver: the bindings and the `Driver` object refuse the call. In
the processes that tests start, the bindings refuse it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import multicast_refusal
import pytest
from cuda.bindings import driver as bindings

import drvfuse as df
from drvfuse.runtime.driver import Driver, get_driver

pytestmark = pytest.mark.skipif(
    os.environ.get("DRVFUSE_TEST_MULTICAST") == "1", reason="the owner of this machine allows multicast objects"
)


def test_the_bindings_have_the_refusal_in_place_of_the_function() -> None:
    assert bindings.cuMulticastCreate is multicast_refusal.refusal  # else the next lines would call the real function
    with pytest.raises(pytest.fail.Exception, match="creates no multicast object"):
        bindings.cuMulticastCreate(bindings.CUmulticastObjectProp())


def test_a_driver_object_refuses_before_the_function_is_reached() -> None:
    reached = []
    functions = SimpleNamespace(cuMulticastCreate=lambda prop: reached.append(prop))
    api = Driver("cuda", functions, bindings)
    for call in (api.cuMulticastCreate, lambda prop: api.result("cuMulticastCreate", prop)):
        with pytest.raises(pytest.fail.Exception, match="creates no multicast object"):
            call(bindings.CUmulticastObjectProp())
    assert not reached


def test_no_handler_of_exceptions_swallows_the_refusal() -> None:
    assert not issubclass(pytest.fail.Exception, Exception)


@pytest.mark.emulated
def test_the_emulated_driver_keeps_its_own_function() -> None:
    with df.emu.Machine(devices=2) as machine:
        create = get_driver(machine).raw("cuMulticastCreate")
        assert create is not multicast_refusal.refusal and create is machine.driver.cuMulticastCreate


def test_the_refusal_is_in_effect_before_any_test_module_is_imported() -> None:
    assert "multicast_refusal" in sys.modules and AT_IMPORT is multicast_refusal.refusal


REPORT = """
from cuda.bindings import driver as bindings
import drvfuse
from drvfuse.runtime.driver import Driver
assert bindings.cuMulticastCreate.__module__ == "sitecustomize"  # else the next lines would call the real function
try:
    Driver("cuda", bindings, bindings).cuMulticastCreate(bindings.CUmulticastObjectProp())
except Exception:
    pass
"""


@pytest.mark.parametrize(
    "environment", [None, {"PATH": ""}, {"PATH": "", "PYTHONPATH": str(Path(df.__file__).parents[1])}]
)
def test_a_process_that_a_test_starts_has_the_refusal_whatever_its_environment(
    environment: dict[str, str] | None,
) -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("the test suite creates no multicast object"), done.stderr


def test_a_process_of_a_spawned_pool_has_the_refusal() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(_where_from).result(60) == "sitecustomize"


def _where_from() -> str:
    from cuda.bindings import driver

    return str(driver.cuMulticastCreate.__module__)


AT_IMPORT = bindings.cuMulticastCreate
