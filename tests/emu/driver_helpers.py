# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of the emulated driver."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from cuda.bindings import driver as types
from cuda.bindings import nvrtc

R = types.CUresult


def ok(result: tuple[Any, ...]) -> Any:
    """Return the values of a call. Asserts that the call succeeded."""
    assert result[0] == R.CUDA_SUCCESS, result
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def code(result: tuple[Any, ...]) -> Any:
    """Return the CUresult of a call. Asserts that a call that failed returned no values."""
    if result[0] != R.CUDA_SUCCESS:
        assert all(value is None for value in result[1:])
    return result[0]


@functools.cache
def ptx(source: str, arch: str = "compute_90a") -> bytes:
    """The PTX that NVRTC makes from CUDA C++ source."""
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert error == 0
    options = [f"--gpu-architecture={arch}".encode(), b"-lineinfo", b"--std=c++17"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text


def primary(cuda: Any, device: int = 0) -> Any:
    """Retain the device's primary context, make it current and return it."""
    context = ok(cuda.cuDevicePrimaryCtxRetain(device))
    ok(cuda.cuCtxSetCurrent(context))
    return context


def function(cuda: Any, source: str, name: str) -> Any:
    """Load the kernel of CUDA C++ source into the current context."""
    return ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(ptx(source))), name.encode()))
