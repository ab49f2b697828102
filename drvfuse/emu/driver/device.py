# SPDX-License-Identifier: Apache-2.0
"""Devices, their attributes, and which of them can access one another."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..machine.memory import multicast
from ..machine.objects import Context, Pool
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from . import context as contexts
from .entry import check, entry, present, text

_A = T.CUdevice_attribute
_PREFIX = "CU_DEVICE_ATTRIBUTE_"

_SUPPORTED = (
    *("GPU_OVERLAP", "CAN_MAP_HOST_MEMORY", "CONCURRENT_KERNELS", "ECC_ENABLED", "UNIFIED_ADDRESSING"),
    *("STREAM_PRIORITIES_SUPPORTED", "GLOBAL_L1_CACHE_SUPPORTED", "LOCAL_L1_CACHE_SUPPORTED"),
    *("COMPUTE_PREEMPTION_SUPPORTED", "COOPERATIVE_LAUNCH", "HOST_REGISTER_SUPPORTED"),
    *("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED", "MEMORY_POOLS_SUPPORTED"),
    *("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "MEMPOOL_SUPPORTED_HANDLE_TYPES", "IPC_EVENT_SUPPORTED"),
    *("MANAGED_MEMORY", "CONCURRENT_MANAGED_ACCESS", "COOPERATIVE_MULTI_DEVICE_LAUNCH"),
    *("CAN_USE_64_BIT_STREAM_MEM_OPS", "CAN_USE_STREAM_WAIT_VALUE_NOR"),
    *("CAN_USE_STREAM_MEM_OPS_V1", "CAN_USE_64_BIT_STREAM_MEM_OPS_V1", "CAN_USE_STREAM_WAIT_VALUE_NOR_V1"),
)
# Attributes with the same value on every emulated device. `_attributes` has those that depend on the machine; all
# others are 0.
_FIXED = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1 << 10,
    "TOTAL_CONSTANT_MEMORY": 64 << 10,
    "WARP_SIZE": 32,
    "MAX_PITCH": 2**31 - 1,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 2_619_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 5120,
    "L2_CACHE_SIZE": 50 << 20,
    "TEXTURE_ALIGNMENT": 512,
    "ASYNC_ENGINE_COUNT": 3,
    "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2,
    **dict.fromkeys(_SUPPORTED, 1),
}


def _attributes(proc: Process, index: int) -> dict[str, int]:
    return {
        "COMPUTE_CAPABILITY_MAJOR": proc.machine.capability[0],
        "COMPUTE_CAPABILITY_MINOR": proc.machine.capability[1],
        "MULTIPROCESSOR_COUNT": proc.machine.sm_count,
        "MAX_THREADS_PER_MULTIPROCESSOR": proc.machine.limits.threads,
        "MAX_BLOCKS_PER_MULTIPROCESSOR": proc.machine.limits.blocks,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": proc.machine.limits.shared,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": proc.machine.limits.shared_block,
        "PCI_BUS_ID": index + 1,
        "CLUSTER_LAUNCH": int(proc.machine.capability >= (9, 0)),
        # An H200 without an IMEX channel reports 1 too, although allocations with fabric handles fail there.
        "HANDLE_TYPE_FABRIC_SUPPORTED": int(proc.machine.capability >= (9, 0)),
        "MULTICAST_SUPPORTED": int(multicast.supported(proc.machine, proc.machine.devices[index])),
    }


@entry(1)
def cuDeviceGet(proc: Process, ordinal: int) -> Any:
    return T.CUdevice(proc.device(ordinal).index)


@entry(1)
def cuDeviceGetCount(proc: Process) -> int:
    return len(proc.machine.devices)


@entry(1)
def cuDeviceGetName(proc: Process, length: int, dev: Any) -> bytes:
    proc.device(dev)
    check(length > 0)
    name = f"drvfuse emulated {proc.machine.arch}".encode()[: length - 1]
    return name.ljust(length, b"\0")


@entry(1, bindings=12, name="cuDeviceGetUuid_v2")
@entry(1)
def cuDeviceGetUuid(proc: Process, dev: Any) -> Any:
    uuid = T.CUuuid()
    ctypes.memmove(uuid.getPtr(), b"drvfuse-emu-gpu" + bytes([proc.device(dev).index]), 16)
    return uuid


@entry(1)
def cuDeviceGetAttribute(proc: Process, attrib: Any, dev: Any) -> int:
    """Returns a value for every attribute of the enum. It is 0 for a feature that the emulated device does not have."""
    index = proc.device(dev).index
    name = attrib.name.removeprefix(_PREFIX)
    check(name != "MAX")
    return _attributes(proc, index).get(name, _FIXED.get(name, 0))


@entry(1)
def cuDeviceGetProperties(proc: Process, dev: Any) -> Any:
    known, found = _FIXED, T.CUdevprop()
    proc.device(dev)
    found.maxThreadsPerBlock, found.SIMDWidth = known["MAX_THREADS_PER_BLOCK"], known["WARP_SIZE"]
    found.maxThreadsDim = [known[f"MAX_BLOCK_DIM_{axis}"] for axis in "XYZ"]
    found.maxGridSize = [known[f"MAX_GRID_DIM_{axis}"] for axis in "XYZ"]
    found.sharedMemPerBlock = known["MAX_SHARED_MEMORY_PER_BLOCK"]
    found.totalConstantMemory, found.memPitch = known["TOTAL_CONSTANT_MEMORY"], known["MAX_PITCH"]
    found.regsPerBlock, found.clockRate = known["MAX_REGISTERS_PER_BLOCK"], known["CLOCK_RATE"]
    found.textureAlign = known["TEXTURE_ALIGNMENT"]
    return found


@entry(2)
def cuDeviceGetLuid(proc: Process, dev: Any) -> tuple[bytes, int]:
    """Returns CUDA_ERROR_NOT_SUPPORTED, as devices have a LUID under Windows only."""
    proc.device(dev)
    raise Failure(R.CUDA_ERROR_NOT_SUPPORTED)


@entry(1)
def cuDeviceGetTexture1DLinearMaxWidth(proc: Process, pformat: Any, numChannels: int, dev: Any) -> int:
    """Returns CUDA_ERROR_NOT_SUPPORTED, as textures are not emulated."""
    proc.device(dev)
    check(numChannels in (1, 2, 4))
    return 0


@entry(1)
def cuDeviceGetExecAffinitySupport(proc: Process, typename: Any, dev: Any) -> int:
    """Returns 0: a context cannot be restricted to some multiprocessors."""
    proc.device(dev)
    check(typename == T.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT)
    return 0


@entry(1)
def cuDeviceTotalMem(proc: Process, dev: Any) -> int:
    return proc.device(dev).total


@entry(2)
def cuDeviceComputeCapability(proc: Process, dev: Any) -> tuple[int, int]:
    proc.device(dev)
    return proc.machine.capability


@entry(1)
def cuDeviceCanAccessPeer(proc: Process, dev: Any, peerDev: Any) -> int:
    return int(proc.machine.can_reach(proc.device(dev), proc.device(peerDev)))


@entry(1)
def cuDeviceGetP2PAttribute(proc: Process, attrib: Any, srcDevice: Any, dstDevice: Any) -> int:
    source, target = proc.device(srcDevice), proc.device(dstDevice)
    check(source is not target, R.CUDA_ERROR_INVALID_DEVICE)
    kind = T.CUdevice_P2PAttribute
    access = kind.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, kind.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return int(attrib in access and proc.machine.can_reach(source, target))


@entry(1, bindings=13)
def cuDeviceGetHostAtomicCapabilities(proc: Process, operations: list[Any], count: int, dev: Any) -> list[int]:
    """Returns no capabilities, as the attribute for native atomics on host memory is 0."""
    proc.device(dev)
    check(count)
    return [0] * count


@entry(1, bindings=13)
def cuDeviceGetP2PAtomicCapabilities(
    proc: Process, operations: list[Any], count: int, srcDevice: Any, dstDevice: Any
) -> list[int]:
    """Returns the capabilities of each operation: those of the PTX instructions, or 0 if `srcDevice` cannot reach
    `dstDevice`.
    """
    source, target = proc.device(srcDevice), proc.device(dstDevice)
    check(source is not target, R.CUDA_ERROR_INVALID_DEVICE)
    check(count)
    reached = proc.machine.can_reach(source, target)
    return [_atomics(operation) if reached else 0 for operation in operations[:count]]


def _atomics(operation: Any) -> int:
    """The CUatomicOperationCapability of an operation."""
    kinds = T.CUatomicOperationCapability
    words = kinds.CU_ATOMIC_CAPABILITY_SCALAR_32 | kinds.CU_ATOMIC_CAPABILITY_SCALAR_64
    reduced = kinds.CU_ATOMIC_CAPABILITY_REDUCTION | words
    name = operation.name.removeprefix("CU_ATOMIC_OPERATION_")
    if name.startswith("FLOAT"):
        return int(reduced) if name == "FLOAT_ADD" else 0
    if name in ("EXCHANGE", "CAS"):
        return int(words | kinds.CU_ATOMIC_CAPABILITY_SCALAR_128)
    return int(reduced | kinds.CU_ATOMIC_CAPABILITY_SIGNED | kinds.CU_ATOMIC_CAPABILITY_UNSIGNED)


@entry(1)
def cuDeviceGetPCIBusId(proc: Process, length: int, dev: Any) -> bytes:
    check(length > 0)
    return _bus_id(proc.device(dev).index).encode()[: length - 1].ljust(length, b"\0")


@entry(1)
def cuDeviceGetByPCIBusId(proc: Process, pciBusId: bytes) -> Any:
    asked = text(pciBusId).rstrip("\0").lower()
    names = [_bus_id(device.index).lower() for device in proc.machine.devices]
    return T.CUdevice(present(next((i for i, full in enumerate(names) if asked in (full, full[5:])), None)))


def _bus_id(index: int) -> str:
    return f"0000:{index + 1:02X}:00.0"


# Pools of a device ---------------------------------------------------------------------------------------------------


@entry(1)
def cuDeviceGetDefaultMemPool(proc: Process, dev: Any) -> Any:
    return T.CUmemoryPool(proc.tenancy(proc.device(dev)).default_pool.handle)


@entry(1)
def cuDeviceGetMemPool(proc: Process, dev: Any) -> Any:
    return T.CUmemoryPool(proc.tenancy(proc.device(dev)).pool.handle)


@entry()
def cuDeviceSetMemPool(proc: Process, dev: Any, pool: Any) -> None:
    device = proc.device(dev)
    found = proc.get(pool, Pool, R.CUDA_ERROR_INVALID_VALUE)
    check(found.device is device and not found.imported)
    proc.tenancy(device).pool = found


# Primary contexts ----------------------------------------------------------------------------------------------------


@entry(1)
def cuDevicePrimaryCtxRetain(proc: Process, dev: Any) -> Any:
    had = proc.tenancy(proc.device(dev))
    if had.primary is None:
        had.primary = proc.add(Context(proc, had.device, had.primary_flags, primary=True))
    had.primary_references += 1
    return T.CUcontext(had.primary.handle)


@entry()
def cuDevicePrimaryCtxRelease(proc: Process, dev: Any) -> None:
    had = proc.tenancy(proc.device(dev))
    primary = present(had.primary, R.CUDA_ERROR_INVALID_CONTEXT)
    had.primary_references -= 1
    if had.primary_references == 0:
        contexts.destroy(proc, primary)
        had.primary = None


@entry()
def cuDevicePrimaryCtxReset(proc: Process, dev: Any) -> None:
    had = proc.tenancy(proc.device(dev))
    if had.primary is not None:
        contexts.report_unfinished(proc, had.primary)
        contexts.destroy(proc, had.primary)
        had.primary, had.primary_references = None, 0


@entry(2)
def cuDevicePrimaryCtxGetState(proc: Process, dev: Any) -> tuple[int, int]:
    had = proc.tenancy(proc.device(dev))
    return had.primary_flags, int(had.primary is not None)


@entry()
def cuDevicePrimaryCtxSetFlags(proc: Process, dev: Any, flags: int) -> None:
    had = proc.tenancy(proc.device(dev))
    check(0 <= flags < 0x100)
    had.primary_flags = flags
