# SPDX-License-Identifier: Apache-2.0
"""The structures that driver calls read and write, as <cuda.h> lays them out.

They travel as their bytes. What a pointer in one of them points to travels behind it, where the call reads it
(CUlaunchConfig, CUDA_MEMCPY2D); other pointers are of no use to the emulated driver.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..bindings import T

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
_END: tuple[tuple[str, Any], ...] = (
    *(("XInBytes", _size), ("Y", _size), ("MemoryType", _int), ("Host", _pointer), ("Device", _u64)),
    *(("Array", _pointer), ("Pitch", _size)),
)
CUDA_MEMCPY2D = _struct(
    "CUDA_MEMCPY2D",
    *((end + name, kind) for end in ("src", "dst") for name, kind in _END),
    *(("WidthInBytes", _size), ("Height", _size)),
)
STRUCTS: dict[str, type[ctypes.Structure]] = {
    kind.__name__: kind
    for kind in (
        *(CUmemLocation, CUmemAllocationProp, CUmemAccessDesc, CUmemPoolProps, CUmulticastObjectProp),
        *(CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraphEdgeData, CUuuid, CUdevprop, CUexecAffinityParam, CUctxCreateParams),
        *(CUlaunchAttribute, CUlaunchConfig, CUDA_MEMCPY2D),
    )
}


class Structure:
    """A structure of cuda.bindings as bytes."""

    def __init__(self, c: str) -> None:
        self.c, self.place = c, STRUCTS[c]
        self.size = ctypes.sizeof(self.place)

    @functools.cached_property
    def kind(self) -> Any:
        return getattr(T, self.c)

    def bytes_of(self, value: Any) -> bytes:
        return ctypes.string_at(int(value.getPtr()), self.size)

    def made_of(self, content: bytes) -> Any:
        if len(content) != self.size:
            raise ValueError(f"{self.c} has {self.size} bytes, and {len(content)} came")
        value = self.kind()
        ctypes.memmove(int(value.getPtr()), content, self.size)
        return value


_ATTRIBUTES = CUlaunchConfig.attrs.offset
_ATTRIBUTE_SIZE = ctypes.sizeof(CUlaunchAttribute)


class LaunchConfig(Structure):
    """A launch configuration, with its attributes behind it."""

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
