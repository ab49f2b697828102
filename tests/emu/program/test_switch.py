# SPDX-License-Identifier: Apache-2.0
"""cuda-python's modules switched to a machine, and back."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

import numpy as np
import pytest
from cuda.bindings import driver, nvrtc

import drvfuse as df
from drvfuse import emu
from drvfuse.emu.program import nvrtc as nvrtc_switch
from drvfuse.emu.program import switched
from drvfuse.errors import ArgumentError, ClosedError, Unsupported

SOURCE = b'extern "C" __global__ void add(float *x, float a) { x[threadIdx.x] += a; }'


def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def compiled(options):
    program = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"add.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(program, len(options), options))
    image = bytearray(ok(nvrtc.nvrtcGetCUBINSize(program)))
    ok(nvrtc.nvrtcGetCUBIN(program, image))
    ok(nvrtc.nvrtcDestroyProgram(program))
    return bytes(image)


@pytest.fixture
def machine():
    with emu.Machine(devices=2) as made:
        yield made


def test_a_program_that_asks_for_a_cubin_runs_on_the_machine(machine, rng):
    x = rng.standard_normal(64, np.float32)
    y = np.empty_like(x)
    with switched(machine) as given:
        assert given is machine
        ok(driver.cuInit(0))
        assert ok(driver.cuDeviceGetCount()) == 2
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
        image = compiled([b"-arch=sm_90"])
        kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(image)), b"add"))
        at = ok(driver.cuMemAlloc(x.nbytes))
        ok(driver.cuMemcpyHtoD(at, x, x.nbytes))
        values = (int(at), 1.5), (ctypes.c_void_p, ctypes.c_float)
        ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, values, 0))
        ok(driver.cuMemcpyDtoH(y, at, x.nbytes))
    assert (y == x + np.float32(1.5)).all()


def test_while_switched_nvrtc_returns_ptx_in_place_of_a_cubin(machine):
    with switched(machine):
        image = compiled([b"-arch=sm_90"])
        assert b".target sm_90" in image and b".loc" in image
        assert image.count(b".file") == compiled([b"-arch=sm_90", b"-lineinfo"]).count(b".file")
        assert compiled([b"-arch=compute_90"]) == b""
    assert compiled([b"-arch=sm_90"]).startswith(b"\x7fELF")


@pytest.mark.parametrize("real", [True, False])
def test_both_nvrtc_modules_return_ptx_while_switched(real):
    """Only the newest bindings have `cuda.bindings._v2.nvrtc`; a stand-in provides its functions."""
    module, options = ModuleType("cuda.bindings._v2.nvrtc"), []
    module.compile_program = lambda prog, given=None: options.append(given)
    module.get_cubin_size, module.get_cubin = lambda prog: 9 if real else 0, lambda prog: b"cubin" if real else b""
    module.get_ptx_size, module.get_ptx = lambda prog: 3, lambda prog: b"ptx"
    new = nvrtc_switch.functions_v2(module)
    for given in ([b"-arch=sm_90"], (b"-G",), None):
        new["compile_program"](1, given)
    assert options == [[b"-arch=sm_90", b"-lineinfo"], [b"-G"], None]
    assert (new["get_cubin_size"](1), new["get_cubin"](1)) == ((3, b"ptx") if real else (0, b""))


def test_types_stay_the_same_and_functions_are_restored(machine):
    before = {name: getattr(driver, name) for name in ("cuInit", "cuMemAlloc", "CUresult", "CUdeviceptr")}
    with switched(machine):
        assert driver.CUresult is before["CUresult"] and driver.CUdeviceptr is before["CUdeviceptr"]
        assert driver.cuInit is not before["cuInit"] and sys.modules["cuda.bindings.driver"] is driver
    assert {name: getattr(driver, name) for name in before} == before


def test_the_old_module_names_are_switched_too(machine, monkeypatch):
    old = ModuleType("cuda.cuda")
    old.cuInit, old.CUresult = driver.cuInit, driver.CUresult
    monkeypatch.setitem(sys.modules, "cuda.cuda", old)
    with switched(machine):
        assert old.cuInit is driver.cuInit
    assert old.cuInit is driver.cuInit


def test_functions_are_restored_after_an_exception(machine):
    before = driver.cuInit
    with pytest.raises(KeyError), switched(machine):
        raise KeyError
    assert driver.cuInit is before


def test_a_second_switch_is_refused_and_leaves_the_first(machine):
    with switched(machine):
        with pytest.raises(Unsupported, match=r"switched to <Machine of 2 x sm_90a, seed 0> already"), switched():
            pass
        ok(driver.cuInit(0))
        assert ok(driver.cuDeviceGetCount()) == 2


def test_the_error_names_a_module_that_imported_functions_of_the_real_driver(machine, monkeypatch):
    other = ModuleType("some_program")
    other.alloc = before = driver.cuMemAlloc
    monkeypatch.setitem(sys.modules, "some_program", other)
    with (
        pytest.raises(Unsupported, match=r"module some_program has imported cuda.bindings.driver.cuMemAlloc before"),
        switched(machine),
    ):
        pass
    assert driver.cuMemAlloc is before


def test_an_object_that_is_no_machine_and_a_closed_one_are_refused():
    with pytest.raises(ArgumentError, match="machine"), switched("emu"):
        pass
    closed = emu.Machine(devices=1)
    closed.close()
    with pytest.raises(ClosedError), switched(closed):
        pass


def test_the_default_machine_has_the_options_of_the_settings(monkeypatch):
    import drvfuse.emu.machine.machine as module

    monkeypatch.setattr(module, "_default", None)
    wanted = {"DEVICES": "3", "ARCH": "sm_100a", "SEED": "7", "RACE": "strict", "DELAY_STORES": "1"}
    for name, value in wanted.items():
        monkeypatch.setenv(f"DRVFUSE_EMU_{name}", value)
    with df.emu.default_machine() as machine:
        assert (len(machine.devices), machine.arch, machine.seed, machine.delay_stores) == (3, "sm_100a", 7, True)
        assert machine.detector is not None and machine is df.emu.default_machine()


@pytest.mark.parametrize(("name", "value"), [("DEVICES", "9"), ("SEED", "-1"), ("RACE", "loose"), ("ARCH", "sm_10")])
def test_an_impossible_setting_of_the_default_machine_is_named(monkeypatch, name, value):
    import drvfuse.emu.machine.machine as module

    monkeypatch.setattr(module, "_default", None)
    monkeypatch.setenv(f"DRVFUSE_EMU_{name}", value)
    with pytest.raises(ArgumentError, match=f"(?i){name}"):
        df.emu.default_machine()
