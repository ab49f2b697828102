# SPDX-License-Identifier: Apache-2.0
"""Kernels of the ops on one device: how they are compiled, and the launch behind the producers of their arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...comm.ordering import same
from ...compiler.nvrtc import Image, compile_source
from ...errors import CaptureError, Unsupported
from ...runtime.array import mark_used
from ...runtime.device import Device
from ...runtime.graph import capturing
from ...runtime.kernel import Kernel, Module
from ...runtime.stream import Stream
from ..collectives.kernels import CU
from . import faults
from .operands import Operand
from .options import PDLLevel
from .scratch import Workspace

if TYPE_CHECKING:
    from ...trace.buffer import Section

_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for: the room and name of its file (the kernel has the same name), its definitions,
    whether it converts FP8, and the fault that is planted in it (`faults`)."""

    room: str
    name: str
    defines: tuple[tuple[str, str | int], ...]
    fp8: bool = True
    fault: str = field(default_factory=faults.planted)


def build(spec: Specialisation, arch: str, options: Sequence[str] = ()) -> Image:
    """The kernel compiled for an architecture, with further options of the compiler."""
    return compile_source(
        f'#include "{spec.room}/{spec.name}.cu"\n',
        name=f"{spec.name}_kernel.cu",  # not the included file's own name
        arch=arch,
        defines=dict(spec.defines) | faults.defines(spec.fault),
        options=("--fmad=false", *options),
        include=(str(CU),),
    )


def load(device: Device, spec: Specialisation) -> Kernel:
    """The kernel on `device`; compiled once a driver. Raises Unsupported for FP8 on a device that is too old for it."""
    if spec.fp8 and device.capability < _FP8_CAPABILITY:
        raise Unsupported(f"{spec.name} needs compute capability 8.9 for FP8; {device!r} has {device.capability}")
    cache: dict[Any, Kernel] = device.driver.__dict__.setdefault("_op_kernels", {})
    kernel = cache.get((spec, device.arch))
    if kernel is None:
        module = Module(build(spec, device.arch), device.driver)
        kernel = cache[spec, device.arch] = module[spec.name]
    kernel.load(device)
    return kernel


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
    workspace: Workspace | None,
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
        arrays.append(workspace.array)
    if section is not None:
        arrays.append(section.array)
    event = stream.mark() if stream.foreign and capture is None else None
    mark_used(arrays, stream, event)
    graph = capturing(stream) if capture is not None else None
    if graph is not None:
        graph.keep(*arrays, section)
        if workspace is not None:
            graph.before_launch(workspace.admit)
    for operand in (*read, *written):  # a foreign library may reuse its memory in the order of its own stream
        owner = operand.producer
        if owner is None or not operand.foreign or owner.closed or same(owner, stream):
            continue
        if capture is None or owner.capture_id() == capture:
            owner.follow(stream)
