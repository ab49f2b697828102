# SPDX-License-Identifier: Apache-2.0
"""The NVRTC library: finding the one that matches the driver, and its C functions.

The library is called directly, not through `cuda.bindings.nvrtc`: that module loads the newest NVRTC it finds, and the
driver cannot load a cubin of a CUDA major version newer than its own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .. import config
from ..errors import CompileError, DriverUnavailable, Unsupported

_SONAME = re.compile(r"libnvrtc\.so\.(\d+)$")
_NEWEST_KNOWN = 13
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Output:
    """The result of a compilation. `lowered` maps name expressions to symbols; `cubin` is None for a virtual
    architecture."""

    cubin: bytes | None
    ptx: str
    log: str
    lowered: dict[str, str]


class Library:
    """A loaded NVRTC. `version` is (major, minor), `archs` the compute capabilities it compiles for, e.g. 90."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._dll = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        # NVRTC opens its library of builtins by name alone. That library is loaded here first, since NVRTC 13.0 does
        # not look for it in its own folder.
        builtins = Path(path).with_name("libnvrtc-builtins.so.{}.{}".format(*self.version))
        self._builtins = ctypes.CDLL(str(builtins)) if builtins.exists() else None
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.archs = tuple(archs)

    @functools.cached_property
    def identity(self) -> str:
        """A text that differs between builds of the library. `nvrtcVersion` is equal for patch releases."""
        try:
            size = os.stat(self.path).st_size
        except OSError:  # the loader found it by its name, so there is no path to read
            size = 0
        return "nvrtc {}.{} {}".format(*self.version, size)

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._dll, name)(*args)
        if code:
            text = self._dll.nvrtcGetErrorString
            text.restype = ctypes.c_char_p
            raise CompileError(name, f"{text(code).decode()} ({code})")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]

    def compile(
        self,
        source: str,
        name: str,
        options: Sequence[str],
        names: Sequence[str] = (),
        headers: Mapping[str, str] = _NO_HEADERS,
        cubin: bool = True,
    ) -> Output:
        """Compile for the architecture in `options`: a real one gives a cubin, a virtual one only PTX. `headers` maps
        the names of headers to their texts. CompileError has NVRTC's log. Needs no GPU and no driver."""
        program = ctypes.c_void_p()
        array = ctypes.c_char_p * len(headers)
        texts, called = array(*map(str.encode, headers.values())), array(*map(str.encode, headers))
        made = ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, called
        self._call("nvrtcCreateProgram", *made)
        try:
            for expression in names:
                self._call("nvrtcAddNameExpression", program, expression.encode())
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = None
            try:
                self._call("nvrtcCompileProgram", program, len(options), encoded)
            except CompileError as error:
                failed = error
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if failed is not None:
                raise CompileError(name, log or failed.log)
            lowered = {}
            for expression in names:
                symbol = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(symbol))
                lowered[expression] = (symbol.value or b"").decode()
            ptx = self._text(program, "PTX").rstrip(b"\0").decode()
            return Output(self._text(program, "CUBIN") if cubin else None, ptx, log, lowered)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def _wheel_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from Path(root).glob("*/lib")


def _system_folders() -> Iterator[Path]:
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "lib64"
    yield Path(sys.prefix) / "lib"
    yield Path("/usr/local/cuda/lib64")


def _installed() -> dict[int, str]:
    """CUDA major version -> path or soname of an NVRTC. Wheels are preferred to toolkits, and both to the loader's
    path.
    """
    found: dict[int, str] = {}
    for folders in (_wheel_folders(), _system_folders()):
        for folder in folders:
            for path in sorted(folder.glob("libnvrtc.so.*")):
                match = _SONAME.search(path.name)
                if match:
                    found.setdefault(int(match[1]), str(path))
    for major in range(12, _NEWEST_KNOWN + 1):
        if major not in found:
            try:
                ctypes.CDLL(f"libnvrtc.so.{major}")
            except OSError:
                continue
            found[major] = f"libnvrtc.so.{major}"
    return found


def cuda_version() -> tuple[int, int] | None:
    """CUDA version (major, minor) of the installed driver library, or None without one. Initialises nothing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    value = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(value)) or not value.value:
        return None
    return value.value // 1000, value.value % 1000 // 10


def _wheel(major: int) -> str:
    return "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"


@functools.lru_cache(maxsize=8)
def _open(path: str) -> Library:
    return Library(path)


@functools.lru_cache(maxsize=1)
def _choose() -> str:
    installed = _installed()
    driver = cuda_version()
    if not installed:
        extra = "cu13" if driver and driver[0] >= 13 else "cu12"
        raise DriverUnavailable(f"no NVRTC library was found: pip install 'drvfuse[{extra}]' or set DRVFUSE_NVRTC")
    usable = [major for major in installed if driver is None or major <= driver[0]]
    if not usable:
        assert driver is not None
        raise Unsupported(
            f"NVRTC {min(installed)} is installed, but the driver is CUDA {driver[0]}.{driver[1]} and cannot load what"
            f" a newer major version compiles: pip install {_wheel(driver[0])}, or set DRVFUSE_NVRTC"
        )
    return installed[max(usable)]


def library() -> Library:
    """The NVRTC of the setting `nvrtc`, else the newest whose CUDA major version is at most the driver's."""
    path = config.get("nvrtc")
    if not path:
        return _open(_choose())
    try:
        return _open(path)
    except OSError as error:
        raise DriverUnavailable(f"the nvrtc setting's library {path!r} cannot be loaded: {error}") from error
