# SPDX-License-Identifier: Apache-2.0
"""The current device and its primary context, properties and peers of devices, and the last error."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from ..bindings import T
from ..wire.arguments import host_address, integer
from .convert import enum_of
from .state import State, function, only
from .types import RT

_INVALID_DEVICE = int(RT.cudaError_t.cudaErrorInvalidDevice)
_UUID_BYTES = 16
_A = T.CUdevice_attribute
_F = T.CUfunction_attribute


def _existing(state: State, device: Any) -> int:
    """The number of a device argument. Fails unless there is such a device."""
    number = integer(device)
    only(0 <= number < state.cu.cuDeviceGetCount(), _INVALID_DEVICE)
    return number


@function(context=False)
def cudaSetDevice(state: State, device: Any) -> None:
    """Sets the device of the calling thread, and makes the primary context of this device current."""
    state.thread.device = _existing(state, device)
    state.cu.cuCtxSetCurrent(state.primary(state.thread.device))


@function(1, context=False)
def cudaGetDevice(state: State) -> int:
    """Returns the device of the current context or, if there is none, the device that the thread has set."""
    return int(state.cu.cuCtxGetDevice()) if int(state.cu.cuCtxGetCurrent()) else state.thread.device


@function(context=False)
def cudaInitDevice(state: State, device: Any, deviceFlags: Any, flags: Any) -> None:
    """Makes the primary context of a device, and does not change the current device."""
    device = _existing(state, device)
    if integer(flags) & RT.cudaInitDeviceFlagsAreValid:
        state.cu.cuDevicePrimaryCtxSetFlags(device, deviceFlags)
    state.primary(device)


@function(context=False)
def cudaSetDeviceFlags(state: State, flags: Any) -> None:
    state.cu.cuDevicePrimaryCtxSetFlags(state.thread.device, flags)


@function(context=False)
def cudaDeviceReset(state: State) -> None:
    """Destroys all that the process has on the current device, for all threads, and clears sticky errors."""
    device = cudaGetDevice(state)
    state.drop_primary(device)
    state.cu.cuDevicePrimaryCtxReset(device)
    state.cu.cuCtxSetCurrent(0)
    state.thread.error = 0


@function(1, context=False)
def cudaChooseDevice(state: State, prop: Any) -> int:
    """Chooses the first device, as all devices of a machine are identical."""
    return 0


@function(1, context=False)
def cudaGetDeviceProperties(state: State, device: Any) -> Any:
    """Returns properties. Fields that no attribute and no other call of the driver gives are 0."""
    cu, device = state.cu, _existing(state, device)
    found = RT.cudaDeviceProp()
    for field in (name for name in dir(found) if not name.startswith("_")):
        attribute = _attribute_of(field)
        if attribute is not None:
            setattr(found, field, cu.cuDeviceGetAttribute(attribute, device))
    found.name = cu.cuDeviceGetName(256, device)
    found.totalGlobalMem = cu.cuDeviceTotalMem(device)
    ctypes.memmove(int(found.uuid.getPtr()), int(cu.cuDeviceGetUuid(device).getPtr()), _UUID_BYTES)
    found.maxThreadsDim = _axes(state, device, "MAX_BLOCK_DIM_")
    found.maxGridSize = _axes(state, device, "MAX_GRID_DIM_")
    return found


def _axes(state: State, device: int, name: str) -> list[int]:
    attributes = (getattr(_A, f"CU_DEVICE_ATTRIBUTE_{name}{axis}") for axis in "XYZ")
    return [state.cu.cuDeviceGetAttribute(attribute, device) for attribute in attributes]


_FIELDS = {
    "major": "COMPUTE_CAPABILITY_MAJOR",
    "minor": "COMPUTE_CAPABILITY_MINOR",
    "sharedMemPerBlock": "MAX_SHARED_MEMORY_PER_BLOCK",
    "sharedMemPerBlockOptin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "sharedMemPerMultiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "reservedSharedMemPerBlock": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "regsPerBlock": "MAX_REGISTERS_PER_BLOCK",
    "regsPerMultiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "maxBlocksPerMultiProcessor": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "maxThreadsPerMultiProcessor": "MAX_THREADS_PER_MULTIPROCESSOR",
    "multiProcessorCount": "MULTIPROCESSOR_COUNT",
    "memPitch": "MAX_PITCH",
    "totalConstMem": "TOTAL_CONSTANT_MEMORY",
    "deviceOverlap": "GPU_OVERLAP",
    "kernelExecTimeoutEnabled": "KERNEL_EXEC_TIMEOUT",
    "canMapHostMemory": "CAN_MAP_HOST_MEMORY",
    "ECCEnabled": "ECC_ENABLED",
    "pciBusID": "PCI_BUS_ID",
    "pciDeviceID": "PCI_DEVICE_ID",
    "pciDomainID": "PCI_DOMAIN_ID",
    "memoryBusWidth": "GLOBAL_MEMORY_BUS_WIDTH",
    "l2CacheSize": "L2_CACHE_SIZE",
    "persistingL2CacheMaxSize": "MAX_PERSISTING_L2_CACHE_SIZE",
    "accessPolicyMaxWindowSize": "MAX_ACCESS_POLICY_WINDOW_SIZE",
    "globalL1CacheSupported": "GLOBAL_L1_CACHE_SUPPORTED",
    "localL1CacheSupported": "LOCAL_L1_CACHE_SUPPORTED",
    "isMultiGpuBoard": "MULTI_GPU_BOARD",
    "multiGpuBoardGroupID": "MULTI_GPU_BOARD_GROUP_ID",
    "singleToDoublePrecisionPerfRatio": "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO",
    "hostRegisterReadOnlySupported": "READ_ONLY_HOST_REGISTER_SUPPORTED",
    "memoryPoolSupportedHandleTypes": "MEMPOOL_SUPPORTED_HANDLE_TYPES",
    "cooperativeMultiDeviceLaunch": "COOPERATIVE_MULTI_DEVICE_LAUNCH",
    "gpuDirectRDMASupported": "GPU_DIRECT_RDMA_SUPPORTED",
    "gpuDirectRDMAFlushWritesOptions": "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "gpuDirectRDMAWritesOrdering": "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "canUseHostPointerForRegisteredMem": "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
}
"""The attributes of those fields of cudaDeviceProp whose name in capitals is not the name of the attribute."""


def _attribute_of(field: str) -> Any:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", field).upper()
    return getattr(_A, f"CU_DEVICE_ATTRIBUTE_{_FIELDS.get(field, words)}", None)


# Peers ---------------------------------------------------------------------------------------------------------------


@function()
def cudaDeviceEnablePeerAccess(state: State, peerDevice: Any, flags: Any) -> None:
    state.cu.cuCtxEnablePeerAccess(state.primary(_existing(state, peerDevice)), flags)


@function()
def cudaDeviceDisablePeerAccess(state: State, peerDevice: Any) -> None:
    state.cu.cuCtxDisablePeerAccess(state.primary(_existing(state, peerDevice)))


# Errors --------------------------------------------------------------------------------------------------------------


@function(context=False)
def cudaGetLastError(state: State) -> int:
    """Returns the last error of a call of this thread, and clears it unless the context is lost."""
    return state.last_error(clear=True)


@function(context=False)
def cudaPeekAtLastError(state: State) -> int:
    return state.last_error(clear=False)


# Kernels -------------------------------------------------------------------------------------------------------------


@function(1)
def cudaFuncGetAttributes(state: State, func: Any) -> Any:
    """Returns the attributes of a kernel, given as a cudaFunction_t or cudaKernel_t. Python has no other handles."""
    found = RT.cudaFuncAttributes()
    own = {
        "maxDynamicSharedSizeBytes": "MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "preferredShmemCarveout": "PREFERRED_SHARED_MEMORY_CARVEOUT",
        "clusterDimMustBeSet": "CLUSTER_SIZE_MUST_BE_SET",
        "cacheModeCA": "CACHE_MODE_CA",
    }
    for field in (name for name in dir(found) if not name.startswith("_")):
        words = own.get(field, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", field).upper())
        attribute = getattr(_F, f"CU_FUNC_ATTRIBUTE_{words}", None)
        if attribute is not None:
            setattr(found, field, state.cu.cuFuncGetAttribute(attribute, host_address(func)))
    return found


@function()
def cudaKernelSetAttributeForDevice(state: State, kernel: Any, attr: Any, value: Any, device: Any) -> None:
    state.cu.cuKernelSetAttribute(enum_of(_F, attr), value, host_address(kernel), device)


@function(2, context=False)
def cudaGetDriverEntryPointByVersion(state: State, symbol: Any, cudaVersion: Any, flags: Any) -> tuple[Any, Any]:
    pointer, status = state.cu.cuGetProcAddress(symbol, cudaVersion, flags)
    return pointer, RT.cudaDriverEntryPointQueryResult(int(status))


@function(2, context=False)
def cudaGetDriverEntryPoint(state: State, symbol: Any, flags: Any) -> tuple[Any, Any]:
    return cudaGetDriverEntryPointByVersion(state, symbol, RT.CUDART_VERSION, flags)
