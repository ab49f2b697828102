# SPDX-License-Identifier: Apache-2.0
"""The launch functions that are older than cuLaunchKernel, and cooperative launches on several devices. For the older
functions, separate calls set the block, the shared memory and the parameters of the kernel before the launch.
"""

from __future__ import annotations

import struct
from typing import Any

from ..bindings import R
from ..machine.objects import Function, LegacyLaunch, Stream
from ..machine.process.process import Process
from ..machine.run.work import Command, Launch
from ..space import mapped
from ..wire.parameters import pack
from ..wire.structs import CUDA_LAUNCH_PARAMS, Structure
from .entry import check, entry, present
from .launch import Attributes, layout_of, make
from .module import function_of, resolve

_MOST_PARAMETERS = 4096
_NO_PRE_SYNC, _NO_POST_SYNC = 1, 2
_LAYOUT = Structure("CUDA_LAUNCH_PARAMS")


def _kept(proc: Process, value: Any) -> LegacyLaunch:
    function = function_of(proc, value)
    if function.legacy is None:
        function.legacy = LegacyLaunch()
    return function.legacy


@entry()
def cuFuncSetBlockShape(proc: Process, hfunc: Any, x: int, y: int, z: int) -> None:
    kept = _kept(proc, hfunc)
    check(min(x, y, z) > 0 and x * y * z <= 1024 and z <= 64)
    kept.block = (x, y, z)


@entry()
def cuFuncSetSharedSize(proc: Process, hfunc: Any, numbytes: int) -> None:
    """Sets the dynamic shared memory of the next launch. The launch checks it."""
    _kept(proc, hfunc).smem = numbytes


@entry()
def cuParamSetSize(proc: Process, hfunc: Any, numbytes: int) -> None:
    kept = _kept(proc, hfunc)
    check(numbytes <= _MOST_PARAMETERS)
    kept.size = numbytes


def _put(proc: Process, hfunc: Any, offset: int, content: bytes) -> None:
    kept = _kept(proc, hfunc)
    check(0 <= offset <= _MOST_PARAMETERS - len(content))
    kept.parameters[offset : offset + len(content)] = content


@entry()
def cuParamSeti(proc: Process, hfunc: Any, offset: int, value: int) -> None:
    _put(proc, hfunc, offset, struct.pack("<I", value))


@entry()
def cuParamSetf(proc: Process, hfunc: Any, offset: int, value: float) -> None:
    _put(proc, hfunc, offset, struct.pack("<f", value))


@entry()
def cuParamSetv(proc: Process, hfunc: Any, offset: int, ptr: Any, numbytes: int) -> None:
    check(numbytes <= _MOST_PARAMETERS)
    _put(proc, hfunc, offset, present(mapped.copied(ptr, numbytes)))


def _launch(proc: Process, f: Any, width: int, height: int, stream: Stream) -> None:
    """Launch a kernel with the settings that were made for it. Raises Failure unless the shape of a block was set, and
    cuParamSetSize was given the size of the kernel's parameters.
    """
    function = function_of(proc, f)
    kept = present(function.legacy)
    module = present(function.module)
    check(module.context is stream.context, R.CUDA_ERROR_INVALID_HANDLE)
    check(kept.size == function.code.param_bytes)
    parameters = bytes(kept.parameters[: kept.size])
    grid, block = (width, height, 1), present(kept.block)
    proc.enqueue(stream, make(proc, function, grid, block, kept.smem, parameters, Attributes()))


@entry()
def cuLaunch(proc: Process, f: Any) -> None:
    """Launches one block on the legacy stream."""
    _launch(proc, f, 1, 1, proc.current().legacy)


@entry()
def cuLaunchGrid(proc: Process, f: Any, grid_width: int, grid_height: int) -> None:
    _launch(proc, f, grid_width, grid_height, proc.current().legacy)


@entry()
def cuLaunchGridAsync(proc: Process, f: Any, grid_width: int, grid_height: int, hStream: Any) -> None:
    _launch(proc, f, grid_width, grid_height, proc.stream(hStream))


# Cooperative launches on several devices -----------------------------------------------------------------------------


@entry()
def cuLaunchCooperativeKernelMultiDevice(proc: Process, launchParamsList: Any, numDevices: int, flags: int) -> None:
    """Launches the same kernel, by name, with the same shape on streams of different devices. Each grid is resident as
    a whole. Unless the flags say otherwise, all grids start when the earlier work of all streams has ended, and later
    work of each stream waits for all grids. There is no barrier across devices. Not allowed in a capture.
    """
    check(0 < numDevices <= len(proc.machine.devices) and 0 <= flags <= _NO_PRE_SYNC | _NO_POST_SYNC)
    made = [_one_of_several(proc, params) for params in launchParamsList[:numDevices]]
    streams, launches = [stream for stream, _ in made], [launch for _, launch in made]
    check(len({stream.context.device.index for stream in streams}) == numDevices)
    check(len({(launch.function.name, launch.grid, launch.block, launch.smem) for launch in launches}) == 1)
    if not flags & _NO_PRE_SYNC:
        _join(proc, streams)
    for stream, launch in made:
        proc.enqueue(stream, launch)
    if not flags & _NO_POST_SYNC:
        _join(proc, streams)


def _one_of_several(proc: Process, params: Any) -> tuple[Stream, Launch]:
    p = CUDA_LAUNCH_PARAMS.from_buffer_copy(_LAYOUT.bytes_of(params))
    stream = proc.stream(p.hStream or 0)
    check(not stream.is_legacy)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    function = resolve(proc, proc.get(p.function or 0, Function), stream.context)
    check(present(function.module).context is stream.context, R.CUDA_ERROR_INVALID_HANDLE)
    grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
    parameters = present(pack(layout_of(function), p.kernelParams or 0, 0))
    return stream, make(proc, function, grid, block, p.sharedMemBytes, parameters, Attributes(cooperative=True))


def _join(proc: Process, streams: list[Stream]) -> None:
    """Make later work of each stream wait for the work queued so far in all of them."""
    marks = [proc.machine.progress.enqueue(stream, Command(stream.context)) for stream in streams]
    for stream in streams:
        stream.tail, stream.last = list(marks), None
