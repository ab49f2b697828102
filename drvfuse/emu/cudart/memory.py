# SPDX-License-Identifier: Apache-2.0
"""Allocation. Unlike in the driver, it is no error to allocate 0 bytes or to free a null pointer."""

from __future__ import annotations

from typing import Any

from ..bindings import T
from ..wire.arguments import host_address
from .state import Failed, State, function
from .structs import given
from .types import RT

_P = T.CUpointer_attribute
_ELEMENT = 4
"""The element size, in bytes, for which a pitch is chosen. The runtime has no parameter for it."""


@function(1)
def cudaMalloc(state: State, size: Any) -> int:
    return int(state.cu.cuMemAlloc(size)) if size != 0 else 0


@function()
def cudaFree(state: State, devPtr: Any) -> None:
    """Frees memory. For a null pointer it frees nothing, but makes a context current, as other calls do."""
    address = host_address(devPtr)
    if address:
        state.cu.cuMemFree(address)


@function(1)
def cudaMallocHost(state: State, size: Any) -> int:
    return int(state.cu.cuMemHostAlloc(size, 0)) if size != 0 else 0


@function(1)
def cudaHostAlloc(state: State, size: Any, flags: Any) -> int:
    return int(state.cu.cuMemHostAlloc(size, flags)) if size != 0 else 0


@function()
def cudaFreeHost(state: State, ptr: Any) -> None:
    address = host_address(ptr)
    if address:
        state.cu.cuMemFreeHost(address)


@function(1)
def cudaMallocAsync(state: State, size: Any, hStream: Any) -> int:
    return int(state.cu.cuMemAllocAsync(size, hStream)) if size != 0 else 0


@function(1)
def cudaMallocManaged(state: State, size: Any, flags: Any) -> int:
    return int(state.cu.cuMemAllocManaged(size, flags))


@function(2)
def cudaMallocPitch(state: State, width: Any, height: Any) -> tuple[int, int]:
    if not width or not height:
        return 0, 0
    pointer, pitch = state.cu.cuMemAllocPitch(width, height, _ELEMENT)
    return int(pointer), int(pitch)


@function(1)
def cudaMalloc3D(state: State, extent: Any) -> Any:
    """Allocates rows of `width` bytes, in planes of `height` rows."""
    given("extent", extent, RT.cudaExtent)
    found = RT.cudaPitchedPtr()
    found.ptr, found.pitch = cudaMallocPitch(state, extent.width, extent.height * extent.depth)
    found.xsize, found.ysize = extent.width, extent.height
    return found


@function(1)
def cudaPointerGetAttributes(state: State, ptr: Any) -> Any:
    """Returns the attributes of a pointer. A pointer to memory unknown to the driver counts as unregistered host
    memory.
    """
    cu, address = state.cu, host_address(ptr)
    found = RT.cudaPointerAttributes()
    kinds = RT.cudaMemoryType
    try:
        memory = cu.cuPointerGetAttribute(_P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    except Failed:
        found.type, found.device = kinds.cudaMemoryTypeUnregistered, RT.cudaInvalidDeviceId
        found.hostPointer = address
        return found
    managed = cu.cuPointerGetAttribute(_P.CU_POINTER_ATTRIBUTE_IS_MANAGED, address)
    plain = kinds.cudaMemoryTypeHost if memory == T.CUmemorytype.CU_MEMORYTYPE_HOST else kinds.cudaMemoryTypeDevice
    found.type = kinds.cudaMemoryTypeManaged if managed else plain
    found.device = cu.cuPointerGetAttribute(_P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    for field, attribute in (("devicePointer", "DEVICE_POINTER"), ("hostPointer", "HOST_POINTER")):
        try:
            value = int(cu.cuPointerGetAttribute(getattr(_P, f"CU_POINTER_ATTRIBUTE_{attribute}"), address))
        except Failed:
            value = 0
        setattr(found, field, value)
    return found
