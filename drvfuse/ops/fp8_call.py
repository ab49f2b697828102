# SPDX-License-Identifier: Apache-2.0
"""What the single-device FP8 ops share: checked operands, streams, scratch, kernels and the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import config, dtypes
from ..comm.ordering import same
from ..dtypes import DType
from ..errors import ArgumentError, CaptureError, Unsupported
from ..runtime import interop
from ..runtime.array import Array, mark_used
from ..runtime.device import Device
from ..runtime.driver import Driver, get_driver
from ..runtime.graph import capturing
from ..runtime.kernel import Kernel, Module
from ..runtime.nvrtc import compile_source
from ..runtime.stream import Stream
from .kernels import sources
from .options import PDLLevel
from .scratch import STATE_BYTES, Workspace, acquire

if TYPE_CHECKING:
    from ..trace.buffer import Section

FP8 = ("float8_e4m3fn", "float8_e5m2")
WEIGHTS = ("bfloat16", "float32")
GROUPS = (16, 32, 64, 128)
HEADER_BYTES = STATE_BYTES + 512 * 8  # `struct GridWorkspace` of cu/grid_barrier.cuh
VECTOR = 16
scratch = acquire
_FP8_CAPABILITY = (8, 9)


def driver_of(*arrays: Any) -> Driver:
    """The driver of the first drvfuse Array among `arrays`, else the one of the `driver` setting."""
    for array in arrays:
        if isinstance(array, Array):
            return array.device.driver
    return get_driver(None)


@dataclass(frozen=True)
class Operand:
    """A checked array of the call: rows of `columns` elements at `stride`."""

    name: str
    span: Array
    shape: tuple[int, ...]
    stride: int
    producer: Stream | None
    foreign: bool

    @property
    def ptr(self) -> int:
        return self.span.ptr

    @property
    def dtype(self) -> DType:
        return self.span.dtype

    @property
    def rows_aligned(self) -> bool:
        """Whether every row begins at a multiple of 16 bytes."""
        step = self.stride * self.dtype.itemsize
        return self.ptr % VECTOR == 0 and step % VECTOR == 0


def rows(name: str, value: Any, driver: Driver, allowed: Sequence[str]) -> Operand:
    """An input whose rows may be farther apart than they are long."""
    found = interop.as_rows(value, driver=driver, argument=name)
    if found.span.dtype.name not in allowed:
        raise ArgumentError(f"{name}.dtype", str(found.span.dtype), "one of " + ", ".join(allowed))
    return Operand(name, found.span, found.shape, found.stride, found.producer, found.span is not value)


def whole(name: str, value: Any, driver: Driver, dtype: Sequence[str], writable: bool = False) -> Operand:
    """A C-contiguous input or output."""
    array, producer = interop.as_array(value, driver=driver, argument=name, writable=writable)
    if array.dtype.name not in dtype:
        raise ArgumentError(f"{name}.dtype", str(array.dtype), "one of " + ", ".join(dtype))
    return Operand(name, array, array.shape, array.shape[-1] if array.shape else 1, producer, array is not value)


def require_shape(operand: Operand, shape: tuple[int, ...], why: str) -> None:
    if operand.shape != shape:
        raise ArgumentError(operand.name, f"of shape {operand.shape}", f"of shape {shape}, {why}")


def one_device(operands: Iterable[Operand]) -> Device:
    """The device of all operands."""
    first, *rest = operands
    for operand in rest:
        if operand.span.size and operand.span.device is not first.span.device:
            raise ArgumentError(
                operand.name,
                f"on device {operand.span.device.index}",
                f"on device {first.span.device.index}, as {first.name} is",
            )
    return first.span.device


def no_overlap(read: Sequence[Operand], written: Sequence[Operand]) -> None:
    """No output shares memory with another array of the call."""
    for position, output in enumerate(written):
        for other in (*read, *written[:position]):
            a, b = output.span, other.span
            if a.nbytes and b.nbytes and a.ptr < b.ptr + b.nbytes and b.ptr < a.ptr + a.nbytes:
                raise ArgumentError(output.name, f"overlapping {other.name}", "memory of its own")


def resolve_stream(stream: Any, x: Operand) -> Stream:
    """None: the device's own stream. "current": that of x's framework. Else a stream or a handle."""
    if stream is None:
        return x.span.device.stream
    if isinstance(stream, str):
        if stream != "current":
            raise ArgumentError("stream", repr(stream), 'None, "current" or a stream')
        if x.producer is None:
            raise ArgumentError("stream", '"current"', f"explicit: {x.name} does not say its stream")
        return x.producer
    return Stream.wrap(x.span.device, stream)


def new_outputs(
    device: Device, stream: Stream, shapes: Sequence[tuple[str, tuple[int, ...], DType]], given: Any
) -> list[Operand]:
    """The arrays of `outputs=`, checked, or new ones allocated in the order of `stream`."""
    if given is None:
        if stream.capture_id() is not None:
            raise CaptureError("outputs=None allocates, which a capture forbids; pass outputs")
        made = [(name, device.empty(shape, dtype, stream=stream)) for name, shape, dtype in shapes]
        return [Operand(f"outputs.{name}", a, a.shape, a.shape[-1] if a.shape else 1, None, False) for name, a in made]
    names = ", ".join(name for name, _, _ in shapes)
    if not isinstance(given, (list, tuple)) or len(given) != len(shapes):
        raise ArgumentError("outputs", f"a {type(given).__name__}", f"a tuple of {len(shapes)}: ({names})")
    found = []
    for value, (name, shape, dtype) in zip(given, shapes, strict=True):
        operand = whole(f"outputs.{name}", value, device.driver, [dtype.name], writable=True)
        require_shape(operand, shape, "that of the result")
        found.append(operand)
    return found


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for: the file and kernel name, its definitions, whether it converts FP8, and the folder
    of the `.cu` files."""

    name: str
    defines: tuple[tuple[str, str | int], ...]
    fp8: bool = True
    sources: Path = field(default_factory=sources)


