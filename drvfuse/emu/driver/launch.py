# SPDX-License-Identifier: Apache-2.0
"""Kernel launches: their checks, the packing of parameters, and launch attributes."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

from ..bindings import R, T
from ..machine import residency
from ..machine.failure import Failure
from ..machine.objects import Function
from ..machine.process import Process
from ..machine.residency import MAX_CLUSTER, PORTABLE_CLUSTER
from ..machine.work import Dim, Launch
from .entry import check, entry, host_address, pointers
from .function import NON_PORTABLE, max_dynamic, required_cluster
from .module import resolve

_ID = T.CUlaunchAttributeID
_EXTRA_END, _EXTRA_BUFFER, _EXTRA_SIZE = 0, 1, 2
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


@dataclass
class _Attributes:
    cooperative: bool = False
    programmatic: bool = False
    priority: int | None = None
    cluster: Dim | None = None


def _by_name(*names: str) -> set[Any]:
    """The attributes of these names that the installed bindings know."""
    return {
        getattr(_ID, f"CU_LAUNCH_ATTRIBUTE_{name}") for name in names if hasattr(_ID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    }


_HINTS = _by_name(
    *("IGNORE", "ACCESS_POLICY_WINDOW", "SYNCHRONIZATION_POLICY", "CLUSTER_SCHEDULING_POLICY_PREFERENCE"),
    *("MEM_SYNC_DOMAIN_MAP", "MEM_SYNC_DOMAIN", "PREFERRED_SHARED_MEMORY_CARVEOUT", "NVLINK_UTIL_CENTRIC_SCHEDULING"),
)
_NOT_EMULATED = _by_name("PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT", "DEVICE_UPDATABLE_KERNEL_NODE")


def attributes_of(config: Any) -> _Attributes:
    """What the attributes of a launch say; one that is not known is an error, never dropped."""
    found = _Attributes()
    attributes = list(config.attrs or [])
    check(config.numAttrs <= len(attributes))
    for attribute in attributes[: config.numAttrs]:
        kind, value = attribute.id, attribute.value
        if kind == _ID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            found.cooperative = bool(value.cooperative)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            found.programmatic = bool(value.programmaticStreamSerializationAllowed)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PRIORITY:
            found.priority = int(value.priority)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            dim = value.clusterDim
            found.cluster = (dim.x, dim.y, dim.z)
            check(all(size > 0 for size in found.cluster))
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
            preferred = value.preferredClusterDim
            check((preferred.x, preferred.y, preferred.z) == (1, 1, 1), R.CUDA_ERROR_NOT_SUPPORTED)
        elif kind in _NOT_EMULATED:
            raise Failure(R.CUDA_ERROR_NOT_SUPPORTED)
        else:
            check(kind in _HINTS)
    return found


# Parameters ---------------------------------------------------------------------------------------------------------


def _slot(value: Any, kind: Any) -> tuple[int, Any]:
    """(address of the value, what keeps it alive) of one entry of cuda.bindings' tuple form."""
    pointer = getattr(value, "getPtr", None)
    if kind is None:
        if callable(pointer):
            return pointer(), value
        if isinstance(value, ctypes.Structure):
            return ctypes.addressof(value), value
        if isinstance(value, int):  # an enum
            enum = ctypes.c_int64(value)
            return ctypes.addressof(enum), enum
        raise TypeError(
            f"Provided argument is of type {type(value)} but expected a structure or an object with getPtr()"
        )
    if kind is ctypes.c_void_p:
        if callable(pointer):
            value = pointer()
        raw = value.value or 0 if isinstance(value, ctypes.c_void_p) else int(value)
    else:
        if kind is ctypes.c_int and isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise OverflowError("value too large to convert to int")
        item = value if isinstance(value, kind) else kind(getattr(value, "value", value))
        padded = ctypes.create_string_buffer(bytes(item), 8)
        return ctypes.addressof(padded), padded
    whole = ctypes.c_uint64(raw)
    return ctypes.addressof(whole), whole


def _pack(function: Function, kernelParams: Any, extra: Any) -> bytes:
    """The parameter block of a launch, copied out of whichever form it was given in."""
    code = function.code
    block = bytearray(code.param_bytes)
    if not code.params:
        return bytes(block)
    if kernelParams is None or (isinstance(kernelParams, int) and kernelParams == 0):
        return _from_extra(function, extra)
    keep: Any
    if isinstance(kernelParams, tuple):
        if len(kernelParams) != 2 or len(kernelParams[0]) != len(kernelParams[1]):
            raise TypeError("Argument 'kernelParams' has tuples with different length")
        slots = [_slot(value, kind) for value, kind in zip(*kernelParams, strict=True)]
        check(len(slots) >= len(code.params))
        addresses, keep = [address for address, _ in slots], slots
    else:
        address, keep = host_address(kernelParams)
        addresses = pointers(address, len(code.params))
    for param, address in zip(code.params, addresses, strict=False):
        check(address)
        block[param.offset : param.offset + param.size] = ctypes.string_at(address, param.size)
    del keep
    return bytes(block)


