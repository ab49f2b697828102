# SPDX-License-Identifier: Apache-2.0
"""Kernel launches: their checks, the packing of parameters, and launch attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.objects import Function
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run import residency
from ..machine.run.residency import MAX_CLUSTER, PORTABLE_CLUSTER
from ..machine.run.work import Dim, Launch
from ..wire.parameters import Layout, pack
from .entry import check, entry, unsupported
from .function import NON_PORTABLE, max_dynamic, required_cluster
from .module import refused_kernel, resolve

_ID = T.CUlaunchAttributeID
_VALUE_BYTES = 64  # the size of a CUlaunchAttributeValue
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


def _by_name(*names: str) -> set[Any]:
    """The attributes with these names that the installed bindings have."""
    return {
        getattr(_ID, f"CU_LAUNCH_ATTRIBUTE_{name}") for name in names if hasattr(_ID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    }


_HINTS = _by_name(
    *("IGNORE", "ACCESS_POLICY_WINDOW", "SYNCHRONIZATION_POLICY", "CLUSTER_SCHEDULING_POLICY_PREFERENCE"),
    *("MEM_SYNC_DOMAIN_MAP", "MEM_SYNC_DOMAIN", "PREFERRED_SHARED_MEMORY_CARVEOUT", "NVLINK_UTIL_CENTRIC_SCHEDULING"),
)
_NOT_EMULATED = _by_name("PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT", "DEVICE_UPDATABLE_KERNEL_NODE")


def _refused(kind: Any) -> Failure:
    return unsupported(f"the launch attribute {kind.name} is not emulated")


@dataclass
class Attributes:
    """The attributes of a launch. `hints` are the attributes without an effect here: id -> bytes of the value."""

    cooperative: bool = False
    programmatic: bool = False
    priority: int | None = None
    cluster: Dim | None = None
    hints: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, launch: Launch) -> Attributes:
        return cls(launch.cooperative, launch.programmatic, launch.priority, launch.cluster, dict(launch.hints))

    def set(self, kind: Any, value: Any) -> None:
        """Set an attribute by its CUlaunchAttributeID and its CUlaunchAttributeValue. An unknown attribute is
        refused.
        """
        if kind == _ID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            self.cooperative = bool(value.cooperative)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            self.programmatic = bool(value.programmaticStreamSerializationAllowed)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PRIORITY:
            self.priority = int(value.priority)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            dim = value.clusterDim
            self.cluster = (dim.x, dim.y, dim.z)
            check(all(size > 0 for size in self.cluster))
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
            preferred = value.preferredClusterDim
            if (preferred.x, preferred.y, preferred.z) != (1, 1, 1):
                raise _refused(kind)
        elif kind in _NOT_EMULATED:
            raise _refused(kind)
        else:
            check(kind in _HINTS)
            self.hints[int(kind)] = ctypes.string_at(int(value.getPtr()), _VALUE_BYTES)

    def get(self, kind: Any, value: Any) -> None:
        """Write an attribute to a CUlaunchAttributeValue that is all zero."""
        if kind == _ID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            value.cooperative = int(self.cooperative)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            value.programmaticStreamSerializationAllowed = int(self.programmatic)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PRIORITY:
            value.priority = self.priority or 0
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = self.cluster or (0, 0, 0)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION or kind in _NOT_EMULATED:
            raise _refused(kind)
        else:
            check(kind in _HINTS)
            found = self.hints.get(int(kind), b"")
            ctypes.memmove(int(value.getPtr()), found, len(found))


def attributes_of(config: Any) -> Attributes:
    """The checked attributes of a CUlaunchConfig."""
    found = Attributes()
    attributes = list(config.attrs or [])
    check(config.numAttrs <= len(attributes))
    for attribute in attributes[: config.numAttrs]:
        found.set(attribute.id, attribute.value)
    return found


# Parameters ---------------------------------------------------------------------------------------------------------


def layout_of(function: Function) -> Layout:
    code = function.code
    return Layout(code.param_bytes, tuple((p.offset, p.size) for p in code.params))


# Clusters -----------------------------------------------------------------------------------------------------------


def most_blocks(function: Function) -> int:
    """The most blocks that a cluster of a kernel may have."""
    most = MAX_CLUSTER if function.attributes.get(int(NON_PORTABLE), 0) else PORTABLE_CLUSTER
    return min(most, function.code.max_cluster or most)


def cluster_of(proc: Process, function: Function, grid: Dim, asked: Dim | None) -> Dim | None:
    """The shape of a launch's clusters: `asked`, the launch's attribute, else the shape that the kernel requires. None
    for no clusters.

    Raises Failure with one of these results:

    - CUDA_ERROR_INVALID_VALUE: the attribute and the kernel give different shapes, or the grid is no multiple of the
      shape
    - CUDA_ERROR_INVALID_CLUSTER_SIZE: a cluster has more blocks than the kernel or the device allows, or the kernel
      needs clusters and the launch has none
    - CUDA_ERROR_NOT_SUPPORTED: a cluster has several blocks, and the device's compute capability is below 9.0
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


