# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of a kernel, and the cache of compiled kernels of a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...compiler.nvrtc import Image, compile_source
from ...errors import Unsupported
from ...plans.definitions import Defines as Defines
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.kernel import Kernel
from ...runtime.module import Module
from . import faults

CU = Path(__file__).parents[2] / "cu"
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Specialisation:
    """The source file, the macros and the requirements of a kernel.

    The kernel is called `kernel`, or `name` if `kernel` is empty, and is in the file cu/`folder`/`name`.cu. `defines`
    are the macros with which it is compiled, and `text` is inserted before the file. The kernel needs compute
    capability `capability` or later, for the feature that `needs` names. `fault` is the fault that is planted in the
    kernel.
    """

    folder: str
    name: str
    defines: Defines
    kernel: str = ""
    capability: tuple[int, int] = (0, 0)
    needs: str = "FP8"
    text: str = ""
    fault: str = field(default_factory=faults.planted)

    @property
    def symbol(self) -> str:
        """The kernel's name in the compiled module."""
        return self.kernel or self.name

    def compile(self, arch: str, options: Sequence[str] = (), cubin: bool = True) -> Image:
        """Compile the kernel for `arch` with further compiler `options`: to PTX, and with `cubin` to machine code
        too."""
        return compile_source(
            f'{self.text}#include "{self.folder}/{self.name}.cu"\n',
            name=f"{self.symbol}_kernel.cu",  # must differ from the name of the included file
            arch=arch,
            defines=dict(self.defines) | faults.defines(self.fault),
            options=("--fmad=false", *options),
            include=(str(CU),),
            cubin=cubin,
        )


class KernelCache:
    """The compiled kernels of a driver, by specialisation and architecture. `driver.part(KernelCache)` returns it."""

    def __init__(self, driver: Driver) -> None:
        self.kernels: dict[tuple[Specialisation, str], Kernel] = {}

    def load(self, device: Device, spec: Specialisation) -> Kernel:
        """Return the kernel, loaded on `device`. Raises Unsupported for a device that is too old for it."""
        if device.capability < spec.capability:
            least, own = (".".join(map(str, number)) for number in (spec.capability, device.capability))
            raise Unsupported(f"{spec.symbol} needs compute capability {least} for {spec.needs}; {device!r} has {own}")
        kernel = self.kernels.get((spec, device.arch))
        if kernel is None:
            kernel = Module(spec.compile(device.arch, cubin=device.driver.takes_cubins), device.driver)[spec.symbol]
            kernel = self.kernels.setdefault((spec, device.arch), kernel)
        kernel.load(device)
        return kernel


def load(device: Device, spec: Specialisation) -> Kernel:
    """Return the kernel, loaded on `device`; compiled once per driver. Raises Unsupported for a device that is too old
    for it."""
    return device.driver.part(KernelCache).load(device, spec)
