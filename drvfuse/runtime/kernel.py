# SPDX-License-Identifier: Apache-2.0
"""Compiled modules, their kernels, and prepared launches with every launch attribute."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compiler.nvrtc import Image, KernelInfo, compile_source
from ..errors import ArgumentError, LaunchError, Unsupported, kind_of, require_kind
from . import calls
from .array import Array, mark_used
from .device import Device
from .device import device as get_device
from .driver import Driver, DriverLike, get_driver
from .launch_attributes import Cluster, Cooperative, LaunchAttribute, Priority, ProgrammaticStreamSerialization
from .packing import Argument, Arguments, Struct
from .stream import Stream, StreamLike

_DEFAULT_SHARED = 48 * 1024  # static and dynamic shared memory of a block that need no function attribute
_PORTABLE_CLUSTER = 8
_MAX_CLUSTER = 16


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
    "sm_90a", by default that of device 0. `name` is the label of a text in errors and line information; for a file it
    is the path. `defines` become -D macros, and `options` are any other NVRTC options. `include` are folders of
    headers, which are searched after the folder of the source's own file. CUDA's own headers, such as cuda_fp16.h, are
    found only if their folder is among them. Line information is always on, and the language is C++17 unless an option
    changes it.

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
    gate = get_driver(driver)
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
    target = arch if arch is not None else get_device(0, driver=gate).arch
    image = compile_source(
        source,
        name=name,
        arch=target,
        defines=defines,
        names=names,
        options=options,
        include=include,
        cubin=gate.takes_cubins,
    )
    return Module(image, gate)


@dataclass(frozen=True)
class FunctionAttributes:
    """The driver's attributes of a loaded kernel; sizes in bytes, registers and local memory per thread."""

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