def _from_extra(function: Function, extra: Any) -> bytes:
    address = host_address(extra)[0]
    check(address)
    buffer = size = 0
    while True:
        key, value = struct.unpack("QQ", ctypes.string_at(address, 16))
        if key == _EXTRA_END:
            break
        check(key in (_EXTRA_BUFFER, _EXTRA_SIZE))
        if key == _EXTRA_BUFFER:
            buffer = value
        else:
            size = ctypes.c_size_t.from_address(value).value
        address += 16
    needed: int = function.code.param_bytes
    check(buffer and size >= needed)
    return ctypes.string_at(buffer, needed)


# Clusters -----------------------------------------------------------------------------------------------------------


def most_blocks(function: Function) -> int:
    """The most blocks that a cluster of a kernel may have."""
    most = MAX_CLUSTER if function.attributes.get(int(NON_PORTABLE), 0) else PORTABLE_CLUSTER
    return min(most, function.code.max_cluster or most)


def cluster_of(proc: Process, function: Function, grid: Dim, asked: Dim | None) -> Dim | None:
    """The shape of a launch's clusters: that of its attribute, or that which the kernel requires; None for none.

    CUDA_ERROR_INVALID_VALUE where the two differ, or the grid is not a multiple; CUDA_ERROR_INVALID_CLUSTER_SIZE where
    a cluster has more blocks than the kernel or the device allows, or the kernel needs one; CUDA_ERROR_NOT_SUPPORTED
    on devices before compute capability 9.0.
    """
    required = required_cluster(function)
    shape = asked or required
    check(shape is not None or not function.code.needs_cluster, R.CUDA_ERROR_INVALID_CLUSTER_SIZE)
    if shape is None:
        return None
    check(required in (None, shape))
    blocks = shape[0] * shape[1] * shape[2]
    if proc.machine.capability < (9, 0):
        check(blocks == 1, R.CUDA_ERROR_NOT_SUPPORTED)
        return None
    check(blocks <= most_blocks(function), R.CUDA_ERROR_INVALID_CLUSTER_SIZE)
    check(not any(n % k for n, k in zip(grid, shape, strict=True)))
    return shape


# Launching ----------------------------------------------------------------------------------------------------------


def make(proc: Process, function: Function, grid: Dim, block: Dim, smem: int, params: bytes, a: _Attributes) -> Launch:
    """A checked launch of a function in its own context."""
    assert function.module is not None
    check(all(0 < size <= most for size, most in zip(grid, _MAX_GRID, strict=True)))
    check(all(0 < size <= most for size, most in zip(block, _MAX_BLOCK, strict=True)))
    cluster = cluster_of(proc, function, grid, a.cluster)
    launch = Launch(
        function.module.context, function, grid, block, smem, params, a.cooperative, a.programmatic, a.priority, cluster
    )
    check(launch.threads <= (function.code.max_threads or 1024))
    check(not function.code.reqntid or tuple(function.code.reqntid) == block)
    check(0 <= smem <= max_dynamic(proc, function))
    resident = proc.machine.resident_blocks(launch)
    too_much = R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    if launch.cluster_blocks > 1 and residency.blocks_per_sm(proc.machine.limits, function, launch.threads, smem):
        too_much = R.CUDA_ERROR_INVALID_CLUSTER_SIZE
    check(resident, too_much)
    check(not a.cooperative or launch.blocks <= resident, R.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
    return launch


def _launch(
    proc: Process, f: Any, grid: Dim, block: Dim, smem: int, hStream: Any, kernelParams: Any, extra: Any, a: _Attributes
) -> None:
    stream = proc.stream(hStream)
    function = resolve(proc, proc.get(f, Function), stream.context)
    assert function.module is not None
    check(function.module.context is stream.context, R.CUDA_ERROR_INVALID_HANDLE)
    params = _pack(function, kernelParams, extra)
    proc.enqueue(stream, make(proc, function, grid, block, smem, params, a))


@entry()
def cuLaunchKernel(
    proc: Process,
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
) -> None:
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    _launch(proc, f, grid, block, sharedMemBytes, hStream, kernelParams, extra, _Attributes())


@entry()
def cuLaunchCooperativeKernel(
    proc: Process,
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
) -> None:
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    _launch(proc, f, grid, block, sharedMemBytes, hStream, kernelParams, None, _Attributes(cooperative=True))


@entry()
def cuLaunchKernelEx(proc: Process, config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
    check(config is not None)
    grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
    block = (config.blockDimX, config.blockDimY, config.blockDimZ)
    _launch(proc, f, grid, block, config.sharedMemBytes, config.hStream, kernelParams, extra, attributes_of(config))
