# SPDX-License-Identifier: Apache-2.0
"""Kernels of compiled modules: their attributes on a device, and the checks of their launches."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import (
    ArgumentError,
    LaunchError,
    Unsupported,
    counted,
    require_flag,
    require_integer,
    require_kind,
    shown,
)
from ..ptx.facts import KernelInfo
from . import calls
from .array import Array
from .device import Device
from .launch import Configuration, Launch, config_of
from .launch_attributes import Cluster, Cooperative, Priority, ProgrammaticStreamSerialization
from .packing import Argument

if TYPE_CHECKING:
    from .module import Module

_DEFAULT_SHARED = 48 * 1024  # the shared memory, static and dynamic, that a block may have without a function attribute
_PORTABLE_CLUSTER = 8
_MAX_CLUSTER = 16


@dataclass(frozen=True)
class FunctionAttributes:
    """What the driver tells about a loaded kernel. Sizes are in bytes. Registers and local memory are those of one
    thread, and `max_threads` is the size of the largest block.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    const_bytes: int
    max_threads: int


@dataclass
class _Loaded:
    handle: Any
    attributes: FunctionAttributes
    dynamic_limit: int
    required_cluster: tuple[int, ...] | None


class Kernel:
    """A kernel of a module. `info` has its parameters and other facts from its PTX. `prepare` makes launches of it."""

    def __init__(self, module: Module, info: KernelInfo) -> None:
        self.module, self.info = module, info
        self._loaded: dict[Device, _Loaded] = {}

    def __repr__(self) -> str:
        return f"<Kernel {self.info.name}>"

    def load(self, device: Device) -> None:
        """Load the code on `device` now, so that no later launch can block on loading. Harmless if it is loaded."""
        self._on(device)

    def _on(self, device: Device) -> _Loaded:
        require_kind("device", device, Device, "a drvfuse.Device")
        loaded = self._loaded.get(device)
        if loaded is not None:
            return loaded
        with self.module._lock, device.use():
            driver = self.module.driver
            handle = driver.cuModuleGetFunction(self.module._handle(device), self.info.lowered.encode())
            calls.kernel_names[int(handle)] = self.info.name
            with contextlib.suppress(
                Unsupported
            ):  # cuFuncLoad needs CUDA 12.4; before that, reading the attributes below loads the kernel
                driver.cuFuncLoad(handle)
            enum = driver.types.CUfunction_attribute

            def read(name: str) -> int:
                return int(driver.cuFuncGetAttribute(getattr(enum, f"CU_FUNC_ATTRIBUTE_{name}"), handle))

            attributes = FunctionAttributes(
                registers=read("NUM_REGS"),
                local_bytes=read("LOCAL_SIZE_BYTES"),
                shared_bytes=read("SHARED_SIZE_BYTES"),
                const_bytes=read("CONST_SIZE_BYTES"),
                max_threads=read("MAX_THREADS_PER_BLOCK"),
            )
            required = None
            if device.capability >= (9, 0):
                required = tuple(read(f"REQUIRED_CLUSTER_{side}") for side in ("WIDTH", "HEIGHT", "DEPTH"))
            free = _DEFAULT_SHARED - attributes.shared_bytes
            return self._loaded.setdefault(
                device, _Loaded(handle, attributes, free, required if required and all(required) else None)
            )

    def attributes(self, device: Device) -> FunctionAttributes:
        """Registers, memory and the largest block of this kernel on `device`."""
        return self._on(device).attributes

    def occupancy(self, device: Device, block: int, smem: int = 0) -> int:
        """The number of blocks of `block` threads with `smem` bytes of dynamic shared memory that fit on one
        multiprocessor of `device`. Raises LaunchError for more shared memory than a block can have.
        """
        loaded = self._on(device)
        require_integer("block", block, "a number of threads, 1 to 1024", 1, 1024)
        self._allow_shared(device, loaded, smem)
        with device.use():
            count = self.module.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(loaded.handle, block, smem)
        return int(count)

    def _allow_shared(self, device: Device, loaded: _Loaded, smem: int) -> None:
        limit = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - loaded.attributes.shared_bytes
        require_integer("smem", smem, "a number of bytes")
        if not 0 <= smem <= limit:
            raise LaunchError(f"smem is {counted(smem, 'byte')}; {self.info.name} can have 0 to {limit} on {device!r}")
        with self.module._lock:
            if smem > loaded.dynamic_limit:  # never lowered: another prepared launch may rely on the larger value
                attribute = self.module.driver.types.CUfunction_attribute
                with device.use():
                    self.module.driver.cuFuncSetAttribute(
                        loaded.handle, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem
                    )
                loaded.dynamic_limit = smem

    def prepare(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Argument,
        device: Device | None = None,
        smem: int = 0,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
        pdl: bool = False,
        priority: int | None = None,
        attrs: Sequence[object] = (),
    ) -> Launch:
        """A launch whose arguments are checked and packed. It can be called with a stream any number of times.

        `grid` counts blocks, also with clusters, and `block` threads: an int, or up to three. `args` are the kernel's
        arguments: an Array or an int for a pointer, numbers, and a ctypes.Structure or bytes of the exact size for a
        struct by value. `device` is needed only if no argument is an Array. `smem` is dynamic shared memory in bytes;
        `cluster` the shape of a cluster in blocks; `cooperative`, `pdl` (a dependent launch) and `priority` are launch
        attributes, and `attrs` any others, as values of `drvfuse.runtime.launch_attributes` or CUlaunchAttribute
        objects. The kernel is loaded here, and nothing is launched.

        Raises ArgumentError for arguments that the kernel's parameters do not take. Raises LaunchError if the kernel or
        the device does not allow the grid, the block or the shared memory; for a grid that is no multiple of the
        cluster; for clusters of more than 16 blocks, of another shape than __cluster_dims__, or too large for the
        device; for a cooperative grid that does not fit; and for PDL with a kernel that has no griddepcontrol.wait,
        since it would race with its predecessor. Raises Unsupported for clusters and PDL on a device before compute
        capability 9.0.
        """
        configuration = self.configure(
            grid,
            block,
            device=_device_of(args) if device is None else device,
            smem=smem,
            cluster=cluster,
            cooperative=cooperative,
            pdl=pdl,
            priority=priority,
            attrs=attrs,
        )
        return configuration.prepare(*args)

    def configure(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *,
        device: Device,
        smem: int = 0,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
        pdl: bool = False,
        priority: int | None = None,
        attrs: Sequence[object] = (),
    ) -> Configuration:
        """The configuration of launches that differ only in their arguments. Checks what `prepare` checks, and raises
        the same errors."""
        require_kind("device", device, Device, "a drvfuse.Device")
        dimensions, threads = _dimensions("grid", grid), _dimensions("block", block)
        loaded = self._on(device)
        self._check_shape(device, loaded, dimensions, threads)
        self._allow_shared(device, loaded, smem)
        wanted: list[object] = [] if cluster is None else [Cluster(*_dimensions("cluster", cluster))]
        shape = loaded.required_cluster if cluster is None else _dimensions("cluster", cluster)
        if shape is not None:
            self._check_cluster(device, loaded, dimensions, threads, smem, shape)
        if require_flag("cooperative", cooperative):
            self._check_cooperative(device, dimensions, threads, smem)
            wanted.append(Cooperative())
        if require_flag("pdl", pdl):
            wanted.append(ProgrammaticStreamSerialization())
        if priority is not None:
            wanted.append(
                Priority(require_integer("priority", priority, "an integer of 32 bits", -(1 << 31), (1 << 31) - 1))
            )
        require_kind("attrs", attrs, Sequence, "a sequence of launch attributes")
        wanted += attrs
        if any(isinstance(attribute, ProgrammaticStreamSerialization) for attribute in wanted):
            self._check_pdl(device)
        return Configuration(self, device, loaded.handle, dimensions, threads, smem, wanted)

    def _check_shape(self, device: Device, loaded: _Loaded, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
        for what, size, limits in zip(("grid", "block"), (grid, block), device.launch_limits, strict=True):
            if any(map(operator.gt, size, limits)):
                raise LaunchError(f"{what} is {size}; it must be at most {limits} on {device!r}")
        threads = block[0] * block[1] * block[2]
        limit = min(loaded.attributes.max_threads, self.info.max_threads or loaded.attributes.max_threads)
        if threads > limit:
            raise LaunchError(f"block is {block}, {threads} threads; {self.info.name} allows at most {limit}")

    def _check_cluster(
        self,
        device: Device,
        loaded: _Loaded,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        smem: int,
        cluster: tuple[int, ...],
    ) -> None:
        if device.capability < (9, 0):
            raise Unsupported(f"clusters need compute capability 9.0; {device!r} has {device.capability}")
        if any(n % m for n, m in zip(grid, cluster, strict=True)):
            raise LaunchError(f"grid is {grid}; it must be a multiple of the cluster {cluster}")
        if loaded.required_cluster not in (None, cluster):
            raise LaunchError(f"cluster is {cluster}; {self.info.name} requires {loaded.required_cluster}")
        blocks = cluster[0] * cluster[1] * cluster[2]
        if blocks > _MAX_CLUSTER:
            raise LaunchError(f"cluster is {cluster}, {blocks} blocks; it must have at most {_MAX_CLUSTER}")
        driver = self.module.driver
        with device.use():
            if blocks > _PORTABLE_CLUSTER:
                allowed = driver.types.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                driver.cuFuncSetAttribute(loaded.handle, allowed, 1)
            config = config_of(driver.types, grid, block, smem, [Cluster(*cluster).build(driver.types)])
            if not driver.cuOccupancyMaxActiveClusters(loaded.handle, config):
                raise LaunchError(
                    f"no cluster of {blocks} blocks of {self.info.name} with {smem} bytes fits on {device!r}"
                )

    def _check_cooperative(self, device: Device, grid: tuple[int, ...], block: tuple[int, ...], smem: int) -> None:
        if not device.attribute("COOPERATIVE_LAUNCH"):
            raise Unsupported(f"{device!r} has no cooperative launch")
        fits = self.occupancy(device, block[0] * block[1] * block[2], smem) * device.sm_count
        blocks = grid[0] * grid[1] * grid[2]
        if blocks > fits:
            asked = f"a cooperative grid of {counted(blocks, 'block')} was requested"
            raise LaunchError(f"{asked}; at most {fits} fit on {device!r}")

    def _check_pdl(self, device: Device) -> None:
        if device.capability < (9, 0):
            raise Unsupported(f"PDL needs compute capability 9.0; {device!r} has {device.capability}")
        if not self.info.has_pdl_wait:
            raise LaunchError(
                f"{self.info.name} has no griddepcontrol.wait: launched with PDL it would read what the previous kernel"
                " on the stream has not written yet"
            )


def _device_of(args: Sequence[object]) -> Device:
    for value in args:
        if isinstance(value, Array):
            return value.device
    raise ArgumentError("device", "None", "given, since no argument is a drvfuse Array")


def _dimensions(argument: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    expected = "an int or a sequence of up to three ints"
    # tuple and list come first, as the check for Sequence is slow
    several = value if isinstance(value, (tuple, list, Sequence)) else (value,)
    given = [n if type(n) is int else require_integer(argument, n, expected) for n in several]
    if not 1 <= len(given) <= 3 or any(n < 1 for n in given):
        raise ArgumentError(argument, shown(value), "one to three positive ints")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z
