# SPDX-License-Identifier: Apache-2.0
"""Vetoes take effect on every path that could create a multicast object, before the first driver call of the path.

Each veto is added in a child process. There a stand-in takes the place of the CUDA driver: a `Driver` object named
"cuda" that has the functions of an emulated machine. No test removes or changes a variable that is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as bindings

import drvfuse as df
from drvfuse import config
from drvfuse.runtime.driver import Driver
from drvfuse.runtime.multicast_support import VETOES, vetoes

pytestmark = pytest.mark.emulated

PROGRAM = """
import json, sys
from cuda.bindings import driver as bindings
import drvfuse as df
from drvfuse import config
from drvfuse.cli import doctor
from drvfuse.runtime.driver import Driver
from drvfuse.runtime.multicast import _properties

made = []

class Functions:
    def __init__(self, machine):
        self.functions = machine.driver

    def __getattr__(self, name):
        function = getattr(self.functions, name)

        def call(*args):
            made.append(name)
            return function(*args)

        return call

found = {"attempts": []}
for name in ("cuda", "emu"):
    machine = df.emu.Machine(devices=2, sm_count=8)
    driver = Driver(name, Functions(machine), bindings, None if name == "cuda" else machine)
    driver.cuInit(0)
    devices = [df.device(index, driver=driver) for index in range(2)]
    with df.Group.local(2, driver=driver, max_blocks=4, workspace_bytes=1 << 20) as group:
        xs = [rank.zeros((1, 64), "float32") for rank in group]
        gammas = [rank.zeros(64, "float32") for rank in group]
        properties = _properties(devices, 2 << 20)
        for attempt in (
            lambda: df.Multicast(devices, 2 << 20).close(),
            lambda: df.Multicast.granularity(devices),
            lambda: driver.cuMemRelease(driver.cuMulticastCreate(properties)),
            lambda: driver.cuMemRelease(driver.result("cuMulticastCreate", properties)[1]),
            lambda: group.symmetric(64, multicast=True).close(),
            lambda: group.multicast_staging(),
            lambda: df.allreduce(group, xs, use_multimem=True),
            lambda: df.allreduce_rmsnorm_fp8(group, xs, gammas, epsilon=1e-6, use_multimem=True),
        ):
            with config.override(**json.loads(sys.argv[1])):
                made.clear()
                try:
                    attempt()
                    error = ""
                except df.errors.DrvfuseError as refused:
                    error = f"{type(refused).__name__}: {refused}"
            found["attempts"].append([name, error, list(made)])
        group.synchronize()
    with config.override(**json.loads(sys.argv[1])):
        found[name] = doctor._multicast(driver, devices)
print(json.dumps(found))
"""


def child(overrides: dict[str, bool], **added: str) -> dict[str, Any]:
    """The output of PROGRAM with the environment variables `added`, run under the settings `overrides`."""
    assert not any(os.environ.get(name) for name in added), "a test adds vetoes and changes none"
    command = [sys.executable, "-c", PROGRAM, json.dumps(overrides)]
    done = subprocess.run(command, env={**os.environ, **added}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def require_vetoed(found: dict[str, Any], veto: str) -> None:
    for name, error, made in found["attempts"]:
        if name == "cuda":
            assert error.startswith("Unsupported: this site forbids multicast") and veto in error and not made
        else:
            assert not error
    assert found["cuda"]["state"] == "vetoed" and veto in found["cuda"]["why"]
    assert found["emu"] == {"state": "supported", "why": ""}


@pytest.mark.parametrize("name,value", [*VETOES.items(), ("DRVFUSE_MULTICAST", "0"), ("NVSHMEM_DISABLE_NVLS", "true")])
def test_a_veto_comes_before_any_driver_call_and_is_named(name: str, value: str) -> None:
    present = os.environ.get(name, "")
    if present and not any(veto == f"{name}={present}" for veto in vetoes()):
        pytest.skip(f"the environment sets {name} to {present}, which allows multicast")
    require_vetoed(child({}, **({} if present else {name: value})), f"{name}={present or value}")


def test_code_can_forbid_multicast_and_cannot_lift_a_veto_of_the_environment() -> None:
    if not os.environ.get("DRVFUSE_MULTICAST"):
        require_vetoed(child({"multicast": True}, DRVFUSE_MULTICAST="0"), "DRVFUSE_MULTICAST=0")
    require_vetoed(child({"multicast": False}), "DRVFUSE_MULTICAST=0")


def test_settings_that_enable_multicast_do_not_forbid_it() -> None:
    """With values that forbid nothing, attempts to make a multicast object on the stand-in raise no error."""
    allowing = {"NCCL_NVLS_ENABLE": "2", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0", "NVSHMEM_DISABLE_NVLS": "false"}
    if any(os.environ.get(name) for name in (*allowing, "DRVFUSE_MULTICAST")):
        pytest.skip("the environment already sets one of the variables that this test sets")
    found = child({}, **allowing, DRVFUSE_MULTICAST="1")
    assert [error for _, error, _ in found["attempts"][:4]] == [""] * 4
    assert found["cuda"] == found["emu"] == {"state": "supported", "why": ""}


@pytest.mark.parametrize("value", ["0", "00", " 0 ", "0x0", "off", "False", "none", "-0"])
def test_an_ambiguous_setting_forbids_multicast(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    # `vetoes` reads this environment; that of the process is not changed.
    environment = {**os.environ, "NCCL_NVLS_ENABLE": value}
    monkeypatch.setattr("drvfuse.runtime.multicast_support.os", SimpleNamespace(environ=environment))
    assert f"NCCL_NVLS_ENABLE={value}" in vetoes()


def test_the_refusal_of_the_test_suite_holds_without_a_veto(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the test process, a `Driver` object named "cuda" refuses to create a multicast object even if no variable of
    the environment forbids it."""
    if os.environ.get("DRVFUSE_TEST_MULTICAST") == "1":
        pytest.skip("the owner of this machine allows multicast objects")
    monkeypatch.setattr("drvfuse.runtime.multicast_support.vetoes", list)
    with df.emu.Machine(devices=2) as machine:
        driver = Driver("cuda", machine.driver, bindings)
        driver.cuInit(0)
        devices = [df.device(index, driver=driver) for index in range(2)]
        with pytest.raises(pytest.fail.Exception, match="creates no multicast object"):
            df.Multicast(devices, 2 << 20)
        with (
            df.Group.local(2, driver=driver, max_blocks=4, workspace_bytes=1 << 20) as group,
            pytest.raises(pytest.fail.Exception, match="creates no multicast object"),
        ):
            group.symmetric(64, multicast=True)
        assert machine.held()["multicast"] == 0


def test_a_setting_in_code_forbids_multicast_in_its_thread_alone() -> None:
    with config.override(multicast=False), ThreadPoolExecutor(1) as other:
        assert "DRVFUSE_MULTICAST=0" in vetoes()
        assert ("DRVFUSE_MULTICAST=0" in other.submit(vetoes).result()) == (not config.environment("multicast"))
    assert ("DRVFUSE_MULTICAST=0" in vetoes()) == (not config.environment("multicast"))