def refused_launch(kernel: str, why: str, code: Any = R.CUDA_ERROR_INVALID_VALUE) -> Failure:
    """The failure of a launch whose shape or arguments do not fit the kernel or the device."""
    return Failure(code, Report("launch", why, kernel))


def _times(shape: Iterable[int]) -> str:
    return " x ".join(str(size) for size in shape)


def make(proc: Process, function: Function, grid: Dim, block: Dim, smem: int, params: bytes, a: Attributes) -> Launch:
    """A checked launch of a function in the context of the function's module."""
    assert function.module is not None
    if function.code.refused:
        raise refused_kernel(function.image, function.name)
    name = function.name
    for what, shape, limits in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
        if not all(0 < size <= limit for size, limit in zip(shape, limits, strict=True)):
            raise refused_launch(name, f"a {what} of {_times(shape)}: its sizes must be from 1 to {_times(limits)}")
    cluster = cluster_of(proc, function, grid, a.cluster)
    launch = Launch(
        *(function.module.context, function, grid, block, smem, params, a.cooperative, a.programmatic, a.priority),
        *(cluster, a.hints),
    )
    most = residency.max_threads(function)
    if launch.threads > most:
        raise refused_launch(name, f"blocks of {launch.threads} threads, and the kernel may have at most {most}")
    if function.code.reqntid and tuple(function.code.reqntid) != block:
        needs = _times(function.code.reqntid)
        raise refused_launch(name, f"blocks of {_times(block)} threads, and the kernel needs {needs}")
    room = max_dynamic(proc, function)
    if not 0 <= smem <= room:
        words = f"{smem} bytes of dynamic shared memory, and the kernel may have at most {room}; the attribute "
        raise refused_launch(name, words + "MAX_DYNAMIC_SHARED_SIZE_BYTES of the function sets this")
    resident = proc.machine.resident_blocks(launch)
    too_much = R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    if launch.cluster_blocks > 1 and residency.blocks_per_sm(proc.machine.limits, function, launch.threads, smem):
        too_much = R.CUDA_ERROR_INVALID_CLUSTER_SIZE
    check(resident, too_much)
    if a.cooperative and launch.blocks > resident:
        why = f"a cooperative grid of {launch.blocks} blocks, of which {resident} are resident at once"
        raise refused_launch(name, why, R.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
    return launch


def _launch(
    proc: Process, f: Any, grid: Dim, block: Dim, smem: int, hStream: Any, kernelParams: Any, extra: Any, a: Attributes
) -> None:
    stream = proc.stream(hStream)
    function = resolve(proc, proc.get(f, Function), stream.context)
    assert function.module is not None
    check(function.module.context is stream.context, R.CUDA_ERROR_INVALID_HANDLE)
    layout = layout_of(function)
    params = pack(layout, kernelParams, extra)
    if params is None:
        raise refused_launch(
            function.name,
            f"the kernel takes {layout.nbytes} bytes of parameters (number of parameters: {len(layout.parameters)}), "
            "and the launch gives fewer, or an address that cannot be read",
        )
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
    _launch(proc, f, grid, block, sharedMemBytes, hStream, kernelParams, extra, Attributes())


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
    _launch(proc, f, grid, block, sharedMemBytes, hStream, kernelParams, None, Attributes(cooperative=True))


@entry()
def cuLaunchKernelEx(proc: Process, config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
    check(config is not None)
    grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
    block = (config.blockDimX, config.blockDimY, config.blockDimZ)
    _launch(proc, f, grid, block, config.sharedMemBytes, config.hStream, kernelParams, extra, attributes_of(config))
