# SPDX-License-Identifier: Apache-2.0
"""From a specialisation to launches: kernels loaded once a driver, parameter blocks filled, one launch a rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import config
from ...compiler.nvrtc import compile_source
from ...errors import CaptureError, Unsupported
from ...runtime import interop
from ...runtime.kernel import Kernel, Launch, Module
from ..call.options import PDLLevel
from ..call.validate import RankArray
from . import kernels

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...runtime.stream import Stream
    from ...trace.buffer import Section


def load_kernel(group: Group, spec: kernels.CollectiveKernel) -> list[Kernel]:
    """The kernel of each local rank, compiled and loaded on its device. Cached on the driver.

    Raises Unsupported for a device that lacks the kernel's instructions, CompileError if NVRTC refuses the source.
    """
    driver = group.driver
    cache: dict[Any, dict[str, Kernel]] = driver.__dict__.setdefault("_collective_kernels", {})  # dies with the driver
    by_arch = cache.setdefault(spec, {})
    found = []
    for rank in group:
        device = rank.device
        if device.capability[0] * 10 + device.capability[1] < spec.min_arch:
            raise Unsupported(
                f"{spec.name} with {spec.out_dtype} output needs compute capability {spec.min_arch / 10:.1f}; "
                f"{device!r} has {device.capability[0]}.{device.capability[1]}"
            )
        kernel = by_arch.get(device.arch)
        if kernel is None:
            request = kernels.request(spec)
            image = compile_source(
                request.source,
                name=request.name,
                arch=device.arch,
                defines=request.defines,
                names=request.names,
                options=request.options,
                include=request.include,
            )
            kernel = by_arch[device.arch] = Module(image, driver)[spec.name]
        kernel.load(device)
        found.append(kernel)
    return found


def call_block(group: Group, position: int, sources: Sequence[int], own: int, pdl: PDLLevel) -> kernels.Call:
    """The part of a rank's parameters that all collectives share; `own` is its input, `sources` what it sums."""
    workspace = group.workspace
    call = kernels.Call(
        input=own,
        report=workspace.report_pointers[position],
        timeout_ns=int(config.get("spin_timeout") * 1e9),
        rank=group.ranks[position].index,
        early_trigger=int(pdl is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    call.sources[: len(sources)] = list(sources)
    call.workspaces[: group.size] = list(workspace.pointers)
    return call


def launches(
    group: Group,
    spec: kernels.CollectiveKernel,
    shape: kernels.LaunchShape,
    parameters: Sequence[Sequence[ctypes.Structure]],
    pdl: PDLLevel,
    sections: Sequence[Section] = (),
) -> list[Launch]:
    """One launch a local rank; `parameters[i]` are rank i's kernel arguments, and `sections[i]` its part of a trace."""
    traced = [[section.parameters] for section in sections] or [[] for _ in group]
    return [
        kernel.prepare(
            (shape.blocks, 1, 1),
            (shape.threads, 1, 1),
            *arguments,
            *trace,
            device=rank.device,
            pdl=pdl is not PDLLevel.OFF,
        )
        for kernel, arguments, trace, rank in zip(load_kernel(group, spec), parameters, traced, group, strict=True)
    ]


def readable_by_peers(group: Group, inputs: Sequence[RankArray]) -> bool:
    """Whether the kernels of every rank can read every rank's input where it lies."""
    if not group.peers_readable:
        return False
    return all(
        operand.array.pooled  # the group has opened the pools to all its devices
        or interop.readable_by(operand.array.ptr, operand.array.nbytes, rank.device)
        for operand in inputs
        for rank in group
        if rank.device is not operand.array.device
    )


def require_peers(group: Group, algo: str) -> None:
    """Raise Unsupported if `algo` needs peer access that the devices lack."""
    if algo != "naive" and not group.peers_readable:
        raise Unsupported(
            f'algo="{algo}" needs peer access between all devices, and these pairs (from, to) lack it: '
            f'{list(group.transport.missing)}; use algo="naive" or "auto"'
        )


class Direct:
    """One kernel a rank; the kernels meet on the device, in any order of launch."""

    def __init__(self, launches: Sequence[Launch], barriers: int) -> None:
        self.launches = [[launch] for launch in launches]
        self.barriers = barriers

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        """Any streams will do, and one rank at a time; together all ranks run now, or all at the replay of graphs."""
        inside = [position for position, capture in enumerate(captures) if capture is not None]
        if 0 < len(inside) < len(captures):
            outside = [position for position, capture in enumerate(captures) if capture is None]
            raise CaptureError(
                f"the streams of local ranks {inside} are being captured and those of local ranks {outside} are not: "
                "these would wait for kernels that only a replay starts. Capture the streams of all ranks, or launch "
                "each rank with launch(rank=i)"
            )

    def launch_all(self, streams: Sequence[Stream]) -> None:
        for (launch,), stream in zip(self.launches, streams, strict=True):
            launch(stream)

    def launch_one(self, position: int, stream: Stream) -> None:
        self.launches[position][0](stream)