class Module:
    """A compiled source. `module[name]` is a Kernel, by its symbol or by the name expression that `compile` was given;
    ArgumentError names the kernels that there are. The module is loaded on each device at first use.

    It is never unloaded: the driver would wait for running kernels, which the garbage collector must not cause.
    """

    def __init__(self, image: Image, driver: Driver) -> None:
        self.image, self.driver = image, driver
        self._modules: dict[Device, Any] = {}
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Module {self.image.name} for {self.image.arch}: {', '.join(self.image.kernels)}>"

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of that name expression or symbol."""
        with self._lock:
            kernel = self._kernels.get(name)
            if kernel is None:
                info = self.image.kernels.get(name)
                if info is None:
                    known = ", ".join(self.image.kernels) or "none"
                    raise ArgumentError("name", repr(name), f"a kernel of {self.image.name}: {known}")
                kernel = self._kernels[name] = Kernel(self, info)
            return kernel

    def _handle(self, device: Device) -> Any:
        with self._lock:
            handle = self._modules.get(device)
            if handle is None:
                if device.driver is not self.driver:
                    raise ArgumentError("device", repr(device), f"a device of the {self.driver.name} driver in use")
                # The CUDA driver gets the cubin, since it does not load PTX of a newer CUDA version.
                image = self.image.cubin if self.driver.takes_cubins else self.image.ptx.encode() + b"\0"
                with device.use():
                    handle = self._modules[device] = self.driver.cuModuleLoadData(image)
            return handle


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
        loaded = self._loaded.get(device)
        if loaded is not None:
            return loaded
        with self.module._lock, device.use():
            driver = self.module.driver
            handle = driver.cuModuleGetFunction(self.module._handle(device), self.info.lowered.encode())
            calls.kernel_names[int(handle)] = self.info.name
            with contextlib.suppress(
                Unsupported
            ):  # needs CUDA 12.4; in older versions, reading the attributes below loads it
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
        self._allow_shared(device, loaded, smem)
        with device.use():
            count = self.module.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(loaded.handle, block, smem)
        return int(count)

    def _allow_shared(self, device: Device, loaded: _Loaded, smem: int) -> None:
        limit = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - loaded.attributes.shared_bytes
        if not 0 <= smem <= limit:
            raise LaunchError(f"smem is {smem} bytes; {self.info.name} can have 0 to {limit} on {device!r}")
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
        where = _device_of(args, device)
        dimensions, threads = _dimensions("grid", grid), _dimensions("block", block)
        loaded = self._on(where)
        self._check_shape(where, loaded, dimensions, threads)
        self._allow_shared(where, loaded, smem)
        wanted: list[object] = [] if cluster is None else [Cluster(*_dimensions("cluster", cluster))]
        shape = loaded.required_cluster if cluster is None else _dimensions("cluster", cluster)
        if shape is not None:
            self._check_cluster(where, loaded, dimensions, threads, smem, shape)
        if cooperative:
            self._check_cooperative(where, dimensions, threads, smem)
            wanted.append(Cooperative())
        if pdl:
            wanted.append(ProgrammaticStreamSerialization())
        if priority is not None:
            wanted.append(Priority(priority))
        wanted += attrs
        if any(isinstance(attribute, ProgrammaticStreamSerialization) for attribute in wanted):
            self._check_pdl(where)
        arguments = Arguments(self.info, args, where)
        return Launch(self, where, loaded.handle, dimensions, threads, smem, wanted, arguments)

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
            config = _config(driver.types, grid, block, smem, [Cluster(*cluster).build(driver.types)])
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
            raise LaunchError(f"a cooperative grid of {blocks} blocks was requested; at most {fits} fit on {device!r}")

    def _check_pdl(self, device: Device) -> None:
        if device.capability < (9, 0):
            raise Unsupported(f"PDL needs compute capability 9.0; {device!r} has {device.capability}")
        if not self.info.has_pdl_wait:
            raise LaunchError(
                f"{self.info.name} has no griddepcontrol.wait: launched with PDL it would read what the kernel in front"
                " of it has not written yet"
            )


class Launch:
    """A prepared launch. A call with a stream queues the kernel and does not wait. One thread at a time may use it.

    It keeps its Arrays alive, and calls their `used_on`.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: Device,
        function: object,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        smem: int,
        attributes: Sequence[object],
        arguments: Arguments,
    ) -> None:
        self.kernel, self.device, self.grid, self.block, self.smem = kernel, device, grid, block, smem
        self._function, self._arguments = function, arguments
        types = device.driver.types
        built: list[Any] = [a.build(types) if isinstance(a, LaunchAttribute) else a for a in attributes]
        for attribute in built:
            if not isinstance(attribute, types.CUlaunchAttribute):
                raise ArgumentError("attrs", kind_of(attribute), "launch attributes")
        identities = [int(attribute.id) for attribute in built]
        if len(set(identities)) != len(identities):
            raise ArgumentError("attrs", "the same attribute twice", "each attribute once")
        self._config = _config(types, grid, block, smem, built)
        self._attributes = tuple(attributes)  # keeps events in them alive
        shown = (
            repr(a) if isinstance(a, LaunchAttribute) else made.id.name
            for a, made in zip(attributes, built, strict=True)
        )
        where = kernel.info.name, device.index, grid, block, smem
        self._facts = calls.LaunchFacts(*where, tuple(shown), kernel.info.params, arguments.structures)
        self._handle_set = 0

    def __repr__(self) -> str:
        return f"<Launch {self.kernel.info.name} grid {self.grid} block {self.block} on device {self.device.index}>"

    def set(self, index: int, value: Argument) -> None:
        """Rewrite argument `index` in place, with the checks of `prepare`; launches already made are not changed."""
        self._arguments.set(index, value)

    def resize(self, grid: int) -> None:
        """Use another one-dimensional grid from now on, not larger than the one that `prepare` has checked."""
        self._config.gridDimX = grid
        self.grid = (grid, 1, 1)
        self._facts = self._facts._replace(grid=self.grid)

    def view(self, index: int, kind: type[Struct]) -> Struct:
        """Argument `index`, a struct, in place: its fields may be written before each launch."""
        return self._arguments.view(index, kind)

    def __call__(self, stream: StreamLike) -> None:
        """Queue the kernel on `stream`: a Stream of the launch's device, or whatever `Stream.wrap` takes."""
        if not isinstance(stream, Stream) or stream.device is not self.device:
            stream = Stream.wrap(self.device, stream)
        if stream._closed:
            stream._check_open()
        if stream.handle != self._handle_set:
            self._config.hStream = stream.handle
            self._handle_set = stream.handle
        arguments = self._arguments
        note = self._facts, self._handle_set, bytes(arguments.packed)  # a copy, since they may be overwritten in place
        with self.device.use():
            self.device.driver.launch(note, self._config, self._function, arguments.address, 0)
        if self._arguments.arrays:
            outside = stream.foreign and stream.capture_id() is None
            mark_used(self._arguments.arrays.values(), stream, stream.mark() if outside else None)


def _config(types: Any, grid: Sequence[int], block: Sequence[int], smem: int, attributes: list[Any]) -> Any:
    config = types.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.attrs, config.numAttrs = smem, attributes, len(attributes)
    return config


def _device_of(args: Sequence[object], device: Device | None) -> Device:
    if device is not None:
        require_kind("device", device, Device, "a drvfuse.Device")
        return device
    for value in args:
        if isinstance(value, Array):
            return value.device
    raise ArgumentError("device", "None", "given, since no argument is a drvfuse Array")


def _dimensions(argument: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    try:
        if isinstance(value, (tuple, list, Sequence)):  # tuple and list are named as their check is quick
            given = [operator.index(n) for n in value]
        else:
            given = [operator.index(value)]
    except TypeError:
        raise ArgumentError(argument, repr(value), "an int or up to three") from None
    if not 1 <= len(given) <= 3 or any(n < 1 for n in given):
        raise ArgumentError(argument, repr(value), "one to three positive ints")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z
