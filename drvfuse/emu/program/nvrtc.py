# SPDX-License-Identifier: Apache-2.0
"""NVRTC for switched programs: the installed library, which gives PTX where a cubin is asked for.

The emulated driver runs PTX. A program that compiles for a real architecture (`-arch=sm_90`) asks NVRTC for a cubin;
NVRTC has the PTX of that compilation too, and this is what the program gets, in the size that it is told. Options are
passed on, and `-lineinfo` is added unless they ask for line numbers or debug information already, so that reports name
lines of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_LINES = {b"-lineinfo", b"--generate-line-info", b"-G", b"--device-debug"}


def functions(nvrtc: ModuleType) -> Mapping[str, Callable[..., Any]]:
    """What takes the place of functions of `cuda.bindings.nvrtc`, which is `nvrtc`."""
    real = {name: getattr(nvrtc, name) for name in ("nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN")}
    ptx_size, ptx = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX

    def compile_program(prog: Any, numOptions: Any, options: Any) -> Any:
        given = options if isinstance(options, list | tuple) else ()
        if len(given) == numOptions and not _LINES.intersection(option for option in given if type(option) is bytes):
            return real["nvrtcCompileProgram"](prog, len(given) + 1, [*given, b"-lineinfo"])
        return real["nvrtcCompileProgram"](prog, numOptions, options)

    def cubin_size(prog: Any) -> Any:
        error, size = real["nvrtcGetCUBINSize"](prog)
        return ptx_size(prog) if size else (error, size)  # without a real architecture there is no cubin

    def cubin(prog: Any, cubin: Any) -> Any:
        return ptx(prog, cubin) if real["nvrtcGetCUBINSize"](prog)[1] else real["nvrtcGetCUBIN"](prog, cubin)

    new: dict[str, Any] = dict(zip(real, (compile_program, cubin_size, cubin), strict=True))
    for name, function in new.items():
        function.__name__ = function.__qualname__ = name
        function.__doc__ = real[name].__doc__
    return new
