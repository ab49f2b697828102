# SPDX-License-Identifier: Apache-2.0
"""Modules and libraries of the emulated driver: forms of images, refused images, and variables of each context."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from driver_helpers import R, code, function, ok, primary, ptx
from launch_helpers import AXPY, device_array, host_array, launch, zeros

from drvfuse.emu import Machine


def test_the_default_machine_runs_a_kernel(rng: np.random.Generator) -> None:
    from drvfuse.emu import driver as cuda

    ok(cuda.cuInit(0))
    primary(cuda)
    x, y = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    dx, dy = device_array(cuda, x), device_array(cuda, y)
    ok(launch(cuda, function(cuda, AXPY, "axpy"), 4, 256, (2.0, dx, dy, 1000)))
    assert np.array_equal(host_array(cuda, dy, y), np.float32(2) * x + y)
    ok(cuda.cuDevicePrimaryCtxRelease(0))


def test_a_module_is_loaded_from_every_form_of_image(cuda: Any, tmp_path: Any) -> None:
    primary(cuda)
    image = ptx(AXPY)
    keep = ctypes.create_string_buffer(image)
    path = tmp_path / "axpy.ptx"
    path.write_bytes(image)
    for module in (
        cuda.cuModuleLoadData(image),
        cuda.cuModuleLoadData(ctypes.addressof(keep)),
        cuda.cuModuleLoadData(np.frombuffer(image, np.uint8)),
        cuda.cuModuleLoadDataEx(image, 0, [], []),
        cuda.cuModuleLoad(str(path).encode()),
    ):
        handle = ok(module)
        assert ok(cuda.cuFuncGetName(ok(cuda.cuModuleGetFunction(handle, b"pick")))) == b"pick"
        assert ok(cuda.cuModuleGetFunctionCount(handle)) == 2
        ok(cuda.cuModuleUnload(handle))
    assert code(cuda.cuModuleGetFunction(handle, b"pick")) == R.CUDA_ERROR_INVALID_HANDLE
    assert code(cuda.cuModuleLoad(str(tmp_path / "none").encode())) == R.CUDA_ERROR_FILE_NOT_FOUND


def test_a_module_that_cannot_run_is_refused_with_a_report(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    newer = ptx(AXPY).replace(b"sm_90a", b"sm_100a")
    assert code(cuda.cuModuleLoadData(newer)) == R.CUDA_ERROR_INVALID_PTX
    assert "sm_100a" in machine.reports[-1].message
    text = ptx(AXPY).decode()
    line = next(i for i, row in enumerate(text.split("\n"), 1) if "ld.param.f32" in row)
    broken = text.replace("ld.param.f32", "frobnicate.f32")
    assert code(cuda.cuModuleLoadData(broken.encode())) == R.CUDA_ERROR_INVALID_PTX
    assert machine.reports[-1].kind == "module"
    assert f"PTX line {line}" in machine.reports[-1].message and "frobnicate" in machine.reports[-1].message
    assert machine.reports[-1].line == AXPY[: AXPY.index("axpy(")].count("\n") + 1


def test_each_context_has_its_own_variables(cuda: Any) -> None:
    seen = []
    for device in (0, 1):
        primary(cuda, device)
        module = ok(cuda.cuModuleLoadData(ptx(AXPY)))
        pick = ok(cuda.cuModuleGetFunction(module, b"pick"))
        chosen, size = ok(cuda.cuModuleGetGlobal(module, b"chosen"))
        assert size == 4
        ok(cuda.cuMemsetD32(chosen, device + 1, 1))
        out = zeros(cuda, 1)
        for _ in range(2):
            ok(launch(cuda, pick, 1, 1, (out,)))
        seen.append(host_array(cuda, out, np.zeros(1, np.float32))[0])
        assert code(cuda.cuModuleGetGlobal(module, b"missing")) == R.CUDA_ERROR_NOT_FOUND
    assert seen == [3.0, 4.0]


def test_a_library_serves_every_context(cuda: Any) -> None:
    primary(cuda, 0)
    library = ok(cuda.cuLibraryLoadData(ptx(AXPY), [], [], 0, [], [], 0))
    kernel = ok(cuda.cuLibraryGetKernel(library, b"pick"))
    assert ok(cuda.cuLibraryGetKernelCount(library)) == 2
    for device in (0, 1):
        primary(cuda, device)
        out = zeros(cuda, 1)
        ok(launch(cuda, kernel, 1, 1, (out,)))
        assert host_array(cuda, out, np.zeros(1, np.float32))[0] == 1.0
    assert ok(cuda.cuFuncGetName(ok(cuda.cuKernelGetFunction(kernel)))) == b"pick"
    ok(cuda.cuLibraryUnload(library))
    assert code(cuda.cuKernelGetFunction(kernel)) == R.CUDA_ERROR_INVALID_HANDLE
