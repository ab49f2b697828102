# SPDX-License-Identifier: Apache-2.0
"""NVRTC for programs on the emulated driver: the installed library, which gives PTX in place of a cubin.

The emulated driver runs PTX. A program that compiles for a real architecture (`-arch=sm_90`) requests a cubin from
NVRTC. NVRTC has the PTX of that compilation too, and the program gets the PTX and its size instead. Options are passed
on. If they do not request line numbers or debug information, `-lineinfo` is added, so that reports have lines of the
source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_LINES = {b"-lineinfo", b"--generate-line-info", b"-G", b"--device-debug"}


def functions(nvrtc: ModuleType) -> Mapping[str, Callable[..., Any]]:
    """The replacements for functions of `cuda.bindings.nvrtc`, which is the argument."""
    compile_program, cubin_size = nvrtc.nvrtcCompileProgram, nvrtc.nvrtcGetCUBINSize
    cubin, ptx_size, ptx = nvrtc.nvrtcGetCUBIN, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX

    def nvrtcCompileProgram(prog: Any, numOptions: Any, options: Any) -> Any:
        if isinstance(options, list | tuple) and len(options) == numOptions:
            options = _with_lines(options)
            numOptions = len(options)
        return compile_program(prog, numOptions, options)

    def nvrtcGetCUBINSize(prog: Any) -> Any:
        error, size = cubin_size(prog)
        # The size of the PTX, which replaces the cubin. A compilation for a virtual architecture has no cubin: size 0.
        return ptx_size(prog) if size else (error, size)

    def nvrtcGetCUBIN(prog: Any, cubin_: Any) -> Any:
        return (ptx if cubin_size(prog)[1] else cubin)(prog, cubin_)

    return _named(nvrtc, nvrtcCompileProgram, nvrtcGetCUBINSize, nvrtcGetCUBIN)


def functions_v2(nvrtc: ModuleType) -> Mapping[str, Callable[..., Any]]:
    """The replacements for functions of `cuda.bindings._v2.nvrtc`, which raise errors and return only results."""
    real_compile, real_size = nvrtc.compile_program, nvrtc.get_cubin_size
    real_cubin, ptx_size, ptx = nvrtc.get_cubin, nvrtc.get_ptx_size, nvrtc.get_ptx

    def compile_program(prog: Any, options: Any = None) -> Any:
        return real_compile(prog, _with_lines(options) if isinstance(options, list | tuple) else options)

    def get_cubin_size(prog: Any) -> Any:
        return ptx_size(prog) if real_size(prog) else 0

    def get_cubin(prog: Any) -> Any:
        return (ptx if real_size(prog) else real_cubin)(prog)

    return _named(nvrtc, compile_program, get_cubin_size, get_cubin)


def _with_lines(options: list[Any] | tuple[Any, ...]) -> list[Any]:
    asked = any(option in _LINES for option in options if isinstance(option, bytes))
    return list(options) if asked else [*options, b"-lineinfo"]


def _named(nvrtc: ModuleType, *made: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    for function in made:
        function.__doc__ = getattr(nvrtc, function.__name__).__doc__
    return {function.__name__: function for function in made}
