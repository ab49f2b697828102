# SPDX-License-Identifier: Apache-2.0
"""Structures with different layouts in the runtime and the driver: descriptions of copies, and structures that contain
them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..bindings import T
from .state import Failed, State, only
from .types import RT

_K = RT.cudaMemcpyKind
_M = T.CUmemorytype
NOT_SUPPORTED = int(RT.cudaError_t.cudaErrorNotSupported)
INVALID_DIRECTION = int(RT.cudaError_t.cudaErrorInvalidMemcpyDirection)
INVALID_PITCH = int(RT.cudaError_t.cudaErrorInvalidPitchValue)

_SIDES = {
    int(_K.cudaMemcpyHostToHost): (_M.CU_MEMORYTYPE_HOST, _M.CU_MEMORYTYPE_HOST),
    int(_K.cudaMemcpyHostToDevice): (_M.CU_MEMORYTYPE_HOST, _M.CU_MEMORYTYPE_DEVICE),
    int(_K.cudaMemcpyDeviceToHost): (_M.CU_MEMORYTYPE_DEVICE, _M.CU_MEMORYTYPE_HOST),
    int(_K.cudaMemcpyDeviceToDevice): (_M.CU_MEMORYTYPE_DEVICE, _M.CU_MEMORYTYPE_DEVICE),
    int(_K.cudaMemcpyDefault): (_M.CU_MEMORYTYPE_UNIFIED, _M.CU_MEMORYTYPE_UNIFIED),
}


def given(name: str, value: Any, kind: type) -> Any:
    """Return `value`, an argument that must be a structure of the class `kind`. Raises TypeError if it is not, as the
    bindings do.
    """
    if not isinstance(value, kind):
        wanted, found = f"{kind.__module__}.{kind.__name__}", type(value).__name__
        raise TypeError(f"Argument {name!r} has incorrect type (expected {wanted}, got {found})")
    return value


def sides(kind: Any) -> tuple[Any, Any]:
    """The memory types of source and destination for a kind of copy."""
    only(int(kind) in _SIDES, INVALID_DIRECTION)
    return _SIDES[int(kind)]


def kind_of(source: Any, destination: Any) -> Any:
    """The kind of a copy between two memory types."""
    return next((_K(kind) for kind, both in _SIDES.items() if both == (source, destination)), _K.cudaMemcpyDefault)


def set_side(copy: Any, side: str, memory: Any, address: int, pitch: int) -> None:
    """Set the source ("src") or the destination ("dst") of a CUDA_MEMCPY2D, _3D or _3D_PEER."""
    setattr(copy, f"{side}MemoryType", memory)
    setattr(copy, f"{side}{'Host' if memory == _M.CU_MEMORYTYPE_HOST else 'Device'}", address)
    setattr(copy, f"{side}Pitch", pitch)


def _volume(copy: Any, p: Any, memories: tuple[Any, Any]) -> Any:
    """Fill in the fields of `copy` that CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER have in common, from `p`, the parameters
    of the runtime's function. `memories` are the memory types of the source and the destination.
    """
    for side, memory in zip(("src", "dst"), memories, strict=True):
        if int(getattr(p, f"{side}Array") or 0):
            raise Failed(NOT_SUPPORTED)  # arrays are not emulated
        there, at = getattr(p, f"{side}Ptr"), getattr(p, f"{side}Pos")
        only(p.extent.width <= there.pitch or p.extent.height * p.extent.depth <= 1, INVALID_PITCH)
        set_side(copy, side, memory, int(there.ptr or 0), there.pitch)
        setattr(copy, f"{side}Height", there.ysize)
        for name, value in (("XInBytes", at.x), ("Y", at.y), ("Z", at.z)):
            setattr(copy, f"{side}{name}", value)
    copy.WidthInBytes, copy.Height, copy.Depth = p.extent.width, p.extent.height, p.extent.depth
    return copy


def _copy_3d(state: State, p: Any) -> Any:
    return _volume(T.CUDA_MEMCPY3D(), p, sides(p.kind))


def _copy_3d_peer(state: State, p: Any) -> Any:
    copy = _volume(T.CUDA_MEMCPY3D_PEER(), p, (_M.CU_MEMORYTYPE_DEVICE, _M.CU_MEMORYTYPE_DEVICE))
    copy.srcContext, copy.dstContext = (T.CUcontext(state.primary(d)) for d in (p.srcDevice, p.dstDevice))
    return copy


def _volume_of(copy: Any) -> Any:
    """The cudaMemcpy3DParms with the contents of a CUDA_MEMCPY3D."""
    p = RT.cudaMemcpy3DParms()
    for side in ("src", "dst"):
        memory = getattr(copy, f"{side}MemoryType")
        there, at = RT.cudaPitchedPtr(), RT.cudaPos()
        there.ptr = int(getattr(copy, f"{side}{'Host' if memory == _M.CU_MEMORYTYPE_HOST else 'Device'}") or 0)
        there.pitch, there.ysize = getattr(copy, f"{side}Pitch"), getattr(copy, f"{side}Height")
        there.xsize = copy.WidthInBytes
        at.x, at.y, at.z = (getattr(copy, f"{side}{name}") for name in ("XInBytes", "Y", "Z"))
        setattr(p, f"{side}Ptr", there)
        setattr(p, f"{side}Pos", at)
    extent = RT.cudaExtent()
    extent.width, extent.height, extent.depth = copy.WidthInBytes, copy.Height, copy.Depth
    p.extent, p.kind = extent, kind_of(copy.srcMemoryType, copy.dstMemoryType)
    return p


def _node(state: State, p: Any) -> Any:
    """The CUgraphNodeParams for a cudaGraphNodeParams. Their layouts are the same, except for memcpy nodes."""
    node = T.CUgraphNodeParams()
    if p.type == RT.cudaGraphNodeType.cudaGraphNodeTypeMemcpy:
        node.type = T.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
        inner = node.memcpy
        inner.flags, inner.copyCtx = 0, T.CUcontext(state.context())
        inner.copyParams = _copy_3d(state, p.memcpy.copyParams)
        node.memcpy = inner
    else:
        ctypes.memmove(int(node.getPtr()), int(p.getPtr()), T.sizeof(T.CUgraphNodeParams))
    return node


TO_DRIVER: dict[str, Callable[[State, Any], Any]] = {
    "cudaMemcpy3DParms": _copy_3d,
    "cudaMemcpy3DPeerParms": _copy_3d_peer,
    "cudaGraphNodeParams": _node,
}
FROM_DRIVER: dict[str, Callable[[Any], Any]] = {"cudaMemcpy3DParms": _volume_of}