def load(device: Device, spec: Specialisation) -> Kernel:
    """The kernel on `device`; compiled once a driver. Raises Unsupported for FP8 on a device that is too old for it."""
    if spec.fp8 and device.capability < _FP8_CAPABILITY:
        raise Unsupported(f"{spec.name} needs compute capability 8.9 for FP8; {device!r} has {device.capability}")
    cache: dict[Any, Kernel] = device.driver.__dict__.setdefault("_fp8_kernels", {})
    kernel = cache.get((spec, device.arch))
    if kernel is None:
        image = compile_source(
            f'#include "{spec.name}.cu"\n',
            name=f"{spec.name}_kernel.cu",  # not the included file's own name
            arch=device.arch,
            defines=dict(spec.defines),
            options=("--fmad=false",),
            include=(str(spec.sources),),
        )
        kernel = cache[spec, device.arch] = Module(image, device.driver)[spec.name]
    kernel.load(device)
    return kernel


def timeout_ns() -> int:
    return int(config.get("spin_timeout") * 1e9)


def launch(
    kernel: Kernel,
    device: Device,
    stream: Stream,
    grid: int,
    threads: int,
    smem: int,
    parameters: ctypes.Structure,
    pdl: PDLLevel,
    read: Sequence[Operand],
    written: Sequence[Operand],
    workspace: Workspace | Array | None,
    cooperative: bool = True,
    section: Section | None = None,
) -> None:
    """Queue the kernel on `stream` after the producers of its arrays, and tell the arrays.

    `section` of a trace is the kernel's last argument.
    """
    prepared = kernel.prepare(
        grid,
        threads,
        parameters,
        *([] if section is None else [section.parameters]),
        device=device,
        smem=smem,
        cooperative=cooperative and grid > 1,
        pdl=pdl is not PDLLevel.OFF,
    )
    capture = stream.capture_id()
    for producer in {(p.handle, p.closed): p for o in (*read, *written) if (p := o.producer) is not None}.values():
        if same(producer, stream):
            continue
        theirs = None if producer.closed else producer.capture_id()
        if producer.closed:
            event = producer.last_event() if capture is None else None
            if event is not None:
                stream.wait(event)
        elif theirs == capture:
            stream.follow(producer)
        elif theirs is not None:
            raise CaptureError(f"{producer!r}, on which an array of the call is produced, is in another capture")
    prepared(stream)
    arrays = [operand.span for operand in (*read, *written)]
    if workspace is not None:
        arrays.append(workspace.array if isinstance(workspace, Workspace) else workspace)
    if section is not None:
        arrays.append(section.array)
    event = stream.mark() if stream.foreign and capture is None else None
    mark_used(arrays, stream, event)
    graph = capturing(stream) if capture is not None else None
    if graph is not None:
        graph.keep(*arrays, section)
        if isinstance(workspace, Workspace):
            graph.before_launch(workspace.admit)
    for operand in (*read, *written):  # a foreign library may reuse its memory in the order of its own stream
        owner = operand.producer
        if owner is None or not operand.foreign or owner.closed or same(owner, stream):
            continue
        if capture is None or owner.capture_id() == capture:
            owner.follow(stream)


def fp8_dtype(argument: str, value: Any) -> DType:
    """An FP8 dtype by name, COAT's "E4M3" or "E5M2", a numpy dtype, or a framework's dtype."""
    short = {"e4m3": FP8[0], "e5m2": FP8[1]}
    name = value.lower() if isinstance(value, str) else str(value).rpartition(".")[2]
    name = short.get(name, name)
    if name not in FP8:
        raise ArgumentError(argument, repr(value), '"E4M3", "E5M2" or one of ' + ", ".join(FP8))
    return dtypes.get(name)
