# SPDX-License-Identifier: Apache-2.0
"""The suite creates no multicast object on the CUDA driver: the refusal stands in the bindings and in the gate."""

from __future__ import annotations

import os
import sys
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
    assert bindings.cuMulticastCreate is multicast_refusal.refusal  # only then may it be called
    with pytest.raises(pytest.fail.Exception, match="creates no multicast object"):
        bindings.cuMulticastCreate(bindings.CUmulticastObjectProp())


def test_the_gate_of_a_cuda_driver_refuses_before_the_function_is_reached() -> None:
    reached = []
    functions = SimpleNamespace(cuMulticastCreate=lambda prop: reached.append(prop))
    gate = Driver("cuda", functions, bindings)
    for call in (gate.cuMulticastCreate, lambda prop: gate.result("cuMulticastCreate", prop)):
        with pytest.raises(pytest.fail.Exception, match="creates no multicast object"):
            call(bindings.CUmulticastObjectProp())
    assert not reached


def test_no_handler_of_exceptions_swallows_the_refusal() -> None:
    assert not issubclass(pytest.fail.Exception, Exception)


@pytest.mark.emu
def test_the_emulated_driver_keeps_its_own_function() -> None:
    with df.emu.Machine(devices=2) as machine:
        create = get_driver(machine)._raw("cuMulticastCreate")
        assert create is not multicast_refusal.refusal and create is machine.driver.cuMulticastCreate


def test_the_refusal_is_there_before_any_test_module_is_imported() -> None:
    assert "multicast_refusal" in sys.modules and AT_IMPORT is multicast_refusal.refusal


AT_IMPORT = bindings.cuMulticastCreate
