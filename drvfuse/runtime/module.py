# SPDX-License-Identifier: Apache-2.0
"""Compiled modules, loaded on devices, and the kernels in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compiler.nvrtc import Image, compile_source
from ..errors import ArgumentError, kind_of, require_kind, require_text, shown
from .device import Device
from .device import device as get_device
from .driver import Driver, DriverLike, get_driver
from .kernel import Kernel


def compile(
    source: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    driver: DriverLike = None,
    arch: str | None = None,
    name: str = "kernel.cu",
    defines: Mapping[str, str | int] | None = None,
    options: Sequence[str] = (),
    include: Sequence[str | Path] = (),
) -> Module:
    """Compile CUDA C++ for the devices of `driver` (see `drvfuse.device`).

    `source` is the text as a str, or the path of a file as a `pathlib.Path`. `names` are name expressions such as
    "kernel<float>", the keys of `module[...]`; extern "C" kernels need none. `arch` is an architecture such as
    "sm_90a", by default that of device 0. `name` stands for the file name in errors and line information if `source` is
    a str; for a file they show the path. `defines` become -D macros, and `options` are any other NVRTC options.
    `include` are folders of headers, which are searched after the folder of the source's own file. CUDA's own headers,
    such as cuda_fp16.h, are found only if their folder is among them. Line information is always on, and the language
    is C++17 unless an option changes it.

    The result is kept in memory and, if the setting `cache` allows it, on disk. Nothing is loaded or launched. Raises
    CompileError with NVRTC's log and the source lines that the log names, Unsupported for an architecture that NVRTC
    does not know, and ArgumentError for a file that cannot be read.

    >>> device = df.device(0, driver="emu")
    >>> twice = df.compile('extern "C" __global__ void twice(int* x) { x[threadIdx.x] *= 2; }', driver="emu")["twice"]
    >>> x = device.array(np.arange(4, dtype=np.int32))
    >>> twice.prepare(1, 4, x)(device.stream)
    >>> x.numpy()
    array([0, 2, 4, 6], dtype=int32)
    """
    opened = get_driver(driver)
    if isinstance(source, os.PathLike):
        name = os.fspath(source)
        try:
            source = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise ArgumentError(
                "source", f"{name!r} ({why})", "CUDA C++, or the path of a file that can be read"
            ) from None
    if not isinstance(source, str):
        raise ArgumentError("source", kind_of(source), "CUDA C++ as a str, or the path of a file")
    require_text("source", source, "text that UTF-8 can represent, without NUL")
    require_text("name", name, "the path of the source, or a label")
    target = arch if arch is not None else get_device(0, driver=opened).arch
    image = compile_source(
        source,
        name=name,
        arch=target,
        defines=defines,
        names=names,
        options=options,
        include=include,
        cubin=opened.takes_cubins,
    )
    return Module(image, opened)


class Module:
    """A compiled source. `module[name]` is the Kernel with the symbol or the name expression `name`; name expressions
    are those that were passed to `compile`. For any other name ArgumentError lists the module's kernels. The module is
    loaded on each device at first use.

    It is never unloaded: unloading waits for running kernels, and the garbage collector must not wait.
    """

    def __init__(self, image: Image, driver: Driver) -> None:
        self.image, self.driver = image, driver
        self._modules: dict[Device, Any] = {}
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Module {self.image.name} for {self.image.arch}: {', '.join(self.image.kernels)}>"

    def __getitem__(self, name: str) -> Kernel:
        """The kernel whose name expression or symbol is `name`."""
        require_kind("name", name, str, "the name of a kernel")
        with self._lock:
            kernel = self._kernels.get(name)
            if kernel is None:
                info = self.image.kernels.get(name)
                if info is None:
                    known = ", ".join(self.image.kernels) or "none"
                    raise ArgumentError("name", shown(name), f"a kernel of {self.image.name}: {known}")
                kernel = self._kernels[name] = Kernel(self, info)
            return kernel

    def _handle(self, device: Device) -> Any:
        with self._lock:
            handle = self._modules.get(device)
            if handle is None:
                if device.driver is not self.driver:
                    raise ArgumentError("device", shown(device), f"a device of the module's driver, {self.driver!r}")
                # The CUDA driver gets the cubin, since it does not load PTX of a newer CUDA version.
                image = self.image.cubin if self.driver.takes_cubins else self.image.ptx.encode() + b"\0"
                with device.use():
                    handle = self._modules[device] = self.driver.cuModuleLoadData(image)
            return handle
