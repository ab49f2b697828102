# SPDX-License-Identifier: Apache-2.0
"""Copies and fills. The kind of a copy (cudaMemcpyKind) says whether its source and destination are device memory."""

from __future__ import annotations

from typing import Any

from ..bindings import T
from ..wire.arguments import host_address, integer
from .state import State, function, only
from .structs import INVALID_PITCH, given, set_side, sides
from .types import RT

_M = T.CUmemorytype
_LETTER = {_M.CU_MEMORYTYPE_HOST: "H", _M.CU_MEMORYTYPE_DEVICE: "D"}


def _copy(state: State, dst: Any, src: Any, count: Any, kind: Any, stream: tuple[Any, ...] = ()) -> None:
    """Call the driver function for a kind of copy. From host to host, and for cudaMemcpyDefault, it is cuMemcpy or
    cuMemcpyAsync, which accept any memory.
    """
    both = sides(kind)
    target, source = host_address(dst), host_address(src)
    name = "{}to{}".format(*(_LETTER.get(memory, "") for memory in both))
    name = name if name in ("HtoD", "DtoH", "DtoD") else ""
    getattr(state.cu, f"cuMemcpy{name}{'Async' if stream else ''}")(target, source, count, *stream)


@function()
def cudaMemcpy(state: State, dst: Any, src: Any, count: Any, kind: Any) -> None:
    _copy(state, dst, src, count, kind)


@function()
def cudaMemcpyAsync(state: State, dst: Any, src: Any, count: Any, kind: Any, stream: Any) -> None:
    _copy(state, dst, src, count, kind, (stream,))


def _copy_2d(dst: Any, dpitch: Any, src: Any, spitch: Any, width: Any, height: Any, kind: Any) -> Any:
    only(width <= dpitch and width <= spitch, INVALID_PITCH)
    copy, (source, destination) = T.CUDA_MEMCPY2D(), sides(kind)
    set_side(copy, "src", source, host_address(src), spitch)
    set_side(copy, "dst", destination, host_address(dst), dpitch)
    copy.WidthInBytes, copy.Height = width, height
    return copy


@function()
def cudaMemcpy2D(
    state: State, dst: Any, dpitch: Any, src: Any, spitch: Any, width: Any, height: Any, kind: Any
) -> None:
    state.cu.cuMemcpy2D(_copy_2d(dst, dpitch, src, spitch, width, height, kind))


@function()
def cudaMemcpy2DAsync(
    state: State, dst: Any, dpitch: Any, src: Any, spitch: Any, width: Any, height: Any, kind: Any, stream: Any
) -> None:
    state.cu.cuMemcpy2DAsync(_copy_2d(dst, dpitch, src, spitch, width, height, kind), stream)


@function()
def cudaMemcpyPeer(state: State, dst: Any, dstDevice: Any, src: Any, srcDevice: Any, count: Any) -> None:
    ends = dst, state.primary(integer(dstDevice)), src, state.primary(integer(srcDevice))
    state.cu.cuMemcpyPeer(*ends, count)


@function()
def cudaMemcpyPeerAsync(
    state: State, dst: Any, dstDevice: Any, src: Any, srcDevice: Any, count: Any, stream: Any
) -> None:
    ends = dst, state.primary(integer(dstDevice)), src, state.primary(integer(srcDevice))
    state.cu.cuMemcpyPeerAsync(*ends, count, stream)


# Fills ---------------------------------------------------------------------------------


@function()
def cudaMemset(state: State, devPtr: Any, value: Any, count: Any) -> None:
    state.cu.cuMemsetD8(host_address(devPtr), integer(value) & 0xFF, count)


@function()
def cudaMemsetAsync(state: State, devPtr: Any, value: Any, count: Any, stream: Any) -> None:
    state.cu.cuMemsetD8Async(host_address(devPtr), integer(value) & 0xFF, count, stream)


@function()
def cudaMemset2D(state: State, devPtr: Any, pitch: Any, value: Any, width: Any, height: Any) -> None:
    state.cu.cuMemsetD2D8(host_address(devPtr), pitch, integer(value) & 0xFF, width, height)


@function()
def cudaMemset2DAsync(state: State, devPtr: Any, pitch: Any, value: Any, width: Any, height: Any, stream: Any) -> None:
    state.cu.cuMemsetD2D8Async(host_address(devPtr), pitch, integer(value) & 0xFF, width, height, stream)


@function()
def cudaMemset3D(state: State, pitchedDevPtr: Any, value: Any, extent: Any) -> None:
    for plane in _planes(pitchedDevPtr, value, extent):
        state.cu.cuMemsetD2D8(*plane)


@function()
def cudaMemset3DAsync(state: State, pitchedDevPtr: Any, value: Any, extent: Any, stream: Any) -> None:
    for plane in _planes(pitchedDevPtr, value, extent):
        state.cu.cuMemsetD2D8Async(*plane, stream)


def _planes(where: Any, value: Any, extent: Any) -> list[tuple[Any, ...]]:
    """The arguments of a fill for each plane of a volume."""
    given("pitchedDevPtr", where, RT.cudaPitchedPtr)
    given("extent", extent, RT.cudaExtent)
    step = where.pitch * where.ysize
    rest = where.pitch, integer(value) & 0xFF, extent.width, extent.height
    return [(int(where.ptr) + z * step, *rest) for z in range(extent.depth)] if extent.width and extent.height else []
