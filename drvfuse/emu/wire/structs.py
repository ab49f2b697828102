# SPDX-License-Identifier: Apache-2.0
"""The structures that driver calls read and write, as <cuda.h> lays them out.

They are sent as their bytes. If the call reads the memory to which a pointer of a structure points (CUlaunchConfig, 2D
and 3D copies, parameters of graph nodes), that memory follows in the message. The emulated driver does not use the
other pointers in these structures.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..bindings import T
from ..space import mapped
from .arguments import Invalid

_u8, _u16, _u32, _u64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
_size, _pointer, _int = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


CUmemLocation = _struct("CUmemLocation", ("type", _int), ("id", _int))
_AllocFlags = _struct(
    "AllocFlags", ("compressionType", _u8), ("gpuDirectRDMACapable", _u8), ("usage", _u16), ("reserved", _u8 * 4)
)
CUmemAllocationProp = _struct(
    "CUmemAllocationProp",
    *(("type", _int), ("requestedHandleTypes", _int), ("location", CUmemLocation)),
    *(("win32HandleMetaData", _pointer), ("allocFlags", _AllocFlags)),
)
CUmemAccessDesc = _struct("CUmemAccessDesc", ("location", CUmemLocation), ("flags", _int))
CUmemPoolProps = _struct(
    "CUmemPoolProps",
    *(("allocType", _int), ("handleTypes", _int), ("location", CUmemLocation), ("win32SecurityAttributes", _pointer)),
    *(("maxSize", _size), ("usage", _u16), ("reserved", _u8 * 54)),
)
CUmulticastObjectProp = _struct(
    "CUmulticastObjectProp", ("numDevices", _u32), ("size", _size), ("handleTypes", _u64), ("flags", _u64)
)
CUDA_GRAPH_INSTANTIATE_PARAMS = _struct(
    "CUDA_GRAPH_INSTANTIATE_PARAMS",
    *(("flags", _u64), ("hUploadStream", _pointer), ("hErrNode_out", _pointer), ("result_out", _int)),
)
CUgraphEdgeData = _struct("CUgraphEdgeData", ("from_port", _u8), ("to_port", _u8), ("type", _u8), ("reserved", _u8 * 5))
CUuuid = _struct("CUuuid", ("bytes", _u8 * 16))
CUdevprop = _struct(
    "CUdevprop",
    *(("maxThreadsPerBlock", _int), ("maxThreadsDim", _int * 3), ("maxGridSize", _int * 3)),
    *((name, _int) for name in ("sharedMemPerBlock", "totalConstantMemory", "SIMDWidth", "memPitch")),
    *((name, _int) for name in ("regsPerBlock", "clockRate", "textureAlign")),
)
CUexecAffinityParam = _struct("CUexecAffinityParam", ("type", _int), ("param", _u32))
CUctxCreateParams = _struct(
    "CUctxCreateParams", ("execAffinityParams", _pointer), ("numExecAffinityParams", _int), ("cigParams", _pointer)
)
CUlaunchAttribute = _struct("CUlaunchAttribute", ("id", _int), ("pad", _u8 * 4), ("value", _u8 * 64))
CUlaunchConfig = _struct(
    "CUlaunchConfig",
    *((name, _u32) for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")),
    *(("sharedMemBytes", _u32), ("hStream", _pointer), ("attrs", _pointer), ("numAttrs", _u32)),
)
_MEMORY: tuple[tuple[str, Any], ...] = (
    *(("MemoryType", _int), ("Host", _pointer), ("Device", _u64), ("Array", _pointer)),
)
_END_2D: tuple[tuple[str, Any], ...] = (("XInBytes", _size), ("Y", _size), *_MEMORY, ("Pitch", _size))
_END_3D: tuple[tuple[str, Any], ...] = (
    *(("XInBytes", _size), ("Y", _size), ("Z", _size), ("LOD", _size), *_MEMORY),
    # A CUDA_MEMCPY3D has a reserved field in place of Context.
    *(("Context", _pointer), ("Pitch", _size), ("Height", _size)),
)
_EXTENT = (("WidthInBytes", _size), ("Height", _size), ("Depth", _size))


def _copy(name: str, end: tuple[tuple[str, Any], ...], *extent: tuple[str, Any]) -> type[ctypes.Structure]:
    return _struct(name, *((side + field, kind) for side in ("src", "dst") for field, kind in end), *extent)


CUDA_MEMCPY2D = _copy("CUDA_MEMCPY2D", _END_2D, *_EXTENT[:2])
CUDA_MEMCPY3D = _copy("CUDA_MEMCPY3D", _END_3D, *_EXTENT)
CUDA_MEMCPY3D_PEER = _copy("CUDA_MEMCPY3D_PEER", _END_3D, *_EXTENT)
_Pointer = _struct("Pointer", ("ptr", _u64), ("rowLength", _size), ("layerHeight", _size), ("locHint", CUmemLocation))
# CUmemcpy3DOperand has a union of a pointer and an array. Both have the same size, and only the pointer is declared.
_Operand = _struct("Operand", ("type", _int), ("op", _struct("Op", ("ptr", _Pointer))))
_Extent = _struct("Extent", ("width", _size), ("height", _size), ("depth", _size))
CUDA_MEMCPY3D_BATCH_OP = _struct(
    "CUDA_MEMCPY3D_BATCH_OP",
    *(("src", _Operand), ("dst", _Operand), ("extent", _Extent), ("srcAccessOrder", _int), ("flags", _u32)),
)
CUmemcpyAttributes = _struct(
    "CUmemcpyAttributes",
    *(("srcAccessOrder", _int), ("srcLocHint", CUmemLocation), ("dstLocHint", CUmemLocation), ("flags", _u32)),
)
CUmemDecompressParams = _struct(
    "CUmemDecompressParams",
    *(("srcNumBytes", _size), ("dstNumBytes", _size), ("dstActBytes", _pointer), ("src", _pointer), ("dst", _pointer)),
    *(("algo", _int), ("padding", _u8 * 20)),
)
CUstreamBatchMemOpParams = _struct("CUstreamBatchMemOpParams", ("words", _u64 * 6))
_GRID = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
CUDA_KERNEL_NODE_PARAMS = _struct(
    "CUDA_KERNEL_NODE_PARAMS",
    *(("func", _pointer), *((name, _u32) for name in _GRID), ("kernelParams", _pointer), ("extra", _pointer)),
    *(("kern", _pointer), ("ctx", _pointer)),
)
_FILL = (
    *(("dst", _u64), ("pitch", _size), ("value", _u32), ("elementSize", _u32), ("width", _size), ("height", _size)),
)
CUDA_MEMSET_NODE_PARAMS = _struct("CUDA_MEMSET_NODE_PARAMS", *_FILL)
CUDA_HOST_NODE_PARAMS = _struct("CUDA_HOST_NODE_PARAMS", ("fn", _pointer), ("userData", _pointer))
CUDA_MEM_ALLOC_NODE_PARAMS = _struct(
    "CUDA_MEM_ALLOC_NODE_PARAMS",
    *(("poolProps", CUmemPoolProps), ("accessDescs", _pointer), ("accessDescCount", _size), ("bytesize", _size)),
    ("dptr", _u64),
)
CUDA_BATCH_MEM_OP_NODE_PARAMS = _struct(
    "CUDA_BATCH_MEM_OP_NODE_PARAMS", ("ctx", _pointer), ("count", _u32), ("paramArray", _pointer), ("flags", _u32)
)
_MemcpyNode = _struct(
    "MemcpyNode", ("flags", _int), ("pad", _int), ("copyCtx", _pointer), ("copyParams", CUDA_MEMCPY3D)
)


class _NodeParams(ctypes.Union):
    """The union in CUgraphNodeParams: its members that have pointers, and `room`, which has the size of the union."""

    _fields_ = (
        *(("kernel", CUDA_KERNEL_NODE_PARAMS), ("memcpy", _MemcpyNode), ("host", CUDA_HOST_NODE_PARAMS)),
        *(("alloc", CUDA_MEM_ALLOC_NODE_PARAMS), ("memOp", CUDA_BATCH_MEM_OP_NODE_PARAMS), ("room", _u64 * 29)),
    )


CUgraphNodeParams = _struct(
    "CUgraphNodeParams", ("type", _int), ("pad", _int * 3), ("of", _NodeParams), ("reserved2", ctypes.c_int64)
)
CUgraphExecUpdateResultInfo = _struct(
    "CUgraphExecUpdateResultInfo", ("result", _int), ("errorNode", _pointer), ("errorFromNode", _pointer)
)
CUkernelNodeAttrValue = _struct("CUkernelNodeAttrValue", ("words", _u64 * 8))
CUDA_LAUNCH_PARAMS = _struct(
    "CUDA_LAUNCH_PARAMS",
    *(("function", _pointer), *((name, _u32) for name in ("gridDimX", "gridDimY", "gridDimZ"))),
    *((name, _u32) for name in ("blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")),
    *(("hStream", _pointer), ("kernelParams", _pointer)),
)
_HANDLE = ("reserved", _u8 * 64)
CUipcMemHandle = _struct("CUipcMemHandle", _HANDLE)
CUipcEventHandle = _struct("CUipcEventHandle", _HANDLE)
CUmemPoolPtrExportData = _struct("CUmemPoolPtrExportData", _HANDLE)
CUstreamAttrValue = _struct("CUstreamAttrValue", ("value", _u8 * 64))
STRUCTS: dict[str, type[ctypes.Structure]] = {
    kind.__name__: kind
    for kind in (
        *(CUmemLocation, CUmemAllocationProp, CUmemAccessDesc, CUmemPoolProps, CUmulticastObjectProp),
        *(CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraphEdgeData, CUuuid, CUdevprop, CUexecAffinityParam, CUctxCreateParams),
        *(CUlaunchAttribute, CUlaunchConfig, CUDA_MEMCPY2D, CUstreamBatchMemOpParams, CUDA_MEMCPY3D),
        *(CUDA_MEMCPY3D_PEER, CUDA_MEMCPY3D_BATCH_OP, CUmemcpyAttributes, CUDA_KERNEL_NODE_PARAMS),
        *(CUDA_MEMSET_NODE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_BATCH_MEM_OP_NODE_PARAMS),
        *(CUgraphNodeParams, CUgraphExecUpdateResultInfo, CUkernelNodeAttrValue),
        *(CUipcMemHandle, CUipcEventHandle, CUmemPoolPtrExportData, CUstreamAttrValue, CUDA_LAUNCH_PARAMS),
        CUmemDecompressParams,
    )
}


class Structure:
    """Converts the structure `c` of cuda.bindings to bytes and back."""

    def __init__(self, c: str) -> None:
        self.c, self.place = c, STRUCTS[c]
        self.size = ctypes.sizeof(self.place)

    @functools.cached_property
    def kind(self) -> Any:
        return getattr(T, self.c)

    def checked(self, value: Any) -> Any:
        """The object itself. Raises Invalid if it was made from an address where there is no memory."""
        if not mapped.writable(int(value.getPtr()), self.size):
            raise Invalid
        return value

    def bytes_of(self, value: Any) -> bytes:
        return ctypes.string_at(int(value.getPtr()), self.size)

    def plain(self, value: Any) -> Any:
        """A copy as a ctypes structure, in which pointers are numbers."""
        return STRUCTS[self.c].from_buffer_copy(self.bytes_of(value))

    def made_of(self, content: bytes) -> Any:
        if len(content) != self.size:
            raise ValueError(f"{self.c} has {self.size} bytes, but the message has {len(content)}")
        value = self.kind()
        ctypes.memmove(int(value.getPtr()), content, self.size)
        return value


_ATTRIBUTES = CUlaunchConfig.attrs.offset
_ATTRIBUTE_SIZE = ctypes.sizeof(CUlaunchAttribute)


class LaunchConfig(Structure):
    """A launch configuration. Its attributes follow it in the message."""

    def __init__(self) -> None:
        super().__init__("CUlaunchConfig")
        self._attribute = Structure("CUlaunchAttribute")

    def bytes_of(self, value: Any) -> bytes:
        content = super().bytes_of(value)
        plain = CUlaunchConfig.from_buffer_copy(content)
        count = plain.numAttrs
        if count:
            count = min(count, len(value.attrs or []))
        attributes = ctypes.string_at(plain.attrs, count * _ATTRIBUTE_SIZE) if count else b""
        return content + attributes

    def made_of(self, content: bytes) -> Any:
        value = self.kind()
        plain = CUlaunchConfig.from_buffer_copy(content)
        ctypes.memmove(int(value.getPtr()), content, _ATTRIBUTES)
        rest, size = content[self.size :], _ATTRIBUTE_SIZE
        value.attrs = [self._attribute.made_of(rest[i : i + size]) for i in range(0, len(rest), size)]
        value.numAttrs = plain.numAttrs
        return value
